"""Run a pack by ONNX Runtime: arrays in, arrays out, whole or step by step; the state of a stream is a value."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import onnxruntime

from penstock.core.errors import ApplicationError, InvalidInput, PackCorrupt, PackError, RequestError, one_line
from penstock.core.machine.onnx_session import onnx_errors, onnx_session
from penstock.core.packs.pack import FP32, Pack
from penstock.core.packs.pack_live import PackLive, chunks_of
from penstock.core.packs.pack_loop import PackLoop
from penstock.core.packs.pack_tensors import by_name
from penstock.core.prepare import RawSpec
from penstock.core.record import RecordSpec, given_by_name
from penstock.core.spec import Array
from penstock.core.texts.subword_text import SubwordReply

# T frames of a chunk, U output frames of a chunk

# By the graph's inputs.
States = dict[str, Array]


@final
class PackEngine:
    """A pack of whole inputs, ready to run; the answers may take steps.

    Args:
        pack: From `read_pack`.
        precision: `"fp32"` or `"int8"`.
        threads: CPU threads for one run.

    Raises:
        PackError: It is a live pack, or has no such precision.
        PackCorrupt: The fp32 graph does not give its recorded answers here.
    """

    def __init__(self, pack: Pack, *, precision: str = FP32, threads: int = 1) -> None:
        if pack.live is not None:
            raise PackError(f"the pack {pack.name!r} takes live signals; give it a sound or a microphone.")
        self.pack = pack
        self.precision = precision
        self.session, *steps = _sessions(pack, precision, threads)
        self._tensors = pack.tensors
        self._input = self._tensors.input
        self._loop: PackLoop | None = None
        if pack.generate is not None:
            self._loop = PackLoop(
                begin_session=self.session, step_session=steps[0], tensors=self._tensors, generate=pack.generate
            )
        if precision == FP32:
            _check_golden(pack, (self._chunk(example)[0] for example in pack.golden().inputs))

    def run(self, raw: Array) -> list[Array]:
        """Run the network on one raw input, for a pack of one input of fixed size or of any size.

        Args:
            raw: RGBA of any size, or one chunk of a fixed shape, as the pack's input says; without a batch dimension.

        Returns:
            One array per output, without a batch dimension or padding: the answer, then the embedding if there is one.

        Raises:
            InvalidInput: Another dtype or shape, or the pack takes several tensors or varying lengths.
            TooLarge: A dimension is larger than the pack takes.
        """
        if isinstance(self._input, RecordSpec):
            raise InvalidInput(
                f"the pack {self.pack.name!r} takes {self._input.describe()}; give them to predict() by name."
            )
        self._input.check(raw)
        if self._loop is not None or not self._tensors.is_plain:
            return list(self._named(self._chunk(raw)).values())
        feeds = {self._input.name: raw if self.pack.raw else raw[None]}
        outputs = self.session.run(self._tensors.names, feeds)
        return [output[0] for output in outputs]

    def predict(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Run the network on one input, its tensors by name.

        Args:
            inputs: One array for each input, without a batch dimension; or nested lists of numbers, as in JSON.

        Returns:
            One array for each output, without a batch dimension or padding; where answers take steps, the outputs of
            all steps, `[steps, ...]`.

        Raises:
            InvalidInput: A tensor is missing, unknown or not of its spec, or lengths disagree.
            TooLarge: A dimension is larger than the pack takes.
        """
        return self._named(self._chunk(self._input_of(inputs)))

    def generate(self, inputs: Mapping[str, Any]) -> "PackSteps":
        """Get the outputs of an answer that takes steps, each as soon as it is computed.

        Args:
            inputs: As for `predict`.

        Returns:
            An iterator over the outputs of the steps, as that of `penstock.load(...).generate`.

        Raises:
            InvalidInput: As `predict`, or the pack answers in one step.
            TooLarge: A dimension is larger than the pack takes.
        """
        if self._loop is None:
            raise InvalidInput(f"the pack {self.pack.name!r} answers in one step; use predict().")
        return PackSteps(self._loop, self._input_of(inputs))

    def predict_text(self, text: str) -> dict[str, Array]:
        """Run the network on a text, for a pack of an application that takes text; returns the outputs by name.

        Raises:
            InvalidInput: No text, or the pack takes none.
            TooLarge: More bytes than the pack takes.
        """
        return self.predict(self._text_input(text))

    def generate_text(self, text: str) -> "PackTextSteps":
        """Get the text of an answer to a text, a part with each step as soon as it is computed.

        Returns:
            An iterator over the parts, which together are the text of the server's reply.

        Raises:
            InvalidInput: No text, or the pack takes or gives none, or answers in one step.
        """
        reply = self.pack.reply
        if reply is None:
            raise InvalidInput(f"the pack {self.pack.name!r} gives no text; use generate() or predict_text().")
        return PackTextSteps(self.generate(self._text_input(text)), reply)

    def _text_input(self, text: str) -> dict[str, Array]:
        if self.pack.text is None:
            raise InvalidInput(f"the pack {self.pack.name!r} takes no text; give its inputs to predict() by name.")
        return {self.pack.text.tensor: self.pack.text.of_text(text)}

    def _input_of(self, inputs: Mapping[str, Any]) -> Array:
        spec = self._input
        if isinstance(spec, RecordSpec):
            named = spec.named(inputs)
            if all(isinstance(given, np.ndarray) for given in named.values()):
                return spec.of_many([named])[0, ...]
            return spec.from_numbers({name: _as_lists(given) for name, given in named.items()})
        (given,) = given_by_name([spec.name], inputs).values()
        if isinstance(spec, RawSpec):
            return spec.check(given)
        return spec.check(spec.cast(given)) if isinstance(given, np.ndarray) else spec.from_numbers(given)

    def _chunk(self, given: Array) -> list[Array]:
        """Run one input that was checked; returns the answer, and the embedding if there is one."""
        if self._loop is not None:
            return [self._loop.answer(given)]
        feeds, lengths = self._tensors.feeds(given)
        return self._tensors.answer(self.session.run(self._tensors.names, feeds), lengths)

    def _named(self, outputs: list[Array]) -> dict[str, Array]:
        answer, *others = outputs
        embedding = dict(zip((spec.name for spec in self.pack.outputs[self.pack.answers :]), others, strict=True))
        return by_name(self.pack.output, answer) | embedding


