"""Continuous batching of answers that take steps, as a pure function: begin waiting rows, or step those in progress.

Rows that wait are chosen and expire as for answers of one step (`scheduler`, `length_scheduler`), by the deadlines of
their first outputs and the costs of beginning; the first step counts as theirs. Beginning them delays the next output
of the rows in progress. So:

1. At most as many rows are in progress as a step carries within its budget.
2. As many of the chosen rows begin as leave time for a step of all before the next output of the rows in progress is
   due. Where that is none of them, the rows in progress take a step.
3. A row that would miss its own deadline by waiting for one more step begins all the same, alone: an output that is a
   little late costs less than an answer that is refused.

A row expires only where its first output would be late after the shortest step ever measured. So with none in progress,
one that could be in time always begins, and its step corrects a prediction that is too high.
"""

from typing import NamedTuple

import numpy as np

from penstock.serve.engine.length_scheduler import schedule_lengths
from penstock.serve.engine.scheduler import NO_ROWS, Columns, Rows, Schedule, schedule
from penstock.serve.table.generation_costs import GenerationCosts
from penstock.serve.table.length_costs import LengthCosts


class InProgress(NamedTuple):
    """The rows in progress.

    Args:
        rows: Their number.
        due_ns: When their next output is due.
    """

    rows: int
    due_ns: int


class GenerationSchedule(NamedTuple):
    """The scheduler's decision.

    Args:
        begin: Slots whose answers begin now.
        expire: Slots whose first output can no longer be in time.
        step: Whether the rows in progress take a step.
        waiting: Number of rows that stay behind.
    """

    begin: Rows
    expire: Rows
    step: bool
    waiting: int


def schedule_generation(
    columns: Columns, length: Rows, now_ns: int, progress: InProgress, costs: GenerationCosts
) -> GenerationSchedule:
    """Choose what runs next.

    Args:
        columns: The table's columns, in which no row is busy: those in progress are not ready.
        length: The length of each row, `[N, K]`.
        now_ns: The time, on the clock of the deadlines.
        progress: The rows in progress.
        costs: The measured times.
    """
    # The first output comes a step after the beginning. Rows expire by the least time that a step ever took: by a
    # prediction that is too high all of them would, and then no run could correct it.
    chosen = _waiting(columns, length, now_ns + costs.step.min_compute_ns, costs)
    free = costs.max_rows - progress.rows
    rows = min(chosen.run.size, free)
    if rows > 0 and chosen.run.size > 1:
        urgent = np.argsort(columns.deadline_ns[chosen.run, 0], kind="stable")
        chosen = chosen._replace(run=chosen.run[urgent])
    if rows > 0 and progress.rows:
        # Rows of similar length were chosen, so that the longest decides for all.
        longest = int(length[chosen.run].max())
        left_ns = progress.due_ns - now_ns
        rows = _most(rows, progress.rows, longest, left_ns, costs)
        if rows == 0 and _cannot_wait(columns, chosen.run, longest, now_ns, progress, costs):
            rows = 1
    begin = chosen.run[: max(rows, 0)]
    waiting = chosen.waiting + chosen.run.size - begin.size
    return GenerationSchedule(begin, chosen.expire, progress.rows > 0 and not begin.size, waiting)


def _waiting(columns: Columns, length: Rows, now_ns: int, costs: GenerationCosts) -> Schedule:
    if not (columns.submitted != columns.consumed).any():
        return Schedule(NO_ROWS, NO_ROWS, 0)
    if isinstance(costs.begin, LengthCosts):
        return schedule_lengths(columns, length, now_ns, costs.begin)
    return schedule(columns, now_ns, costs.begin)


def _most(rows: int, in_progress: int, length: int, left_ns: int, costs: GenerationCosts) -> int:
    """Find the most rows that can begin, followed by a step of all, within a time."""
    # Halves, not a search: the number of calls does not depend on the rows.
    while rows and costs.begin_ns(rows, length) + costs.step_ns(in_progress + rows) > left_ns:
        rows //= 2
    return rows


def _cannot_wait(
    columns: Columns, run: Rows, length: int, now_ns: int, progress: InProgress, costs: GenerationCosts
) -> bool:
    slack_ns = int(columns.deadline_ns[run[0], 0]) - now_ns
    return slack_ns < 2 * costs.step_ns(progress.rows + 1) + costs.begin_ns(1, length)


def not_busy(columns: Columns) -> Columns:
    """Return the columns for the choice of rows that begin: rows in progress have nothing submitted."""
    return columns._replace(busy=np.zeros_like(columns.busy))
