"""What the serving engine runs: one step of the network for a batch of slots.

An executor is the only thing that the engine knows of a network. A one-shot network ignores the slots; a streaming one
keeps a state for each and clears it where a row is `fresh`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from penstock.core.spec import Array, TensorSpec

# B rows of the batch

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The rows of one step.

    Args:
        slots_B: The slot of each row, where its state lives.
        chunk_B: The raw input of each row, `[B, *input.shape]`. A view that is overwritten by the next step.
        length_B: How much of each chunk is valid; 0 where the row goes on without a new chunk.
        fresh_B: Where a new stream begins: its state starts anew.
    """

    slots_B: Rows
    chunk_B: Array
    length_B: Rows
    fresh_B: Mask


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one step gave.

    Args:
        output_B: `[B, *output.shape]`; it may be a view that the next step overwrites.
        length_B: How much of each output is valid; None where all of it always is.
        busy_B: Where the row wants another step without a new chunk; None where no row ever does.
    """

    output_B: Array
    length_B: Rows | None = None
    busy_B: Mask | None = None


class Executor(ABC):
    """Steps a network for batches of up to `max_rows` rows."""

    input: TensorSpec
    output: TensorSpec
    max_rows: int

    @abstractmethod
    def step(self, batch: Batch) -> Result:
        """Run the network once for the rows of the batch."""


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

    def step(self, batch: Batch) -> Result:
        """Run the network once for the rows of the batch."""
        return Result(output_B=self.predict(batch.chunk_B))

    def predict(self, chunk_B: Array) -> Array:
        """The network's outputs `[B, *output.shape]` for raw inputs `[B, *input.shape]`."""
        with torch.inference_mode():
            return self._serve(torch.from_numpy(chunk_B)).numpy()


def served_function(module: nn.Module) -> Any:
    """The function of a network that is served: its `predict` where it has one, else its `forward`."""
    return getattr(module, "predict", module)