@final
class PackSteps(Iterator[Any]):
    """The steps of one answer, each computed when it is asked for.

    Each is the output of one step, `[*output.shape]`, or several outputs as a dictionary of arrays by name.

    Args:
        loop: The pack's graphs.
        given: One input.

    Attributes:
        ended: Reason why the answer ended, `"end"` or `"max_steps"`; None until then.
    """

    def __init__(self, loop: PackLoop, given: Array) -> None:
        self.ended: str | None = None
        self._output = loop.tensors.output
        self._steps = loop.steps(given)

    def __next__(self) -> Any:
        step = next(self._steps)
        self.ended = step.ended
        return self._output.unpack(step.output) if isinstance(self._output, RecordSpec) else step.output


@final
class PackTextSteps(Iterator[str]):
    """The parts of an answer's text, each computed when it is asked for.

    Args:
        steps: The steps of the answer.
        reply: How the tokens become a text.
    """

    def __init__(self, steps: PackSteps, reply: SubwordReply) -> None:
        self._steps = steps
        self._parts = reply.parts(steps)

    def __next__(self) -> str:
        return next(self._parts)

    @property
    def ended(self) -> str | None:
        """Reason why the answer ended, `"end"` or `"max_steps"`; None until then."""
        return self._steps.ended


@final
class LivePackEngine:
    """A live pack, ready to run.

    Args:
        pack: From `read_pack`.
        precision: `"fp32"` or `"int8"`.
        threads: CPU threads for one step.

    Raises:
        PackError: It is not a live pack, or has no such precision.
        PackCorrupt: The fp32 graph does not give its recorded answers here.
    """

    def __init__(self, pack: Pack, *, precision: str = FP32, threads: int = 1) -> None:
        if pack.live is None:
            raise PackError(f"the pack {pack.name!r} takes no live signal; give it a camera, a video or pictures.")
        self.pack = pack
        self.live: PackLive = pack.live
        (self._input,) = pack.inputs
        (self.session,) = _sessions(pack, precision, threads)
        states = (state.output for state in self.live.states)
        self._output_names = [pack.outputs[0].name, self.live.output_length, *states]
        if precision == FP32:
            _check_golden(pack, (self.whole(example) for example in pack.golden().inputs))

    def begin(self) -> States:
        """The state of a stream before its first chunk."""
        return self.live.initial_states()

    def step(self, chunk_T: Array, states: States, *, last: bool = False) -> tuple[Array, States]:
        """Run the next chunk of a stream.

        Args:
            chunk_T: Up to `live.chunk` frames; 0 only to end a stream.
            states: From the step before, or `begin()`; not modified.
            last: Whether the stream ends with this chunk, so that frames held back are returned too.

        Returns:
            The valid frames of the first output, `[U, ...]`, U from 0; and the states for the next step.

        Raises:
            InvalidInput: Another dtype or shape, too many frames, or a number that is NaN, infinite or out of range.
        """
        live, spec = self.live, self._input
        frames = len(chunk_T) if chunk_T.ndim else -1
        if chunk_T.dtype != spec.numpy_dtype or chunk_T.shape[1:] != spec.shape[1:] or not 0 <= frames <= live.chunk:
            raise InvalidInput(
                f"a chunk is {chunk_T.dtype}{list(chunk_T.shape)}; {self.pack.name!r} takes {spec.describe()} or less."
            )
        # The state would hold NaN until the end of the stream.
        spec.check_numbers(chunk_T)
        feeds = live.feeds(self._input.name, chunk_T, states, last=last)
        output, length, *after = self.session.run(self._output_names, feeds)
        return output[0, : int(length[0])], live.next_states(after)

    def whole(self, signal_T: Array) -> Array:
        """Run a whole signal chunk by chunk; `[U, ...]`."""
        states, outputs = self.begin(), list[Array]()
        for chunk_T, last in chunks_of(signal_T, self.live.chunk):
            output_U, states = self.step(chunk_T, states, last=last)
            outputs.append(output_U)
        return np.concatenate(outputs)


