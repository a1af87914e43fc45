"""Rows in progress of answers that take steps, those that begin, and launched steps, as the engine keeps them."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.runtime.generation.generating import Mask, RowStates
from penstock.serve.engine.scheduler import NO_ROWS, Rows

# B rows


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsInProgress:
    """The rows in progress.

    Args:
        state: Their state; None where there are none.
        slot_B: The slot of each.
        steps_B: Steps taken.
        limit_B: Maximum of steps.
        last_ns_B: Time of the last output; before the first, that of the arrival.
    """

    state: RowStates | None
    slot_B: Rows
    steps_B: Rows
    limit_B: Rows
    last_ns_B: Rows

    @property
    def rows(self) -> int:
        """Their number."""
        return self.slot_B.size

    def first(self, rows: int) -> "RowsInProgress":
        """Return the columns of the first rows."""
        columns = (self.slot_B, self.steps_B, self.limit_B, self.last_ns_B)
        slot_B, steps_B, limit_B, last_ns_B = (column[:rows] for column in columns)
        return replace(self, slot_B=slot_B, steps_B=steps_B, limit_B=limit_B, last_ns_B=last_ns_B)


class Beginning(NamedTuple):
    """Rows that begin: what can join, in one part or several, their slots, and their maximum of steps."""

    begun: list[Any]
    slot_B: Rows
    limit_B: Rows

    def without(self, failed_B: Mask) -> "Beginning":
        """Return the columns without rows that cannot join."""
        return self._replace(slot_B=self.slot_B[~failed_B], limit_B=self.limit_B[~failed_B])


class Launched(NamedTuple):
    """A launched step, and its time."""

    handle: Any
    start_ns: int


NOTHING = RowsInProgress(state=None, slot_B=NO_ROWS, steps_B=NO_ROWS, limit_B=NO_ROWS, last_ns_B=NO_ROWS)
