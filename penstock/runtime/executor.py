"""The interface between the serving engine and a network: one step for a batch of slots.

A one-shot network ignores the slots; a streaming one keeps a state for each and resets it where a row is `fresh`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.record import ChunkSpec
from penstock.core.spec import Array

# B rows of the batch

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """The rows of one step.

    Args:
        slots_B: The slot of each row, which holds its state.
        chunk_B: The raw input of each row, `[B, *input.shape]`. A view that the next step overwrites.
        length_B: Valid frames of each chunk, along its first dimension; 0 where the row continues without a new chunk.
        fresh_B: A new stream begins: reset the state.
        last_B: The stream ends with this chunk; None where the network does not need to know.
        from_B: For an executor that adopted the table, the entry of each row's chunk; `chunk_B` is empty then.
        to_B: For such an executor, the entry of each row's output; None discards the outputs.
    """

    slots_B: Rows
    chunk_B: Array
    length_B: Rows
    fresh_B: Mask
    last_B: Mask | None = None
    from_B: Rows | None = None
    to_B: Rows | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """The result of one step.

    Args:
        output_B: `[B, *output.shape]`; it may be a view that the next step overwrites. Empty from an executor that
            adopted the table: the outputs are in their entries.
        length_B: Valid frames of each output, along its first dimension; None where all always are.
        busy_B: The row needs another step without a new chunk; None where no row ever does.
        finite_B: The valid output holds neither NaN nor infinity; None where this was not checked.
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
        runs_ahead: A row never becomes busy, so that its next chunk may be begun before the last is finished.
        overlaps: A batch of other rows may be begun before the last one is finished; `begin` has read `chunk_B` when it
            returns, unless the table was adopted.
        staging_ns: Time that the chunk of a row takes to the device, beside the batch that runs there.
        pads_to_edges: A batch is padded to the edge of its length bucket, not to its longest row.
        uncaptured_batches: Batches on a GPU that ran without a CUDA graph though others have one.
        fallback: Why it runs in a slower way than it could, and what to do; empty where it does not.
        threads: CPU threads of torch for its steps; None leaves them as they are.
        state_bytes: Bytes of one stream's state; 0 where there is none, or it cannot be read.
        state_layout: The types and shapes in it, and the network's precision: states of one executor can be written
            into another one with the same.
    """

    input: ChunkSpec
    output: ChunkSpec
    max_rows: int
    runs_ahead: bool = False
    overlaps: bool = False
    staging_ns: float = 0.0
    pads_to_edges: bool = False
    uncaptured_batches: int = 0
    fallback: str = ""
    threads: int | None = None
    state_bytes: int = 0
    state_layout: str = ""

    @abstractmethod
    def step(self, batch: StepInput) -> StepOutput:
        """Run the network once for the rows of the batch."""

    def adopt(self, input_E: Array, output_E: Array) -> bool:
        """From now on, read chunks from a table's column and write outputs into one, if this executor can.

        Args:
            input_E: `[E, *input.shape]`, all entries.
            output_E: `[E, *output.shape]`.

        Returns:
            Whether it can; batches must name their entries then.
        """
        return False

    def begin(self, batch: StepInput) -> Any:
        """Begin a step; several may be begun, and run in order.

        Returns:
            The argument of `finish`.
        """
        return self.step(batch)

    def done(self, begun: Any) -> bool:
        """Return whether `finish` would not have to wait."""
        return True

    def finish(self, begun: Any) -> StepOutput:
        """Wait for a step that was begun, and return its result."""
        return begun

    def begin_read(self, slots_B: Rows) -> Any:
        """Begin to read the states of slots, as all steps that were begun leave them.

        Returns:
            The argument of `read_done` and `finish_read`.
        """
        raise NotImplementedError

    def read_done(self, begun: Any) -> bool:
        """Return whether `finish_read` would not have to wait."""
        return True

    def finish_read(self, begun: Any) -> Array:
        """Return states as bytes, `[B, state_bytes]`."""
        return begun

    def write_states(self, slots_B: Rows, state_BS: Array) -> None:
        """Give slots the states that `finish_read` returned, before a step in which they are not fresh."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - most executors have none
        """End the processes that it has; it runs no more steps."""
