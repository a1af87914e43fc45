"""Inputs and outputs of a live pack's graph: a chunk, and the state from one chunk to the next."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.spec import PROTOCOL_DATATYPES, Array

# T frames of a signal


@dataclass(frozen=True, kw_only=True, slots=True)
class PackState:
    """One tensor of a stream's state: an input of a step, and the output that feeds the next step.

    Args:
        input: Its name among the graph's inputs.
        output: Its name among the graph's outputs.
        dtype: A NumPy dtype name.
        shape: Including the batch dimension of one.
        initial: Value of every element before a stream's first chunk.
    """

    input: str
    output: str
    dtype: str
    shape: tuple[int, ...]
    initial: bool | float = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PackLive:
    """Inputs and outputs of a live graph.

    Args:
        rate_hz: Frames of the signal per second.
        chunk: Frames of a chunk.
        states: State from one chunk to the next.
        length: Input for the number of valid frames of the chunk, int64 `[1]`.
        last: Input for whether the stream ends with this chunk, bool `[1]`.
        output_length: Output for the number of valid output frames, int64 `[1]`.
    """

    rate_hz: float
    chunk: int
    states: tuple[PackState, ...]
    length: str
    last: str
    output_length: str

    def initial_states(self) -> dict[str, Array]:
        """The state of a stream before its first chunk, by the graph's inputs."""
        return {state.input: np.full(state.shape, state.initial, state.dtype) for state in self.states}

    def feeds(self, input_name: str, chunk_T: Array, states: Mapping[str, Array], *, last: bool) -> dict[str, Array]:
        """The graph's inputs for one step.

        Args:
            input_name: Name of the chunk's input.
            chunk_T: Up to `chunk` frames; fewer are padded with zeros.
            states: By the graph's inputs.
            last: Whether the stream ends with this chunk.
        """
        padded_T = np.zeros((self.chunk, *chunk_T.shape[1:]), chunk_T.dtype)
        padded_T[: len(chunk_T)] = chunk_T
        length, ends = np.array([len(chunk_T)], np.int64), np.array([last])
        return {input_name: padded_T[None], self.length: length, self.last: ends, **states}

    def next_states(self, outputs: Sequence[Array]) -> dict[str, Array]:
        """The states for the next step, from the graph's outputs behind the first two."""
        return dict(zip((state.input for state in self.states), outputs, strict=True))


def chunks_of(signal_T: Array, chunk: int) -> Iterator[tuple[Array, bool]]:
    """The chunks of a signal and whether each is the last; one of no frames for a signal of none."""
    for start in range(0, max(len(signal_T), 1), chunk):
        yield signal_T[start : start + chunk], start + chunk >= len(signal_T)


def check_live(live: PackLive) -> None:
    """Raise ValueError unless the fields are in range."""
    states = all(min(state.shape, default=0) >= 0 and state.dtype in PROTOCOL_DATATYPES for state in live.states)
    if not states or live.chunk < 1 or not live.rate_hz > 0:
        raise ValueError("a field of live is missing or out of range")
