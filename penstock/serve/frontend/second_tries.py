"""Second tries: the rows of an engine that died are submitted to other engines, where their budgets allow.

A row that the engine was running when it died may have killed it. Three rules bound what such a row can do:

- A row is tried twice at most.
- The rows that were being run go to one engine, all of them: through them, one death leads to one more at most.
- Where that happens, no row that was being run gets a second try for a minute. Rows that only waited still do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from penstock.serve.frontend.balancer import PredictedFinish, soonest
from penstock.serve.frontend.table_writer import PARTLY_ANSWERED, RETRIED_ROW, SUSPECT, SlotHandle, TableWriter
from penstock.serve.table.slots import FIRST, LAST, LOST_TWICE, LOW_PRIORITY, SlotTable

# For so long, rows that were being run when their engine died get no second try.
QUARANTINE_NS = 60_000_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingRow:
    """A request of one row that waited in a lost table.

    Args:
        handle: Its slot.
        entry: Its entry in the table's rings.
        arrival_ns: Its arrival time.
        deadline_ns: Its deadline.
        begun: Whether the engine had begun to run it.
    """

    handle: SlotHandle
    entry: int
    arrival_ns: int
    deadline_ns: int
    begun: bool


@final
class SecondTries:
    """Gives the rows of lost engines a second try.

    Args:
        now_ns: The clock of deadlines.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._quarantine_end_ns = 0

    def settle(self, lost: TableWriter, others: Sequence[TableWriter], status: int) -> int:
        """Submit the rows of a lost engine to others, and fail those that cannot be answered there in time.

        Args:
            lost: The writer of its table.
            others: The writers of the tables of the other replicas.
            status: The status of what fails.

        Returns:
            The number of rows that were submitted again.
        """
        found = [(handle, waiting_row(lost.table, handle)) for handle in lost.abandon()]
        failed = [(handle, status) for handle, row in found if row is None]
        rows = [row for _, row in found if row is not None]
        now_ns = self._now_ns()
        if any(row.begun and row.handle.history & SUSPECT for row in rows):
            self._quarantine_end_ns = now_ns + QUARANTINE_NS
        count, for_suspects = 0, list(others) if now_ns >= self._quarantine_end_ns else []
        for row in sorted(rows, key=lambda row: row.deadline_ns):
            twice = row.handle.history & RETRIED_ROW
            writers = [] if twice else for_suspects if row.begun else others
            taker = self._taker(row, writers)
            if taker is None:
                died_twice = row.begun and row.handle.history & SUSPECT
                failed.append((row.handle, LOST_TWICE if died_twice else status))
                continue
            if row.begun:
                for_suspects = [taker]
            row.handle.history |= RETRIED_ROW | SUSPECT if row.begun else RETRIED_ROW
            entry, table = row.entry, lost.table
            taker.resubmit(
                row.handle,
                table.input.reshape(-1, *table.layout.input.shape)[entry].tobytes(),
                deadline_ns=row.deadline_ns,
                arrival_ns=row.arrival_ns,
                length=int(table.length.reshape(-1)[entry]),
            )
            count += 1
        # Last: a client that is told may cancel other rows, which must be where their handles say.
        for handle, failure in failed:
            lost.fail_one(handle, failure)
        return count

    def _taker(self, row: WaitingRow, writers: Sequence[TableWriter]) -> TableWriter | None:
        """Choose where a row is answered in time, by the prediction for each table; None if it is nowhere."""
        left_ns, budget_ns = row.deadline_ns - self._now_ns(), row.deadline_ns - row.arrival_ns
        handle = row.handle
        predictions = [
            PredictedFinish(*writer.predict(1, budget_ns, handle.low_priority, handle.length)) for writer in writers
        ]
        if not any(prediction.finish_ns <= left_ns for prediction in predictions):
            return None
        return writers[soonest(predictions, left_ns)]


def waiting_row(table: SlotTable, handle: SlotHandle) -> WaitingRow | None:
    """Read the row of an abandoned slot; None if it is no request of one row, or is answered in part."""
    slot = handle.slot
    ring = int(table.submitted[slot] - 1) % table.chunks
    one_row = handle.ended and table.flags[slot, ring] & ~LOW_PRIORITY == FIRST | LAST
    if not one_row or handle.history & PARTLY_ANSWERED:
        return None
    return WaitingRow(
        handle=handle,
        entry=slot * table.chunks + ring,
        arrival_ns=int(table.arrival_ns[slot, ring]),
        deadline_ns=int(table.deadline_ns[slot, ring]),
        begun=bool(table.begun[slot] == table.generation[slot]),
    )
