"""Continuous batching of rows of different lengths, as a pure function: which rows run next, and which expire.

A batch takes the time of its rows padded to the longest of them, so that rows of similar length belong together.
The rule, for the rows that are ready at this moment:

1. Rows that cannot be in time even if they run alone and at once expire.
2. Candidates are formed of the others: for each length bucket that occurs, the rows of that bucket, of it and the one
   below, and of all below; of those the first by deadline, for each measured batch size. A candidate has the rows that
   are in time in it, and must contain the most urgent row of all.
3. For each candidate, the rows that stay behind are predicted to follow by deadline, each taking its share of a full
   batch of its own length. The *work lost* is the sum of those shares over the rows that would be late.
4. The candidate that loses the least work runs; among equals, the one that does the most work a second: the shares of
   its rows over its predicted time. So padding and half-empty batches count the same, as time in which no row gains.
5. The most urgent row is given up only where it forces a small, slow batch: without it less work is lost, and at least
   twice as much is done a second.

As the most urgent row is in the batch, no row is starved by longer or shorter ones; by 5 it is given up for lack of
time alone. Low-priority rows join where they make no row of the batch late.

Earliest deadline first with early drop is as in Nexus (SOSP 2019); measured costs on a grid of rows and lengths, and
batches of neighbouring lengths, as in TurboTransformers (PPoPP 2021). Its dynamic programming finds the split of all
waiting rows with the least total time; here the first batch alone is chosen, because new rows arrive before the second.
"""

import numpy as np
import numpy.typing as npt

from penstock.serve.engine.scheduler import (
    NO_ROWS,
    Columns,
    ReadyRows,
    Rows,
    Schedule,
    add_low_priority,
    current_entry,
    ready_slots,
)
from penstock.serve.table.costs import OVERHEAD_NS
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.slots import CANCELLED_NS, LOW_PRIORITY, SOFT_DEADLINE

# R ready rows, W of them that are considered, C candidates

# Rows considered for a batch, the most urgent ones: candidates times rows are compared.
WINDOW = 256
# The most urgent row is given up where the others then do this many times as much work a second.
DROP_GAIN = 2.0

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


