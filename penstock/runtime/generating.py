"""The interface between the serving engine and a network whose answers take steps. No torch."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.record import ChunkSpec
from penstock.core.spec import Array

# B rows of a batch or in progress

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class RowStates(Protocol):
    """The batched state of some answers in progress."""

    @property
    def rows(self) -> int:
        """Their number."""
        ...


class GenerationStep(NamedTuple):
    """One step of the rows in progress.

    Args:
        state: The state after it.
        output_B: The outputs, `[B, *output.shape]`.
        done_B: The rows whose network said that this was its last output.
        full_B: The rows that have no room for another step.
    """

    state: Any
    output_B: Array
    done_B: Mask
    full_B: Mask


class Generating(ABC):
    """Begins rows, steps rows in progress, and lets rows join and leave between steps.

    Attributes:
        input: One raw input chunk.
        output: The output of one step.
        max_rows: The most rows in progress.
        max_steps: Steps after which every answer ends.
    """

    input: ChunkSpec
    output: ChunkSpec
    max_rows: int
    max_steps: int

    @abstractmethod
    def limits(self, chunk_B: Array) -> Rows:
        """The maximum of steps of each request, `[B]`."""

    @abstractmethod
    def begin(self, chunk_B: Array) -> Any:
        """Begin the answers to raw inputs `[B, *input.shape]`; returns their `RowStates`."""

    @abstractmethod
    def join(self, states: list[Any]) -> Any:
        """Put the rows of several states into one, in order. The first must not be used any more."""

    @abstractmethod
    def keep(self, state: Any, keep_B: Mask) -> tuple[Any, Rows]:
        """Let rows leave; returns the state of the others, and the place that each had. The state is used up."""

    @abstractmethod
    def part(self, state: Any, rows_B: Rows) -> Any:
        """Copy some rows of a state."""

    @abstractmethod
    def step(self, state: Any) -> GenerationStep:
        """Run the network once for all rows of a state, none of which may be full."""
