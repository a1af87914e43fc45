"""A pack's graph run by ONNX Runtime: arrays in, arrays out, and for live packs the state of a stream as a value."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import onnxruntime

from penstock.core.errors import InvalidInput, PackCorrupt, PackError
from penstock.core.pack import FP32, Pack, PackLive
from penstock.core.spec import Array

# T frames of a chunk, U frames that come of them

# What a step gives the next one, by the graph's inputs.
States = dict[str, Array]


@final
class Engine:
    """A one-shot pack, ready to run.

    Args:
        pack: As `read_pack` gave it.
        precision: `"fp32"` or `"int8"`.
        threads: Of ONNX Runtime.

    Raises:
        PackError: It is a live pack, or has no such precision.
        PackCorrupt: The graph does not give its recorded answers here.
    """

    def __init__(self, pack: Pack, *, precision: str = FP32, threads: int = 1) -> None:
        if pack.live is not None:
            raise PackError(f"the pack {pack.name!r} takes live signals; give it a sound or a microphone.")
        self.pack = pack
        self.precision = precision
        self.session = session_of(pack, precision, threads)
        self._input = pack.input
        self._varies = pack.varies
        self._name = pack.input_name
        self._names = [output.name for output in pack.outputs]
        if precision == FP32:
            _check_golden(pack, (self.run(example)[0] for example in pack.golden().inputs))

    def run(self, raw: Array) -> list[Array]:
        """What the network says of one raw input.

        Args:
            raw: As the pack's input says: RGBA of any size, or one chunk of a fixed shape, without a batch dimension.

        Returns:
            One array for each of the pack's outputs, without a batch dimension: the answer, then the embedding if there
            is one.

        Raises:
            InvalidInput: Another dtype or shape.
            TooLarge: A dimension is larger than is taken.
        """
        self._input.check(raw)
        outputs = self.session.run(self._names, {self._name: raw if self._varies else raw[None]})
        return [output[0] for output in outputs]


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """What came of one chunk of a stream.

    Args:
        output_U: The valid frames of the first output, `[U, ...]`, U from 0.
        states: What to give to the next step.
    """

    output_U: Array
    states: States


@final
class LiveEngine:
    """A live pack, ready to run.

    Args:
        pack: As `read_pack` gave it.
        precision: `"fp32"` or `"int8"`.
        threads: Of ONNX Runtime.

    Raises:
        PackError: It is not a live pack, or has no such precision.
        PackCorrupt: The graph does not give its recorded answers here.
    """

    def __init__(self, pack: Pack, *, precision: str = FP32, threads: int = 1) -> None:
        if pack.live is None:
            raise PackError(f"the pack {pack.name!r} takes no live signal; give it a camera, a video or pictures.")
        self.pack = pack
        self.live: PackLive = pack.live
        self.session = session_of(pack, precision, threads)
        self._names = [pack.outputs[0].name, self.live.output_length, *(state.output for state in self.live.states)]
        if precision == FP32:
            _check_golden(pack, (self.whole(example) for example in pack.golden().inputs))

    def begin(self) -> States:
        """The state of a stream before its first chunk."""
        return self.live.initial_states()

    def step(self, chunk_T: Array, states: States, *, last: bool = False) -> Heard:
        """The next chunk of a stream.

        Args:
            chunk_T: Up to `live.chunk` frames; 0 only to end a stream.
            states: What the step before gave, or `begin()`; it is not changed.
            last: Whether the stream ends with this chunk, so that what was held back comes too.

        Raises:
            InvalidInput: Another dtype or shape, or too many frames.
        """
        live, spec = self.live, self.pack.input
        frames = len(chunk_T) if chunk_T.ndim else -1
        if chunk_T.dtype != spec.numpy_dtype or chunk_T.shape[1:] != spec.shape[1:] or not 0 <= frames <= live.chunk:
            raise InvalidInput(
                f"a chunk is {chunk_T.dtype}{list(chunk_T.shape)}; {self.pack.name!r} takes {spec.describe()} or less."
            )
        whole_T = chunk_T
        if frames < live.chunk:
            whole_T = np.zeros((live.chunk, *chunk_T.shape[1:]), chunk_T.dtype)
            whole_T[:frames] = chunk_T
        given = {
            self.pack.input_name: whole_T[None],
            live.length: np.array([frames], np.int64),
            live.last: np.array([last]),
            **states,
        }
        output, length, *after = self.session.run(self._names, given)
        carried = dict(zip((state.input for state in live.states), after, strict=True))
        return Heard(output_U=output[0, : int(length[0])], states=carried)

    def whole(self, signal_T: Array) -> Array:
        """What comes of a whole signal, `[U, ...]`, in chunks as a stream's."""
        states, outputs = self.begin(), list[Array]()
        for chunk_T, last in chunks_of(signal_T, self.live.chunk):
            heard = self.step(chunk_T, states, last=last)
            states = heard.states
            outputs.append(heard.output_U)
        return np.concatenate(outputs)


def chunks_of(signal_T: Array, chunk: int) -> Iterator[tuple[Array, bool]]:
    """The chunks of a signal and whether each is the last; one of no frames for a signal of none."""
    for start in range(0, max(len(signal_T), 1), chunk):
        yield signal_T[start : start + chunk], start + chunk >= len(signal_T)


def session_of(pack: Pack, precision: str, threads: int) -> Any:
    """An ONNX Runtime session of a pack's graph.

    Raises:
        PackError: The pack has no such precision, or ONNX Runtime cannot run the graph.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # A core that spins between two frames is a battery that is empty sooner.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if pack.varies:
        # Planned once, memory would be planned for the first picture's size.
        options.enable_mem_pattern = False
    file = pack.model(precision)
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise PackError(
            f"ONNX Runtime {onnxruntime.__version__} cannot run {file} ({' '.join(str(error).split())[:200]}); export "
            f"the bundle again, or install a newer onnxruntime."
        ) from error


def _check_golden(pack: Pack, answers: Iterator[Array]) -> None:
    golden = pack.golden()
    try:
        found = list(answers)
    except Exception as error:
        # ONNX Runtime's own errors share no class but this.
        raise PackCorrupt(
            f"the graph of the pack {pack.name!r} is not what pack.json says ({' '.join(str(error).split())[:200]}); "
            f"export the bundle again."
        ) from error
    for number, (answer, recorded) in enumerate(zip(found, golden.outputs, strict=True)):
        if answer.shape != recorded.shape:
            raise PackCorrupt(
                f"the pack {pack.name!r} answers its example {number} with shape {list(answer.shape)}, where "
                f"{list(recorded.shape)} was recorded; export the bundle again."
            )
        difference = float(np.abs(answer.astype(np.float64) - recorded.astype(np.float64)).max(initial=0.0))
        # A NaN is no small difference.
        if not difference <= golden.tolerance:
            raise PackCorrupt(
                f"the pack {pack.name!r} answers its example {number} here otherwise than was recorded, by "
                f"{difference:.3g} where {golden.tolerance:.3g} is allowed; export the bundle again."
            )
