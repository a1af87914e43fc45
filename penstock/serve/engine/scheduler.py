"""Continuous batching as a pure function: which rows run next, and which expire because they would be late.

NumPy in, NumPy out, no clock and no sockets. Earliest deadline first; the next batch starts as soon as the last ends
and never waits to fill. The batch size is the one under which most ready rows meet their deadlines, the larger one on a
tie. While all deadlines can be met, that is the largest batch that makes no row late. Under overload it drops the rows
that would force small, slow batches (early drop, as in Nexus, SOSP 2019).

There are two priorities. Low-priority rows run where they make no other row late: in the room that is left in a batch
when no row of normal priority stays behind.
"""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.serve.engine.slot_scan import COMPILED, SlotScan
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import CANCELLED_NS, LOW_PRIORITY, SOFT_DEADLINE, SlotTable

# R ready rows

Rows = npt.NDArray[np.int64]

NO_ROWS: Rows = np.empty(0, np.int64)


class Columns(NamedTuple):
    """The columns that the scheduler reads: `[N]`, and `[N, K]` for the deadlines and flags.

    `scan` reads the same ones quickly; None where NumPy does, as of copies of them.
    """

    submitted: Rows
    taken: Rows
    consumed: Rows
    produced: Rows
    busy: Rows
    deadline_ns: Rows
    flags: Rows
    scan: SlotScan | None = None

    @classmethod
    def of(cls, table: SlotTable) -> "Columns":
        """Views of a table's columns."""
        columns = (getattr(table, name) for name in cls._fields if name != "scan")
        return cls(*columns, scan=SlotScan(table) if COMPILED else None)


class BatchSchedule(NamedTuple):
    """The scheduler's decision.

    Args:
        run: Slots of the next batch.
        expire: Slots whose current chunk can no longer be answered in time.
        waiting: Number of ready rows that stay behind.
    """

    run: Rows
    expire: Rows
    waiting: int


def ready_slots(columns: Columns) -> Rows:
    """Find the slots that have a step to take and room for its result."""
    if columns.scan is not None:
        return columns.scan.ready()
    chunks = columns.deadline_ns.shape[1]
    ready = columns.submitted != columns.consumed
    ready |= columns.busy != 0
    # With one entry a slot, comparing for equality is the cheaper test of the same.
    ready &= columns.produced - columns.taken < chunks if chunks > 1 else columns.produced == columns.taken
    return ready.nonzero()[0]


def schedule(columns: Columns, now_ns: int, costs: Costs) -> BatchSchedule:
    """Choose the next batch.

    Args:
        columns: The table's columns.
        now_ns: The time, on the clock of the deadlines.
        costs: The measured time of every batch size.
    """
    rows_R = ready_slots(columns)
    if rows_R.size == 0:
        return BatchSchedule(NO_ROWS, NO_ROWS, 0)
    if rows_R.size <= costs.largest and least_deadline_ns(columns, rows_R) - now_ns >= costs.of(rows_R.size):
        return BatchSchedule(rows_R, NO_ROWS, 0)
    entry_R = current_entry(columns, rows_R)
    slack_R = columns.deadline_ns[rows_R, entry_R] - now_ns
    flags_R = columns.flags[rows_R, entry_R]
    ready = ReadyRows(rows_R, slack_R, flags_R & SOFT_DEADLINE != 0)
    low_R = flags_R & LOW_PRIORITY != 0
    normal = _by_deadline(ready.where(~low_R), costs)
    if not low_R.any():
        return normal
    return add_low_priority(normal, ready, ready.where(low_R), costs)


def urgency(columns: Columns, now_ns: int, costs: Costs) -> tuple[int, int]:
    """Compute how soon a table needs the engine.

    Returns:
        The number of ready rows, and the nanoseconds after which a batch of them would be late for the most urgent.
    """
    rows, slack_ns = most_urgent(columns, now_ns)
    return rows, slack_ns - costs.of(min(rows, costs.largest)) if rows else 0


def most_urgent(columns: Columns, now_ns: int) -> tuple[int, int]:
    """Return the number of ready rows, and the nanoseconds until the first of their deadlines."""
    rows_R = ready_slots(columns)
    if rows_R.size == 0:
        return 0, 0
    return rows_R.size, least_deadline_ns(columns, rows_R) - now_ns


def least_deadline_ns(columns: Columns, rows_R: Rows) -> int:
    """Find the earliest deadline of the current chunks of ready rows."""
    if columns.scan is not None:
        return columns.scan.least_deadline_ns(rows_R)
    return int(columns.deadline_ns[rows_R, current_entry(columns, rows_R)].min())


