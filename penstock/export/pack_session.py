"""Run a pack's graph on whole inputs, and measure it."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.core.errors import ApplicationError, PackError, one_line
from penstock.core.generate import Generate
from penstock.core.machine.onnx_session import onnx_errors, onnx_session
from penstock.core.packs.pack import STEP, PackModel
from penstock.core.packs.pack_golden import PackGolden
from penstock.core.packs.pack_live import PackLive, chunks_of
from penstock.core.packs.pack_loop import PackLoop
from penstock.core.packs.pack_tensors import PackTensors, by_name
from penstock.core.record import ChunkSpec
from penstock.core.spec import Array, TensorSpec

# T frames of a signal, U frames that come of them

TIMED_RUNS = 30
TIMED_S = 2.0


def packed_session(file: Path, *, any_size: bool = False) -> Any:
    """Open an exported graph, for one CPU thread.

    Args:
        file: The graph.
        any_size: Whether inputs vary in size.

    Raises:
        PackError: ONNX Runtime does not run it.
    """
    try:
        return onnx_session(file, any_size=any_size)
    except onnx_errors() as error:
        raise PackError(f"ONNX Runtime does not run the exported graph ({one_line(error)}).") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Validation examples.

    Args:
        inputs: The graph's inputs, each without a batch dimension.
        targets: Index of the correct answer of each, `[N]`.
    """

    inputs: list[Array]
    targets: Array


@final
class PackedNetwork:
    """A pack's graph, run on whole inputs.

    Args:
        file: The graph; where answers take steps that of `begin`, with that of `step` beside it.
        tensors: Its inputs and outputs.
        live: Inputs and outputs of a live graph.
        generate: The state of an answer that takes steps.
    """

    def __init__(
        self, file: Path, tensors: PackTensors, *, live: PackLive | None = None, generate: Generate | None = None
    ) -> None:
        self._session = packed_session(file, any_size=tensors.any_size)
        self._tensors = tensors
        self._live = live
        self._loop: PackLoop | None = None
        if generate is not None:
            step = packed_session(file.with_name(STEP), any_size=True)
            self._loop = PackLoop(begin_session=self._session, step_session=step, tensors=tensors, generate=generate)

    def answer(self, given: Array) -> list[Array]:
        """Run one input without a batch dimension, or a whole signal; return the outputs, the answer first.

        Raises:
            PackError: ONNX Runtime fails on it, or an output does not have its declared type or shape.
        """
        try:
            if self._loop is not None:
                return [self._loop.answer(given)]
            if self._live is None:
                feeds, lengths = self._tensors.feeds(given)
                return self._tensors.answer(self._session.run(self._tensors.names, feeds), lengths)
            outputs = [output for _, output in self._steps(given, self._live)]
        except ApplicationError as error:
            raise PackError(str(error)) from None
        except onnx_errors() as error:
            raise PackError(f"the exported graph fails on an input ({one_line(error)}).") from error
        return [np.concatenate([output_U[0, : int(frames[0])] for output_U, frames, *_ in outputs])]

    def answers(self, inputs: Sequence[Array]) -> Array:
        """The answer to each input, `[N, ...]`."""
        return np.stack([self.answer(given)[0] for given in inputs])

    def feeds(self, given: Array) -> Iterator[dict[str, Array]]:
        """The graph's inputs of each run for one input; for a signal, one run per chunk."""
        if self._live is None:
            return iter([self._tensors.feeds(given)[0]])
        return (feeds for feeds, _ in self._steps(given, self._live))

    def _steps(self, given: Array, live: PackLive) -> Iterator[tuple[dict[str, Array], list[Array]]]:
        states, spec = live.initial_states(), self._tensors.input
        assert isinstance(spec, TensorSpec), spec
        for chunk_T, last in chunks_of(given, live.chunk):
            feeds = live.feeds(spec.name, chunk_T, states, last=last)
            outputs = self._session.run(None, feeds)
            yield feeds, outputs
            states = live.next_states(outputs[2:])

    def median_ms(self, given: Array) -> float:
        """Median milliseconds of one run on one thread; of `begin` where answers take steps."""
        return _median_ms(self._session, next(self.feeds(given)))

    def step_median_ms(self, given: Array) -> float | None:
        """Median milliseconds of the first step of an answer on one thread; None where answers take one step."""
        if self._loop is None:
            return None
        feeds, _ = self._loop.feeds(self._loop.begin(given))
        return _median_ms(self._loop.step_session, feeds)


def _median_ms(session: Any, feeds: dict[str, Array]) -> float:
    times_s: list[float] = []
    # The first run allocates.
    while len(times_s) <= TIMED_RUNS and sum(times_s) < TIMED_S:
        start_s = time.perf_counter()
        session.run(None, feeds)
        times_s.append(time.perf_counter() - start_s)
    return round(float(np.median(times_s[1:] or times_s)) * 1e3, 4)


def agreement_of(answer_N: Array, expected_N: Array, output: ChunkSpec) -> float:
    """Share of labelled answers with the expected likeliest entry along the last dimension.

    Args:
        answer_N: Answers, one chunk each.
        expected_N: The expected ones.
        output: One answer.
    """
    agree: list[Array] = []
    for answer, expected in zip(answer_N, expected_N, strict=True):
        found, recorded = by_name(output, answer), by_name(output, expected)
        for spec in output.tensors:
            same = found[spec.name].shape == recorded[spec.name].shape
            if spec.labels:
                likeliest = recorded[spec.name].argmax(-1)
                agree.append(np.ravel(same and found[spec.name].argmax(-1) == likeliest))
    agrees = np.concatenate(agree)
    return float(agrees.mean()) if agrees.size else 1.0


def measure(
    network: PackedNetwork, file: str, golden: PackGolden, validation: Validation | None, output: ChunkSpec
) -> PackModel:
    """Measure one graph of a pack.

    Args:
        network: The graph.
        file: Its name in the pack.
        golden: The bundle's answers.
        validation: Validation examples, if there are any.
        output: One answer.
    """
    labelled = any(spec.labels for spec in output.tensors)
    agreement = agreement_of(network.answers(golden.inputs), golden.outputs, output) if labelled else None
    accuracy = None
    if validation is not None and labelled:
        accuracy = round(float((network.answers(validation.inputs).argmax(-1) == validation.targets).mean()), 4)
    ms, step_ms = network.median_ms(golden.inputs[0]), network.step_median_ms(golden.inputs[0])
    step = None if step_ms is None else STEP
    return PackModel(file=file, ms=ms, agreement=agreement, accuracy=accuracy, step=step, step_ms=step_ms)
