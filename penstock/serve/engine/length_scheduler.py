"""Continuous batching of rows of different lengths, as a pure function: which rows run next, and which expire.

A batch takes the time of its rows padded to the longest of them, so that rows of similar length belong together.
The rule, for the rows that are ready at this moment:

1. Rows that cannot be in time even if they run alone and at once expire.
2. With more work than time, only a part of the rows is worked for, the same part of every length
   (`penstock.serve.engine.fair_shedding`). The others wait, and run if time is left after all.
3. Candidates are formed of the rows that are worked for: for each length bucket from that of the most urgent row on,
   the rows of that bucket, of it and the one below, and of all below; of those the first by deadline, for each
   measured batch size. A candidate has the rows that are in time in it, and contains the most urgent row of all, so
   that no row is starved by longer or shorter ones.
4. For each candidate, the rows that stay behind are predicted to follow by deadline, each taking its share of a full
   batch of its own length. The *work lost* is the sum of those shares over the rows that would be late.
5. The candidate that loses the least work runs; among equals, the one that does the most work a second: the shares of
   its rows over its predicted time. So padding and half-empty batches count the same, as time in which no row gains.

Low-priority rows run while there is time for all others: in the room of a batch, alone where nothing else is ready, and
before the others where they would be late otherwise; in each case only where no other row is late by it.

Earliest deadline first with early drop is as in Nexus (SOSP 2019); measured costs on a grid of rows and lengths, and
batches of neighbouring lengths, as in TurboTransformers (PPoPP 2021). Its dynamic programming finds the split of all
waiting rows with the least total time; here the first batch alone is chosen, because new rows arrive before the second.
"""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.serve.engine.fair_shedding import RowWork, affordable
from penstock.serve.engine.scheduler import NO_ROWS, BatchSchedule, Columns, Rows, current_entry, ready_slots
from penstock.serve.table.costs import OVERHEAD_NS
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.slots import CANCELLED_NS, LOW_PRIORITY, SOFT_DEADLINE

# R ready rows, W of them that are considered, C candidates

# Rows considered for a batch, the most urgent ones: candidates times rows are compared.
WINDOW = 256
# A row of low priority goes before the others once it would be late behind this many batches like the next.
BATCHES_AHEAD = 2
# It takes at most this part of the time that the others can spare.
CUSHION = 4
# It joins a batch of the others where it then takes at most this many times what it takes in a full one of its own.
MAX_PADDING = 1.5
NEVER_NS = 1 << 62

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


class _Ready(NamedTuple):
    """Ready rows by deadline: slots, deadlines, time left, whether late rows run too, and lengths."""

    rows_R: Rows
    deadline_R: Rows
    slack_R: Rows
    soft_R: Mask
    length_R: Rows

    def where(self, select_R: Mask | Rows) -> "_Ready":
        return _Ready(
            self.rows_R[select_R],
            self.deadline_R[select_R],
            self.slack_R[select_R],
            self.soft_R[select_R],
            self.length_R[select_R],
        )


class _Batch(NamedTuple):
    """Rows that run, their time, and how much later they may run with no normal row late; negative: not at all."""

    run_R: Mask
    ns: float
    spare_ns: float