def schedule_lengths(columns: Columns, length: Rows, now_ns: int, costs: LengthCosts) -> Schedule:
    """Choose the next batch of rows of different lengths.

    Args:
        columns: The table's columns.
        length: The length of each row, `[N, K]`, see `LengthGrid`.
        now_ns: The time, on the clock of the deadlines.
        costs: The measured time of every batch size and length.
    """
    rows_R = ready_slots(columns)
    if rows_R.size == 0:
        return Schedule(NO_ROWS, NO_ROWS, 0)
    entry_R = current_entry(columns, rows_R)
    slack_R = columns.deadline_ns[rows_R, entry_R] - now_ns
    length_R = length[rows_R, entry_R]
    if rows_R.size == 1 and slack_R[0] >= costs.of(1, int(length_R[0])):
        return Schedule(rows_R, NO_ROWS, 0)
    flags_R = columns.flags[rows_R, entry_R]
    soft_R = flags_R & SOFT_DEADLINE != 0
    late_R = slack_R < costs.min_compute_of(length_R)
    expired_R = late_R & (~soft_R | (slack_R <= CANCELLED_NS // 2))
    order_R = np.argsort(slack_R, kind="stable")
    order_R = order_R[~expired_R[order_R]]
    ready = ReadyRows(rows_R, slack_R, soft_R).where(order_R)
    length_R, low_R = length_R[order_R], flags_R[order_R] & LOW_PRIORITY != 0
    run_R, lost_R = _best(ready.where(~low_R), length_R[~low_R], costs)
    normal = ready.where(~low_R).rows_R
    chosen = Schedule(
        normal[run_R], np.concatenate([rows_R[expired_R], normal[lost_R]]), int((~(run_R | lost_R)).sum())
    )
    if not low_R.any():
        return chosen
    return _add_low(chosen, ready, length_R, low_R, costs)


def length_backlog(columns: Columns, length: Rows, now_ns: int, costs: LengthCosts) -> tuple[int, int, int, int]:
    """Compute how soon a table needs the engine, and for how long.

    Returns:
        The number of ready rows; the nanoseconds after which the most urgent would be late; the predicted time of the
        next batch, and of all ready rows.
    """
    rows_R = ready_slots(columns)
    if rows_R.size == 0:
        return 0, 0, 0, 0
    entry_R = current_entry(columns, rows_R)
    length_R, deadline_R = length[rows_R, entry_R], columns.deadline_ns[rows_R, entry_R]
    urgent = int(deadline_R.argmin())
    at_length = int(length_R[urgent])
    batch_ns = costs.of(min(rows_R.size, costs.largest(at_length)), at_length)
    work_ns = max(batch_ns, int(costs.shares_of(length_R).sum()))
    return rows_R.size, int(deadline_R[urgent]) - now_ns - batch_ns, batch_ns, work_ns


def _best(ready: ReadyRows, length_R: Rows, costs: LengthCosts) -> tuple[Mask, Mask]:
    """Choose a batch of rows in the order of their deadlines.

    Returns:
        The rows that run and the rows that can no longer be in time, `[R]` each.
    """
    run_R, lost_R = np.zeros((2, length_R.size), np.bool_)
    if not length_R.size:
        return run_R, lost_R
    window = max(WINDOW, *costs.largest_L)
    slack_W, soft_W, length_W = ready.slack_R[:window], ready.soft_R[:window], length_R[:window]
    bucket_W = np.searchsorted(costs.grid.edges, length_W)
    first_C, last_C, rows_C = _candidates(np.bincount(bucket_W, minlength=len(costs.grid.edges)), costs)
    longest_L = np.zeros(len(costs.grid.edges), np.int64)
    np.maximum.at(longest_L, bucket_W, length_W)
    most_ns_C = costs.of_each(rows_C, longest_L[last_C])
    alone_W, share_W = costs.alone_of(length_W), costs.shares_of(length_W)
    feasible_W = soft_W | (slack_W >= alone_W)
    if not feasible_W.any():
        # The row with the most time left runs all the same: it delays no other row, and only runs can correct a
        # prediction that is too high.
        chosen_W = np.arange(length_W.size) == (slack_W - alone_W).argmax()
        ns = float(alone_W[chosen_W][0])
    else:
        head = int(feasible_W.argmax())
        in_CW = (bucket_W >= first_C[:, None]) & (bucket_W <= last_C[:, None])
        in_CW &= soft_W | (slack_W >= most_ns_C[:, None])
        in_CW &= in_CW.cumsum(1) <= rows_C[:, None]
        in_CW = np.concatenate([in_CW, np.arange(length_W.size)[None] == head])
        took_C = in_CW.sum(1)
        ns_C = costs.of_each(np.maximum(took_C, 1), np.where(in_CW, length_W, 0).max(1))
        behind_CW = np.maximum(np.where(in_CW, 0.0, share_W).cumsum(1), alone_W)
        met_CW = in_CW | soft_W | (slack_W >= ns_C[:, None] + behind_CW)
        lost_C = np.where(met_CW, 0.0, share_W).sum(1)
        rate_C = np.where(in_CW, share_W, 0.0).sum(1) / (ns_C + OVERHEAD_NS)
        best = _least_lost(in_CW[:, head], lost_C, rate_C)
        # Candidates that give the most urgent row up, and contain the most urgent of the others.
        others_C = ~met_CW[:, head] & in_CW[np.arange(len(in_CW)), met_CW.argmax(1)]
        if others_C.any():
            other = _least_lost(others_C, lost_C, rate_C)
            if lost_C[other] < lost_C[best] and rate_C[other] > DROP_GAIN * rate_C[best]:
                best = other
        chosen_W, ns = in_CW[best], float(ns_C[best])
    run_R[:window] = chosen_W
    lost_R[:window] = ~chosen_W & ~soft_W & (slack_W < ns + costs.min_compute_of(length_W))
    return run_R, lost_R


def _least_lost(of_C: Mask, lost_C: Floats, rate_C: Floats) -> int:
    """Find the candidate that loses the least work and does the most a second."""
    least = lost_C[of_C].min()
    return int(np.where(of_C & (lost_C <= least + 1), rate_C, -1.0).argmax())


def _candidates(count_L: Rows, costs: LengthCosts) -> tuple[Rows, Rows, Rows]:
    """List ranges of length buckets, first and last, and batch sizes; a loop over the few buckets, never over rows."""
    present: list[int] = count_L.nonzero()[0].tolist()
    rows_before = [0, *count_L.cumsum().tolist()]
    candidates: set[tuple[int, int, int]] = set()
    for last in present:
        for first in {last, max(last - 1, 0), 0}:
            most = min(rows_before[last + 1] - rows_before[first], costs.largest_L[last])
            candidates.update((first, last, rows) for rows in (most, *costs.rows) if rows <= most)
    first_C, last_C, rows_C = np.array(sorted(candidates)).T
    return first_C, last_C, rows_C


def _add_low(chosen: Schedule, ready: ReadyRows, length_R: Rows, low_R: Mask, costs: LengthCosts) -> Schedule:
    low, low_length_R = ready.where(low_R), length_R[low_R]
    if not chosen.run.size:
        run_R, lost_R = _best(low, low_length_R, costs)
        expire = np.concatenate([chosen.expire, low.rows_R[lost_R]])
        return Schedule(low.rows_R[run_R], expire, chosen.waiting + int((~(run_R | lost_R)).sum()))
    waiting = chosen.waiting + low.rows_R.size
    if chosen.waiting:
        return chosen._replace(waiting=waiting)
    longest = int(length_R[np.isin(ready.rows_R, chosen.run)].max())
    # The most urgent row joins even where it is longer than the batch; else the rows that need no more padding do.
    for length in (max(longest, int(low_length_R[0])), longest):
        costs_at = costs.at(length)
        if costs_at.largest > chosen.run.size:
            added = add_low_priority(chosen, ready, low.where(low_length_R <= length), costs_at)
            if added.run.size > chosen.run.size:
                return chosen._replace(run=added.run, waiting=waiting - (added.run.size - chosen.run.size))
    return chosen._replace(waiting=waiting)