def _sessions(pack: Pack, precision: str, threads: int) -> list[Any]:
    any_size = pack.generate is not None or pack.tensors.any_size
    return [_session(file, threads, any_size=any_size) for file in pack.graphs(precision)]


def _session(file: Path, threads: int, *, any_size: bool) -> Any:
    try:
        return onnx_session(file, threads=threads, any_size=any_size)
    except onnx_errors() as error:
        raise PackError(
            f"ONNX Runtime {onnxruntime.__version__} cannot run {file} ({one_line(error, 200)}); export the bundle "
            f"again, or install a newer onnxruntime."
        ) from error


def _check_golden(pack: Pack, answers: Iterator[Array]) -> None:
    golden = pack.golden()
    try:
        found = list(answers)
    except (ApplicationError, RequestError, *onnx_errors()) as error:
        raise PackCorrupt(
            f"the graph of the pack {pack.name!r} is not what pack.json says ({one_line(error, 200)}); "
            f"export the bundle again."
        ) from error
    for number, (answer, recorded) in enumerate(zip(found, golden.outputs, strict=True)):
        if answer.shape != recorded.shape:
            raise PackCorrupt(
                f"the pack {pack.name!r} answers its example {number} with shape {list(answer.shape)}, where "
                f"{list(recorded.shape)} was recorded; export the bundle again."
            )
        worst = golden.agreement.worst(answer[None], recorded[None])
        # Written so that NaN fails.
        if not worst.difference <= golden.tolerance:
            tensor = f", most in {worst.tensor!r}" if worst.tensor else ""
            raise PackCorrupt(
                f"the pack {pack.name!r} differs on its example {number} from the recorded answer "
                f"{worst.beyond(golden.tolerance)}{tensor}; export the bundle again."
            )


def _as_lists(given: Any) -> Any:
    return given.tolist() if isinstance(given, np.ndarray) else given
