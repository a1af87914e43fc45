"""One step of a streaming network, run by ONNX Runtime.

Inputs of the exported graph are the chunk, its valid frames, the rows whose stream ends, and the leaves of the state in
order. Outputs are the output, its valid frames, and the leaves of the new state. A graph omits inputs that it does not
need.

Most batches are steady: whole chunks in the middle of streams, with a constant number of buffered frames in every
layer. A second, cheaper graph handles those, if the network has such a state. Its inputs and outputs are the chunk and
the leaves that are not counts.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import BundleError
from penstock.core.spec import Array
from penstock.nn.streaming import State, Step, leaves, map_state
from penstock.runtime.onnx.onnx_executor import open_graph, steady_graph

# B rows of the batch, T frames of a chunk, U frames of its output

CHUNK, LENGTH, LAST = "chunk", "length", "last"
OUTPUT, OUTPUT_LENGTH = "output", "output_length"
# Metadata of the steady graph: the counts of the state as JSON, and the frames that each step gives.
COUNTS, GIVEN = "counts", "given"


def state_name(leaf: int) -> str:
    """Name of a leaf of the state in the graph."""
    return f"state_{leaf}"


def next_name(leaf: int) -> str:
    """Name of the same leaf after the step."""
    return f"next_{leaf}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Steady:
    """A graph for steady batches.

    Args:
        session: The session of ONNX Runtime.
        counts: The constant counts of the state, by leaf.
        given: Frames that a step gives.
    """

    session: Any
    counts: dict[int, int]
    given: int

    def takes(self, length_B: Array, frames: int, last_B: Array, state: list[Array]) -> bool:
        """Check that a batch is steady."""
        if last_B.any() or not (length_B == frames).all():
            return False
        return all((state[leaf] == count).all() for leaf, count in self.counts.items())

    def step(self, chunk_BT: Array, state: list[Array]) -> list[Array]:
        """Run a steady batch; inputs and outputs are those of the graph for all batches."""
        feeds = {state_name(leaf): value for leaf, value in enumerate(state) if leaf not in self.counts}
        output_BU, *after = self.session.run(None, {CHUNK: chunk_BT} | feeds)
        left = iter(after)
        now = [value if leaf in self.counts else next(left) for leaf, value in enumerate(state)]
        return [output_BU, np.full(len(chunk_BT), self.given), *now]


@final
class ExportedStep:
    """A network's `step` on a CPU, run by ONNX Runtime.

    Args:
        graph: The exported step; the graph of steady batches lies beside it.
        state: A state of the network, of any batch.
        threads: CPU threads for one step.
        chunk: Name of the chunk's input.
        any_batch: Whether the graph must take a batch of any size.

    Raises:
        BundleError: It is not the graph of this network.
    """

    def __init__(self, graph: Path, state: State, *, threads: int, chunk: str = CHUNK, any_batch: bool = True) -> None:
        self._session: Any = open_graph(graph, threads, any_batch=any_batch)
        count = len(leaves(state))
        self._names = [chunk, LENGTH, LAST, *map(state_name, range(count))]
        self._taken = {given.name for given in self._session.get_inputs()}
        if not self._taken <= set(self._names) or len(self._session.get_outputs()) != 2 + count:
            raise BundleError(f"the exported graph {graph} is not a step of this network; delete it.")
        beside = steady_graph(graph)
        self._steady = _steady_of(beside, count, threads) if beside.is_file() else None

    def __call__(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor) -> Step:
        """See `Streaming.step`."""
        chunk, length, last, *before = (given.numpy() for given in (chunk_BT, length_B, last_B, *leaves(state)))
        if self._steady is not None and self._steady.takes(length, chunk.shape[1], last, before):
            made = self._steady.step(chunk, before)
        else:
            given = zip(self._names, (chunk, length, last, *before), strict=True)
            made = self._session.run(None, {name: value for name, value in given if name in self._taken})
        output_BU, frames_B, *after = map(torch.from_numpy, made)
        left = iter(after)
        return Step(output_BU, frames_B, map_state(lambda _: next(left), state))


def _steady_of(graph: Path, leaves: int, threads: int) -> _Steady:
    session = open_graph(graph, threads)
    said = session.get_modelmeta().custom_metadata_map
    try:
        counts = {int(leaf): int(count) for leaf, count in json.loads(said[COUNTS]).items()}
        steady = _Steady(session=session, counts=counts, given=int(said[GIVEN]))
    except (KeyError, ValueError) as error:
        raise BundleError(f"the exported graph {graph} has no valid metadata ({error}); delete it.") from None
    others = {state_name(leaf) for leaf in range(leaves) if leaf not in counts}
    if {given.name for given in session.get_inputs()} != {CHUNK, *others}:
        raise BundleError(f"the exported graph {graph} is not a step of this network; delete it.")
    return steady
