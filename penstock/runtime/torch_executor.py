"""Networks run eagerly by torch."""

from typing import final

import torch
from torch import nn

from penstock.core.named_arrays import SHORTEST_ROOM, chunks_of, feeds_of
from penstock.core.record import ChunkSpec
from penstock.core.spec import Array
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.runtime.named_network import NamedNetwork
from penstock.runtime.torch_threads import use_threads

# B rows of the batch


@final
class TorchExecutor(Executor):
    """A one-shot network on a CPU: any number of rows, padded to the longest of them.

    Args:
        module: The network, in evaluation mode.
        input: One raw input chunk.
        output: One output chunk.
        max_rows: The largest batch.
        shortest_room: Shorter batches are padded to it.
    """

    def __init__(
        self,
        module: nn.Module,
        input: ChunkSpec,
        output: ChunkSpec,
        max_rows: int = 1024,
        shortest_room: int = SHORTEST_ROOM,
    ) -> None:
        self.input = input
        self.output = output
        self.max_rows = max_rows
        self._shortest_room = shortest_room
        self._network = NamedNetwork(module, input, output)

    def step(self, batch: StepInput) -> StepOutput:
        """Run the network once for the rows of the batch."""
        return StepOutput(output_B=self.predict(batch.chunk_B))

    def predict(self, chunk_B: Array) -> Array:
        """Run raw inputs `[B, *input.shape]`; returns outputs `[B, *output.shape]`."""
        use_threads(self.threads)
        feeds, lengths = feeds_of(self.input, chunk_B, self._shortest_room)
        given = feeds | lengths
        arguments = (torch.from_numpy(given[name]) for name in self._network.arguments)
        with torch.inference_mode():
            results = self._network(*arguments)
        named = dict(zip(self._network.results, (result.numpy() for result in results), strict=True))
        return chunks_of(self.output, named, lengths)
