"""Continuous batching of answers that take steps, as a pure function: begin waiting rows, or step those in progress.

Rows that wait are chosen and expire as for answers of one step (`scheduler`, `length_scheduler`), by the deadlines of
their first outputs and the costs of beginning; the first step counts as theirs. Beginning them delays the next output
of the rows in progress. So:

1. At most as many rows are in progress as a step carries within its budget.
2. As many of the chosen rows begin as leave time for a step of all before the next output of the rows in progress is
   due. Where that is none of them, the rows in progress take a step.
3. A row that would miss its own deadline by waiting for one more step begins all the same, alone: an output that is a
   little late costs less than an answer that is refused.

Where the executor begins rows beside the steps, both go on, and 2 and 3 do not apply. As many rows begin as take no
longer than a step, but at least one, and none while others begin. While every waiting row has time for its beginning
and three steps, and none is of low priority, `_relaxed` decides in few calls: the most urgent row and those of about
its length begin, and none expires. It waits until at least `1 / BEGIN_SHARE` of the places, or as many as rows wait,
are free, because rows that begin together cost less.

A row expires only where its first output would be late after the shortest step ever measured. So with none in progress,
one that could be in time always begins, and its step corrects a prediction that is too high.
"""

from typing import NamedTuple

import numpy as np

from penstock.serve.engine.length_scheduler import schedule_lengths
from penstock.serve.engine.scheduler import NO_ROWS, BatchSchedule, Columns, Rows, schedule
from penstock.serve.table.generation_costs import GenerationCosts
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.slots import LOW_PRIORITY

# Where rows queue for places, a share of the places is free before any begins.
BEGIN_SHARE = 12


class InProgress(NamedTuple):
    """The rows in progress.

    Args:
        rows: Their number.
        due_ns: When their next output is due.
        beginning: Rows that begin, and take no step yet.
    """

    rows: int
    due_ns: int
    beginning: int = 0


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
    free = 0 if progress.beginning else costs.max_rows - progress.rows
    if costs.beside and progress.rows:
        relaxed = _relaxed(columns, length, now_ns, free, progress, costs)
        if relaxed is not None:
            return relaxed
    # The first output comes a step after the beginning. Rows expire by the least time that a step ever took: by a
    # prediction that is too high all of them would, and then no run could correct it.
    chosen = _waiting(columns, length, now_ns + costs.step.min_compute_ns, costs)
    rows = min(chosen.run.size, free)
    if rows > 0 and chosen.run.size > 1:
        low = columns.flags[chosen.run, 0] & LOW_PRIORITY
        urgent = np.lexsort((columns.deadline_ns[chosen.run, 0], low))
        chosen = chosen._replace(run=chosen.run[urgent])
    if rows > 0 and progress.rows:
        # Rows of similar length were chosen, so that the longest decides for all.
        longest = int(length[chosen.run].max())
        if costs.beside:
            rows = max(1, _most(rows, longest, costs.step_ns(progress.rows), costs))
        else:
            rows = _most(rows, longest, progress.due_ns - now_ns, costs, before=progress.rows)
            if rows == 0 and _cannot_wait(columns, chosen.run, longest, now_ns, progress, costs):
                rows = 1
    begin = chosen.run[: max(rows, 0)]
    waiting = chosen.waiting + chosen.run.size - begin.size
    step = progress.rows > 0 and (costs.beside or not begin.size)
    return GenerationSchedule(begin, chosen.expire, step, waiting)


def _relaxed(
    columns: Columns, length: Rows, now_ns: int, free: int, progress: InProgress, costs: GenerationCosts
) -> GenerationSchedule | None:
    """Decide beside a step where no row is short of time, in few calls; None where one is, or some may wait longer."""
    waiting = (columns.submitted != columns.consumed).nonzero()[0]
    nothing = GenerationSchedule(NO_ROWS, NO_ROWS, True, waiting.size)
    if not waiting.size:
        return nothing
    deadline_W, length_W = columns.deadline_ns[waiting, 0], length[waiting, 0]
    needed_ns = costs.begin_ns(1, int(length_W.max())) + 3 * costs.step_ns(progress.rows + 1)
    if int(deadline_W.min()) - now_ns <= needed_ns or (columns.flags[waiting, 0] & LOW_PRIORITY).any():
        return None
    rows = min(free, waiting.size)
    if not rows or rows < min(waiting.size, costs.max_rows // BEGIN_SHARE):
        return nothing
    # Of the most urgent rows, those of about the length of the first.
    urgent = deadline_W.argsort(kind="stable")[: 2 * rows]
    urgent = urgent[np.abs(length_W[urgent] - length_W[urgent[0]]).argsort(kind="stable")[:rows]]
    longest = int(length_W[urgent].max())
    largest = costs.begin.largest(longest) if isinstance(costs.begin, LengthCosts) else costs.begin.largest
    rows = max(1, _most(min(rows, largest), longest, costs.step_ns(progress.rows), costs))
    return GenerationSchedule(waiting[urgent[:rows]], NO_ROWS, True, waiting.size - rows)


def _waiting(columns: Columns, length: Rows, now_ns: int, costs: GenerationCosts) -> BatchSchedule:
    if not (columns.submitted != columns.consumed).any():
        return BatchSchedule(NO_ROWS, NO_ROWS, 0)
    if isinstance(costs.begin, LengthCosts):
        return schedule_lengths(columns, length, now_ns, costs.begin)
    return schedule(columns, now_ns, costs.begin)


def _most(rows: int, length: int, left_ns: int, costs: GenerationCosts, before: int | None = None) -> int:
    """Find the most rows that can begin within a time, followed by a step of them and of those before, if any."""
    # Halves, not a search: the number of calls does not depend on the rows.
    while rows and costs.begin_ns(rows, length) + (0 if before is None else costs.step_ns(before + rows)) > left_ns:
        rows //= 2
    return rows


def _cannot_wait(
    columns: Columns, run: Rows, length: int, now_ns: int, progress: InProgress, costs: GenerationCosts
) -> bool:
    slack_ns = int(columns.deadline_ns[run[0], 0]) - now_ns
    return slack_ns < 2 * costs.step_ns(progress.rows + 1) + costs.begin_ns(1, length)


def not_busy(columns: Columns) -> Columns:
    """Return the columns for the choice of rows that begin: rows in progress have nothing submitted."""
    return columns.with_others(busy=np.zeros_like(columns.busy))
