"""Networks run eagerly by torch."""

from typing import Any, final

import torch
from torch import nn

from penstock.core.spec import Array, TensorSpec
from penstock.runtime.executor import Executor, StepInput, StepOutput

# B rows of the batch


@final
class TorchExecutor(Executor):
    """A one-shot network on the CPU, without graphs: any number of rows, no padding.

    Args:
        module: The network, in evaluation mode.
        input: One raw input chunk.
        output: One output chunk.
        max_rows: The largest batch.
    """

    def __init__(self, module: nn.Module, input: TensorSpec, output: TensorSpec, max_rows: int = 1024) -> None:
        self.input = input
        self.output = output
        self.max_rows = max_rows
        self._serve = served_function(module)

    def step(self, batch: StepInput) -> StepOutput:
        """Run the network once for the rows of the batch."""
        return StepOutput(output_B=self.predict(batch.chunk_B))

    def predict(self, chunk_B: Array) -> Array:
        """Run raw inputs `[B, *input.shape]`; returns outputs `[B, *output.shape]`."""
        with torch.inference_mode():
            return self._serve(torch.from_numpy(chunk_B)).numpy()


def served_function(module: nn.Module) -> Any:
    """Return the function to serve: `predict` where the network has one, else `forward`."""
    return getattr(module, "predict", module)
