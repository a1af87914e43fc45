"""What the serving engine runs: one step of the network for a batch of slots.

An executor is the only thing that the engine knows of a network. A one-shot network ignores the slots; a streaming one
keeps a state for each and clears it where a row is `fresh`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

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
        from_B: Of an executor that adopted the table, the entry of each row's chunk; `chunk_B` is empty then.
        to_B: Of such an executor, the entry that each row's output goes to; None where it goes nowhere.
    """

    slots_B: Rows
    chunk_B: Array
    length_B: Rows
    fresh_B: Mask
    last_B: Mask | None = None
    from_B: Rows | None = None
    to_B: Rows | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one step gave.

    Args:
        output_B: `[B, *output.shape]`; it may be a view that the next step overwrites. Of an executor that adopted
            the table it is empty: the outputs are in their entries.
        length_B: How many frames of each output, along its first dimension, are valid; None where all always are.
        busy_B: Where the row wants another step without a new chunk; None where no row ever does.
        finite_B: Where the valid output holds neither NaN nor infinity; None where nobody looked.
    """

    output_B: Array
    length_B: Rows | None = None
    busy_B: Mask | None = None
    finite_B: Mask | None = None


class Executor(ABC):
    """Steps a network for batches of up to `max_rows` rows.

    Attributes:
        input: One raw input chunk.
        output: One output chunk.
        max_rows: The largest batch.
        runs_ahead: Whether a row never becomes busy, so that its next chunk may be begun before the last is finished.
    """

    input: TensorSpec
    output: TensorSpec
    max_rows: int
    runs_ahead: bool = False

    @abstractmethod
    def step(self, batch: Batch) -> Result:
        """Run the network once for the rows of the batch."""

    def adopt(self, input_E: Array, output_E: Array) -> bool:
        """Take chunks from a table's column, and put outputs into one, from now on, where this executor does so.

        Args:
            input_E: `[E, *input.shape]`, all entries.
            output_E: `[E, *output.shape]`.

        Returns:
            Whether it does; batches must name their entries then.
        """
        return False

    def begin(self, batch: Batch) -> Any:
        """Begin a step; several may be under way, and are run in the order in which they were begun.

        Returns:
            What `finish` makes a result of.
        """
        return self.step(batch)

    def finish(self, begun: Any) -> Result:
        """The result of a step that was begun, waited for where need be."""
        return begun
