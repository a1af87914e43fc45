"""Which rows run next, and which are refused because they can no longer be answered in time.

A pure function: NumPy in, NumPy out, no clock and no sockets. Earliest deadline first; the next batch starts as soon as
the last one ends and never waits to fill. Its size is the one under which most of the waiting rows meet their
deadlines, the larger one on a tie: while all can be kept that is the largest batch that harms nobody, and under
overload it gives up the rows that would force small, slow batches (as Nexus's early drop does, SOSP 2019).

There are two classes. Rows of the second, the background, run where they make nobody of the first late: in the room
that a batch has left when no row of the first class stays behind.
"""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.serve.costs import Costs
from penstock.serve.slots import BACKGROUND, CANCELLED_NS, PATIENT, SlotTable

# R ready rows

Rows = npt.NDArray[np.int64]

_NOBODY: Rows = np.empty(0, np.int64)


class Columns(NamedTuple):
    """What the scheduler reads of the table. `[N]`, and `[N, K]` for the deadlines and flags."""

    submitted: Rows
    taken: Rows
    consumed: Rows
    produced: Rows
    busy: Rows
    deadline_ns: Rows
    flags: Rows

    @classmethod
    def of(cls, table: SlotTable) -> "Columns":
        """The columns of a table, as views."""
        return cls(*(getattr(table, name) for name in cls._fields))


class Schedule(NamedTuple):
    """The scheduler's answer.

    Args:
        run: The slots of the next batch.
        expire: The slots whose current chunk can no longer be answered in time.
        waiting: How many rows stay behind.
    """

    run: Rows
    expire: Rows
    waiting: int


def ready_slots(columns: Columns) -> Rows:
    """The slots that have a step to take and room for its result."""
    chunks = columns.deadline_ns.shape[1]
    wanting = columns.submitted != columns.consumed
    if chunks > 1:
        # With one entry a slot, a busy row's own entry still counts as room taken, so it is covered by the line below.
        wanting |= columns.busy != 0
        wanting &= columns.produced - columns.taken < chunks
    else:
        wanting |= columns.busy != 0
        wanting &= columns.produced == columns.taken
    return wanting.nonzero()[0]


def schedule(columns: Columns, now_ns: int, costs: Costs) -> Schedule:
    """Choose the next batch.

    Args:
        columns: The table's columns.
        now_ns: The time, on the clock of the deadlines.
        costs: The measured time of every batch size.

    Returns:
        The slots to run, those to refuse, and how many wait.
    """
    rows_R = ready_slots(columns)
    if rows_R.size == 0:
        return Schedule(_NOBODY, _NOBODY, 0)
    chunks = columns.deadline_ns.shape[1]
    # A busy row still works on the chunk before the next one.
    entry_R = (columns.consumed[rows_R] - columns.busy[rows_R]) % chunks
    slack_R = columns.deadline_ns[rows_R, entry_R] - now_ns
    if rows_R.size <= costs.largest and slack_R.min() >= costs.of(rows_R.size):
        return Schedule(rows_R, _NOBODY, 0)
    waiting = _Waiting(rows_R, slack_R, columns.flags[rows_R, entry_R] & PATIENT != 0)
    background_R = columns.flags[rows_R, entry_R] & BACKGROUND != 0
    first = _under_pressure(waiting.where(~background_R), costs)
    if not background_R.any():
        return first
    return _with_background(first, waiting, waiting.where(background_R), costs)


def urgency(columns: Columns, now_ns: int, costs: Costs) -> tuple[int, int]:
    """How soon a table must be given the engine.

    Returns:
        Its ready rows, and the nanoseconds after which a batch of those would come too late for the most urgent.
    """
    rows_R = ready_slots(columns)
    if rows_R.size == 0:
        return 0, 0
    entry_R = (columns.consumed[rows_R] - columns.busy[rows_R]) % columns.deadline_ns.shape[1]
    slack_ns = int(columns.deadline_ns[rows_R, entry_R].min()) - now_ns
    return rows_R.size, slack_ns - costs.of(min(rows_R.size, costs.largest))


