"""What the serving engine runs: one step of the network for a batch of slots.

An executor is the only thing that the engine knows of a network. A one-shot network ignores the slots; a streaming one
keeps a state for each and clears it where a row is `fresh`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
        length_B: How many frames of each chunk, along its first dimension, are valid; 0 where the row goes on without a
            new chunk.
        fresh_B: Where a new stream begins: its state starts anew.
        last_B: Where a stream ends with this chunk; None where that says nothing to the network.
    """

    slots_B: Rows
    chunk_B: Array
    length_B: Rows
    fresh_B: Mask
    last_B: Mask | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one step gave.

    Args:
        output_B: `[B, *output.shape]`; it may be a view that the next step overwrites.
        length_B: How many frames of each output, along its first dimension, are valid; None where all always are.
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