def schedule_lengths(columns: Columns, length: Rows, now_ns: int, costs: LengthCosts) -> BatchSchedule:
    """Choose the next batch of rows of different lengths.

    Args:
        columns: The table's columns.
        length: The length of each row, `[N, K]`, see `LengthGrid`.
        now_ns: The time, on the clock of the deadlines.
        costs: The measured time of every batch size and length.
    """
    rows_R = ready_slots(columns)
    if rows_R.size == 0:
        return BatchSchedule(NO_ROWS, NO_ROWS, 0)
    entry_R = current_entry(columns, rows_R)
    deadline_R = columns.deadline_ns[rows_R, entry_R]
    slack_R = deadline_R - now_ns
    length_R = length[rows_R, entry_R]
    if rows_R.size == 1 and slack_R[0] >= costs.of(1, int(length_R[0])):
        return BatchSchedule(rows_R, NO_ROWS, 0)
    flags_R = columns.flags[rows_R, entry_R]
    if costs.padded and _is_one_batch(slack_R, length_R, costs) and not (flags_R & LOW_PRIORITY).any():
        return BatchSchedule(rows_R, NO_ROWS, 0)
    order_R = slack_R.argsort(kind="stable")
    flags_R = flags_R[order_R]
    soft_R = flags_R & SOFT_DEADLINE != 0
    ready = _Ready(rows_R[order_R], deadline_R[order_R], slack_R[order_R], soft_R, length_R[order_R])
    late_R = ready.slack_R < costs.min_compute_of(ready.length_R)
    expired_R = late_R & (~soft_R | (ready.slack_R <= CANCELLED_NS // 2))
    low_R = flags_R & LOW_PRIORITY != 0
    if not low_R.any():
        return _schedule(ready, expired_R, None, costs)
    return _schedule(ready, expired_R, low_R, costs)


def _is_one_batch(slack_R: Rows, length_R: Rows, costs: LengthCosts) -> bool:
    """Return whether rows are of one length bucket and one batch that is worth running, and all in time in it.

    Padded to the edge of their bucket, such rows take the same time: no other batch does more work a second.
    """
    longest = int(length_R.max())
    bucket = costs.grid.bucket(longest)
    return (
        len(length_R) <= costs.largest_L[bucket]
        and bucket == costs.grid.bucket(int(length_R.min()))
        and bool(slack_R.min() >= costs.of(len(length_R), longest))
    )


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


def _schedule(ready: _Ready, expired_R: Mask, low_R: Mask | None, costs: LengthCosts) -> BatchSchedule:
    normal_R = ~expired_R if low_R is None else ~expired_R & ~low_R
    # Usually all rows: the copies are saved then.
    everything = bool(normal_R.all())
    batch = _best(ready if everything else ready.where(normal_R), costs)
    run_R = batch.run_R if everything else _spread(batch.run_R, normal_R)
    if low_R is not None:
        run_R, batch = _with_low(ready, run_R, batch, low_R & ~expired_R, costs)
    behind_R = ~run_R & ~expired_R
    lost_R = behind_R & ~ready.soft_R & (ready.slack_R < batch.ns + costs.min_compute_of(ready.length_R))
    waiting = int(np.count_nonzero(behind_R)) - int(np.count_nonzero(lost_R))
    return BatchSchedule(ready.rows_R[run_R], ready.rows_R[expired_R | lost_R], waiting)


def _best(ready: _Ready, costs: LengthCosts) -> _Batch:
    """Choose a batch of rows in the order of their deadlines."""
    run_R = np.zeros(len(ready.rows_R), np.bool_)
    if not run_R.size:
        return _Batch(run_R, 0.0, np.inf)
    alone_R = costs.alone_of(ready.length_R)
    feasible_R = ready.soft_R | (ready.slack_R >= alone_R)
    if not feasible_R.all():
        if not feasible_R.any():
            # The row with the most time left runs all the same: it delays no other row, and only runs can correct a
            # prediction that is too high.
            most = int((ready.slack_R - alone_R).argmax())
            run_R[most] = True
            return _Batch(run_R, float(alone_R[most]), -1.0)
        batch = _best(ready.where(feasible_R), costs)
        return batch._replace(run_R=_spread(batch.run_R, feasible_R))
    share_R = costs.shares_of(ready.length_R)
    work = RowWork(ready.slack_R, ready.soft_R, share_R, alone_R, costs.efficient_of(ready.length_R))
    worked = affordable(work, ready.deadline_R)
    keep_R = worked.keep_R
    if keep_R is None:
        chosen_W, ns = _candidate(ready, share_R, alone_R, costs)
        run_R[: chosen_W.size] = chosen_W
    else:
        chosen_W, ns = _candidate(ready.where(keep_R), share_R[keep_R], alone_R[keep_R], costs)
        run_R[keep_R.nonzero()[0][: chosen_W.size]] = chosen_W
    return _Batch(run_R, ns, worked.spare_ns)


def _candidate(ready: _Ready, share_R: Floats, alone_R: Floats, costs: LengthCosts) -> tuple[Mask, float]:
    """Choose among batches with the most urgent row, which is the first; return its rows, and its time."""
    window = max(WINDOW, costs.largest_L[0])
    slack_W, soft_W, length_W = ready.slack_R[:window], ready.soft_R[:window], ready.length_R[:window]
    share_W, alone_W = share_R[:window], alone_R[:window]
    bucket_W = costs.buckets_of(length_W)
    slack_W = np.where(soft_W, NEVER_NS, slack_W)
    longest_L = np.zeros(len(costs.largest_L), np.int64)
    np.maximum.at(longest_L, bucket_W, length_W)
    first_C, last_C, rows_C = _ranges(np.bincount(bucket_W, minlength=longest_L.size), int(bucket_W[0]), costs)
    most_ns_C = costs.of_each(rows_C, longest_L[last_C])
    # The most urgent row is in time in each.
    fits_C = most_ns_C <= slack_W[0]
    first_C, last_C, rows_C, most_ns_C = (each[fits_C, None] for each in (first_C, last_C, rows_C, most_ns_C))
    in_CW = bucket_W >= first_C
    in_CW &= bucket_W <= last_C
    in_CW &= slack_W >= most_ns_C
    in_CW &= in_CW.cumsum(1) <= rows_C
    # It may also run alone.
    in_CW = np.concatenate([in_CW, np.arange(length_W.size)[None] == 0])
    ns_C = costs.of_each(np.count_nonzero(in_CW, 1), (in_CW * length_W).max(1))
    done_CW = in_CW * share_W
    behind_CW = (share_W - done_CW).cumsum(1)
    np.maximum(behind_CW, alone_W, out=behind_CW)
    behind_CW += ns_C[:, None]
    late_CW = behind_CW > slack_W
    late_CW &= ~in_CW
    lost_C = late_CW @ share_W
    rate_C = done_CW.sum(1) / (ns_C + OVERHEAD_NS)
    best = int(np.where(lost_C <= lost_C.min() + 1, rate_C, -1.0).argmax())
    return in_CW[best], float(ns_C[best])


def _ranges(count_L: Rows, head: int, costs: LengthCosts) -> tuple[Rows, Rows, Rows]:
    """List ranges of length buckets with the bucket `head`, first and last, and batch sizes that their rows fill."""
    first_C, last_C, rows_C, smaller_C = _all_ranges(tuple(costs.rows), tuple(costs.largest_L), head)
    until_L = count_L.cumsum()
    ready_C = (until_L[last_C] - until_L[first_C]) + count_L[first_C]
    # Without a row of its last bucket, a range is a shorter one.
    differs_C = (count_L[last_C] > 0) & (smaller_C < ready_C)
    return first_C[differs_C], last_C[differs_C], np.minimum(rows_C, ready_C)[differs_C]


@lru_cache
def _all_ranges(sizes: tuple[int, ...], largest_L: tuple[int, ...], head: int) -> Rows:
    """List ranges with the bucket `head`, batch sizes, and the next smaller sizes, `[4, C]`."""
    candidates: list[tuple[int, int, int, int]] = []
    for last in range(head, len(largest_L)):
        for first in sorted({head, min(max(last - 1, 0), head), 0}):
            worth = (0, *(rows for rows in sizes if rows <= largest_L[last]))
            candidates += [(first, last, rows, smaller) for smaller, rows in pairwise(worth)]
    return np.array(candidates).T


def _with_low(ready: _Ready, run_R: Mask, batch: _Batch, low_R: Mask, costs: LengthCosts) -> tuple[Mask, _Batch]:
    """Add rows of low priority to a batch of the others, or run some in its place; see the rule."""
    low = ready.where(low_R)
    alone = _best(low, costs)
    if not batch.ns:
        return _spread(alone.run_R, low_R), alone
    longest, taken = int(ready.length_R[run_R].max()), int(np.count_nonzero(run_R))
    room = costs.largest(longest) - taken
    joins_R = low_R & (ready.length_R <= longest)
    if room > 0 and batch.spare_ns > 0 and joins_R.any():
        more = np.arange(1, min(room, int(np.count_nonzero(joins_R))) + 1)
        ns = costs.of_each(taken + more, np.full(more.size, longest))
        slack_R = np.where(ready.soft_R, np.inf, ready.slack_R)
        in_time = (slack_R[joins_R][:, None] >= ns).sum(0) >= more
        worth_ns = MAX_PADDING * costs.shares_of(ready.length_R[joins_R])[: more.size].cumsum()
        fits = (
            in_time & (ns <= slack_R[run_R].min()) & (ns - batch.ns <= np.minimum(batch.spare_ns / CUSHION, worth_ns))
        )
        if fits.any():
            most = int(fits.nonzero()[0][-1])
            joins_R &= slack_R >= ns[most]
            joins_R &= joins_R.cumsum() <= more[most]
            return run_R | joins_R, batch._replace(ns=float(ns[most]))
    if alone.spare_ns < BATCHES_AHEAD * batch.ns and CUSHION * alone.ns <= batch.spare_ns:
        return _spread(alone.run_R, low_R), alone
    return run_R, batch


def _spread(mask_S: Mask, select_R: Mask) -> Mask:
    """Spread a mask of selected rows over all rows."""
    spread_R = np.zeros(len(select_R), np.bool_)
    spread_R[select_R] = mask_S
    return spread_R
