"""One step of a streaming network by ONNX Runtime: what goes into the exported graph, and what comes of it.

Into it go the chunk, how many of its frames are valid, whose stream ends, and the leaves of the state in order; of it
come the output, how many of its frames are valid, and the leaves of the state after. A graph leaves out what it does
not need.
"""

from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from penstock.core.errors import BundleError
from penstock.nn.streaming import State, Step, leaves, map_state
from penstock.runtime.onnx_executor import session_of

# B rows of the batch, T frames of a chunk, U frames that come of them

CHUNK, LENGTH, LAST = "chunk", "length", "last"


def state_name(leaf: int) -> str:
    """Of a leaf of the state, what it is called in the graph."""
    return f"state_{leaf}"


@final
class ExportedStep:
    """Does on a CPU what a network's `step` does.

    Args:
        graph: The exported step.
        state: The network's, of any batch.
        threads: CPU threads for one step.

    Raises:
        BundleError: It is not the graph of such a network.
    """

    def __init__(self, graph: Path, state: State, *, threads: int) -> None:
        self._session: Any = session_of(graph, threads)
        count = len(leaves(state))
        self._names = [CHUNK, LENGTH, LAST, *map(state_name, range(count))]
        self._taken = {given.name for given in self._session.get_inputs()}
        if not self._taken <= set(self._names) or len(self._session.get_outputs()) != 2 + count:
            raise BundleError(f"the exported graph {graph} is not a step of this network; delete it.")

    def __call__(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor) -> Step:
        """See `Streaming.step`."""
        given = zip(self._names, (chunk_BT, length_B, last_B, *leaves(state)), strict=True)
        feeds = {name: tensor.numpy() for name, tensor in given if name in self._taken}
        output_BU, frames_B, *after = map(torch.from_numpy, self._session.run(None, feeds))
        left = iter(after)
        return Step(output_BU, frames_B, map_state(lambda _: next(left), state))
