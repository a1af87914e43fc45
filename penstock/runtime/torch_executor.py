"""Networks run eagerly by torch."""

from collections.abc import Iterable
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from penstock.core.named_arrays import chunks_of, feeds_of
from penstock.core.record import ChunkSpec
from penstock.core.spec import Array
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.runtime.named_network import NamedNetwork

# B rows of the batch


@final
class TorchExecutor(Executor):
    """A one-shot network, without graphs: any number of rows, padded to the longest of them.

    Args:
        module: The network, in evaluation mode, on `device`.
        input: One raw input chunk.
        output: One output chunk.
        max_rows: The largest batch.
        device: torch's name of the device.
        dtype: The dtype of autocast; None for none.
    """

    def __init__(
        self,
        module: nn.Module,
        input: ChunkSpec,
        output: ChunkSpec,
        max_rows: int = 1024,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.input = input
        self.output = output
        self.max_rows = max_rows
        self._network = NamedNetwork(module, input, output)
        self._device = torch.device(device)
        self._autocast = partial(torch.autocast, self._device.type, dtype, enabled=dtype is not None)
        self._dtypes = {spec.name: getattr(torch, spec.dtype) for spec in output.tensors}

    def step(self, batch: StepInput) -> StepOutput:
        """Run the network once for the rows of the batch."""
        return StepOutput(output_B=self.predict(batch.chunk_B))

    def predict(self, chunk_B: Array) -> Array:
        """Run raw inputs `[B, *input.shape]`; returns outputs `[B, *output.shape]`."""
        feeds, lengths = feeds_of(self.input, chunk_B)
        given = feeds | lengths
        arguments = (torch.from_numpy(given[name]) for name in self._network.arguments)
        if self._device.type == "cpu":
            with torch.inference_mode():
                results = self._network(*arguments)
        else:
            results = self._on_device(arguments)
        named = dict(zip(self._network.results, (result.numpy() for result in results), strict=True))
        return chunks_of(self.output, named, lengths)

    def _on_device(self, arguments: Iterable[Tensor]) -> list[Tensor]:
        with torch.inference_mode(), self._autocast():
            results = self._network(*(argument.to(self._device) for argument in arguments))
        # Autocast gives its own dtype; the outputs have the declared one.
        named = zip(self._network.results, results, strict=True)
        return [result.to("cpu", self._dtypes.get(name, result.dtype)) for name, result in named]