class _Waiting(NamedTuple):
    rows_R: Rows
    slack_R: Rows
    patient_R: npt.NDArray[np.bool_]

    def where(self, mask_R: npt.NDArray[np.bool_]) -> "_Waiting":
        return _Waiting(self.rows_R[mask_R], self.slack_R[mask_R], self.patient_R[mask_R])


def _with_background(first: Schedule, waiting: _Waiting, background: _Waiting, costs: Costs) -> Schedule:
    if not first.run.size:
        second = _under_pressure(background, costs)
        return second._replace(expire=np.concatenate([first.expire, second.expire]))
    taken = first.run.size
    tightest_ns = waiting.slack_R[np.isin(waiting.rows_R, first.run)].min()
    order = np.argsort(background.slack_R, kind="stable")
    rows, slack, patient = background.rows_R[order], background.slack_R[order], background.patient_R[order]
    hopeless = (slack < costs.least_ns) & (~patient | (slack <= CANCELLED_NS // 2))

    def welcome(more: int) -> npt.NDArray[np.bool_]:
        return ~hopeless & ((slack >= costs.of(taken + more)) | patient)

    def crowded(more: int) -> bool:
        return costs.of(taken + more) > int(tightest_ns) or int(np.count_nonzero(welcome(more))) < more

    most = 0 if first.waiting else min(rows.size, costs.largest - taken)
    more = bisect_left(range(1, most + 1), True, key=crowded)
    run: Rows = np.concatenate([first.run, rows[welcome(more)][:more]])
    expire: Rows = np.concatenate([first.expire, rows[hopeless]])
    return Schedule(run, expire, waiting.rows_R.size - run.size - expire.size)


def _under_pressure(waiting: _Waiting, costs: Costs) -> Schedule:
    rows_R, slack_R, patient_R = waiting
    order = np.argsort(slack_R, kind="stable")
    rows_R, slack_R, patient_R = rows_R[order], slack_R[order], patient_R[order]
    hopeful = int(np.searchsorted(slack_R, costs.least_ns))
    overdue_R = patient_R[:hopeful] & (slack_R[:hopeful] > CANCELLED_NS // 2)
    overdue, hopeless = rows_R[:hopeful][overdue_R], rows_R[:hopeful][~overdue_R]
    rows, slack, patient = rows_R[hopeful:], slack_R[hopeful:], patient_R[hopeful:]
    met, size, start = _best_size(slack, overdue.size, costs)
    if not met and not overdue.size:
        # Nothing seems possible. The row with the most time left is tried all the same: it disturbs nobody, and only
        # runs can show that the prediction was too dark.
        start = max(rows.size - 1, 0)
    # Rows before `start` cannot make a batch of this size; the patient among them come along all the same.
    given_up = ~patient[:start]
    queue = np.concatenate([overdue, rows[:start][~given_up], rows[start:]])
    expire = np.concatenate([hopeless, rows[:start][given_up]])
    return Schedule(queue[:size], expire, max(queue.size - size, 0))


def _best_size(slack: Rows, overdue: int, costs: Costs) -> tuple[int, int, int]:
    """The batch size under which most rows meet their deadlines.

    Args:
        slack: Time left of each row in nanoseconds, ascending.
        overdue: Rows that run first whatever their deadline.
        costs: The measured time of every batch size.

    Returns:
        How many rows meet theirs, the size, and the first row that such a batch can still serve.
    """
    most = min(slack.size + overdue, costs.largest)
    best = (-1, 0, 1)  # rows that meet their deadlines, minus the rows given up, the size
    for size in {most, *costs.rows} if most else ():
        if size > most:
            continue
        cost = costs.of(size)
        start = int(np.searchsorted(slack, cost))
        behind = np.arange(overdue, overdue + slack.size - start)
        met = int(np.count_nonzero(slack[start:] >= cost * (1 + behind // size)))
        best = max(best, (met, -start, size))
    return max(best[0], 0), best[2], -best[1]
