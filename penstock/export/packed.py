"""A pack's graph run by ONNX Runtime on whole inputs, one at a time, and measured."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import onnxruntime

from penstock.core.errors import PackError
from penstock.core.pack import PackGolden, PackLive, PackModel
from penstock.core.spec import Array
from penstock.runtime.onnx_executor import quiet_options

# T frames of a signal, U frames that come of them

TIMED_RUNS = 30
TIMED_S = 2.0


def packed_session(file: Path, *, threads: int = 1, varies: bool = False) -> Any:
    """ONNX Runtime's session of a pack's graph.

    Args:
        file: The graph.
        threads: CPU threads for one run.
        varies: Whether what goes in has any size.

    Raises:
        PackError: ONNX Runtime does not run it.
    """
    options = quiet_options(threads)
    # Planned once, memory would be planned for the first size.
    options.enable_mem_pattern = not varies
    try:
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's own errors share no class but this
        raise PackError(f"ONNX Runtime does not run the exported graph ({_in_a_line(error)}).") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Examples whose right answers are known.

    Args:
        inputs: As they go into the graph, each without a batch dimension.
        targets: Of each, the index of the right answer, `[N]`.
    """

    inputs: list[Array]
    targets: Array


@final
class PackedNetwork:
    """A pack's graph on whole inputs.

    Args:
        file: The graph.
        input: The name of what goes in.
        varies: Whether that has any size, and no batch dimension.
        live: Of streams, how they go through it.
    """

    def __init__(self, file: Path, input: str, *, varies: bool = False, live: PackLive | None = None) -> None:
        self._session = packed_session(file, varies=varies)
        self._input = input
        self._varies = varies
        self._live = live

    def answer(self, given: Array) -> list[Array]:
        """What comes of one input without a batch dimension, or of a whole signal; the answer first.

        Raises:
            PackError: ONNX Runtime fails on it.
        """
        try:
            outputs = [output for _, output in self._runs(given)]
        except Exception as error:
            raise PackError(f"the exported graph fails on an input ({_in_a_line(error)}).") from error
        if self._live is None:
            return [output[0] for output in outputs[0]]
        return [np.concatenate([output_U[0, : int(frames[0])] for output_U, frames, *_ in outputs])]

    def answers(self, inputs: Sequence[Array]) -> Array:
        """The answer to each input, `[N, ...]`."""
        return np.stack([self.answer(given)[0] for given in inputs])

    def feeds(self, given: Array) -> Iterator[dict[str, Array]]:
        """What goes into each run for one input: of a signal a run for each chunk, the states carried along."""
        return (feeds for feeds, _ in self._runs(given))

    def _runs(self, given: Array) -> Iterator[tuple[dict[str, Array], list[Array]]]:
        if self._live is None:
            feeds = {self._input: given if self._varies else given[None]}
            yield feeds, self._session.run(None, feeds)
            return
        live = self._live
        states = live.initial_states()
        for start in range(0, len(given), live.chunk):
            part_T = given[start : start + live.chunk]
            chunk_T = np.zeros((1, live.chunk, *given.shape[1:]), given.dtype)
            chunk_T[0, : len(part_T)] = part_T
            feeds = {
                self._input: chunk_T,
                live.length: np.array([len(part_T)]),
                live.last: np.array([start + live.chunk >= len(given)]),
                **states,
            }
            outputs = self._session.run(None, feeds)
            yield feeds, outputs
            states = {state.input: value for state, value in zip(live.states, outputs[2:], strict=True)}

    def median_ms(self, given: Array) -> float:
        """Milliseconds that one run takes on one thread, the median of several."""
        feeds = next(self.feeds(given))
        times_s: list[float] = []
        # The first run allocates.
        while len(times_s) <= TIMED_RUNS and sum(times_s) < TIMED_S:
            start_s = time.perf_counter()
            self._session.run(None, feeds)
            times_s.append(time.perf_counter() - start_s)
        return round(float(np.median(times_s[1:] or times_s)) * 1e3, 4)


def share_alike(answer_N: Array, expected_N: Array) -> float:
    """The share of answers whose likeliest entry, along the last dimension, is the expected one."""
    return float((answer_N.argmax(-1) == expected_N.argmax(-1)).mean())


def measured(
    network: PackedNetwork, file: str, golden: PackGolden, validation: Validation | None, *, labelled: bool
) -> PackModel:
    """What a pack says of one of its graphs.

    Args:
        network: Runs the graph.
        file: Its name in the pack.
        golden: The bundle's answers.
        validation: Examples with right answers, where there are any.
        labelled: Whether one entry of an answer is the likeliest.
    """
    agreement = share_alike(network.answers(golden.inputs), golden.outputs) if labelled else None
    accuracy = None
    if validation is not None and labelled:
        accuracy = round(float((network.answers(validation.inputs).argmax(-1) == validation.targets).mean()), 4)
    return PackModel(file=file, ms=network.median_ms(golden.inputs[0]), agreement=agreement, accuracy=accuracy)


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