def current_entry(columns: Columns, rows_R: Rows) -> Rows:
    """Find the ring entry of each row's current chunk."""
    if columns.deadline_ns.shape[1] == 1:
        return np.zeros(rows_R.size, np.int64)
    # A busy row still works on the chunk before the next one.
    return (columns.consumed[rows_R] - columns.busy[rows_R]) % columns.deadline_ns.shape[1]


class ReadyRows(NamedTuple):
    """Ready rows, the time left until their deadlines, and those that run even when late."""

    rows_R: Rows
    slack_R: Rows
    soft_R: npt.NDArray[np.bool_]

    def where(self, select_R: npt.NDArray[np.bool_] | Rows) -> "ReadyRows":
        """Select some rows."""
        return ReadyRows(self.rows_R[select_R], self.slack_R[select_R], self.soft_R[select_R])

    def by_slack(self) -> "ReadyRows":
        """Sort by deadline."""
        return self.where(np.argsort(self.slack_R, kind="stable"))


def add_low_priority(normal: BatchSchedule, ready: ReadyRows, low: ReadyRows, costs: Costs) -> BatchSchedule:
    """Add rows of low priority to the room in a batch.

    Args:
        normal: The batch of normal priority.
        ready: All ready rows.
        low: Those of low priority.
        costs: The measured time of every batch size.
    """
    if not normal.run.size:
        alone = _by_deadline(low, costs)
        return alone._replace(expire=np.concatenate([normal.expire, alone.expire]))
    taken = normal.run.size
    min_slack_ns = ready.slack_R[np.isin(ready.rows_R, normal.run)].min()
    rows, slack, soft = low.by_slack()
    expired = (slack < costs.min_compute_ns) & (~soft | (slack <= CANCELLED_NS // 2))

    def in_time(more: int) -> npt.NDArray[np.bool_]:
        return ~expired & ((slack >= costs.of(taken + more)) | soft)

    def too_many(more: int) -> bool:
        return costs.of(taken + more) > int(min_slack_ns) or int(np.count_nonzero(in_time(more))) < more

    most = 0 if normal.waiting else min(rows.size, costs.largest - taken)
    more = bisect_left(range(1, most + 1), True, key=too_many)
    run: Rows = np.concatenate([normal.run, rows[in_time(more)][:more]])
    expire: Rows = np.concatenate([normal.expire, rows[expired]])
    return BatchSchedule(run, expire, ready.rows_R.size - run.size - expire.size)


def _by_deadline(ready: ReadyRows, costs: Costs) -> BatchSchedule:
    rows_R, slack_R, soft_R = ready.by_slack()
    feasible = int(np.searchsorted(slack_R, costs.min_compute_ns))
    overdue_R = soft_R[:feasible] & (slack_R[:feasible] > CANCELLED_NS // 2)
    overdue, expired = rows_R[:feasible][overdue_R], rows_R[:feasible][~overdue_R]
    rows, slack, soft = rows_R[feasible:], slack_R[feasible:], soft_R[feasible:]
    met, size, start = _best_size(slack, overdue.size, costs)
    if not met and not overdue.size:
        # No row seems feasible. The row with the most time left runs all the same: it delays no other row, and only
        # runs can correct a prediction that is too high.
        start = max(rows.size - 1, 0)
    # Rows before `start` would be late in a batch of this size; those with a soft deadline run all the same.
    dropped = ~soft[:start]
    queue = np.concatenate([overdue, rows[:start][~dropped], rows[start:]])
    expire = np.concatenate([expired, rows[:start][dropped]])
    return BatchSchedule(queue[:size], expire, max(queue.size - size, 0))


def _best_size(slack: Rows, overdue: int, costs: Costs) -> tuple[int, int, int]:
    """Find the batch size under which most rows meet their deadlines.

    Args:
        slack: Time left of each row in nanoseconds, ascending.
        overdue: Number of rows that run first whatever their deadline.
        costs: The measured time of every batch size.

    Returns:
        The number of rows that meet their deadlines, the size, and the first row that meets its own in such a batch.
    """
    most = min(slack.size + overdue, costs.largest)
    best = (-1, 0, 1)  # rows that meet their deadlines, minus the rows dropped, the size
    for size in {most, *costs.rows} if most else ():
        if size > most:
            continue
        cost = costs.of(size)
        start = int(np.searchsorted(slack, cost))
        position = np.arange(overdue, overdue + slack.size - start)
        met = int(np.count_nonzero(slack[start:] >= cost * (1 + position // size)))
        best = max(best, (met, -start, size))
    return max(best[0], 0), best[2], -best[1]
