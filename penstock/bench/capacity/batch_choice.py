"""The scheduler's choice of a batch, for many servers at once.

`choose_batches` decides as `penstock.serve.engine.scheduler.schedule` does for rows of normal priority whose deadlines
are not soft; a property test compares the two.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.bench.capacity.server_model import CostTables

# C servers that start a batch, R places for ready rows

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class BatchChoice(NamedTuple):
    """Batches of some servers, from the rows in the order of their deadlines.

    Args:
        expire: Number of the first rows, which expire, `[C]`.
        run: Number of the rows after them, which run, `[C]`.
    """

    expire: Counts
    run: Counts


def choose_batches(slack_CR: Floats, ready_C: Counts, tables: CostTables) -> BatchChoice:
    """Choose the next batch of each server.

    Args:
        slack_CR: Time left of each ready row in seconds, ascending; infinity in unused places.
        ready_C: Ready rows.
        tables: The costs.
    """
    first_C = np.zeros(len(ready_C), np.int64)
    count_C = np.minimum(ready_C, tables.largest)
    late_C = (ready_C > tables.largest) | (slack_CR[:, 0] < tables.batch_s[count_C])
    hard = (late_C & (ready_C > 0)).nonzero()[0]
    if hard.size:
        first_C[hard], count_C[hard] = _choose_under_pressure(slack_CR[hard], ready_C[hard], tables)
    return BatchChoice(first_C, count_C)


def _choose_under_pressure(slack_CR: Floats, ready_C: Counts, tables: CostTables) -> tuple[Counts, Counts]:
    """Choose the size under which most rows meet their deadlines, as `_best_size` of the scheduler."""
    place_R = np.arange(slack_CR.shape[1])
    used_CR = place_R < ready_C[:, None]
    expired_C = (used_CR & (slack_CR < tables.min_compute_s)).sum(1)
    feasible_C = ready_C - expired_C
    most_C = np.minimum(feasible_C, tables.largest)
    best_met, best_start = np.full(len(ready_C), -1), np.zeros(len(ready_C), np.int64)
    best_size = np.ones(len(ready_C), np.int64)
    for candidate in (*tables.sizes, 0):
        # 0 stands for all that fit.
        size_C = most_C if candidate == 0 else np.full(len(ready_C), candidate)
        cost_C1 = tables.batch_s[np.minimum(size_C, tables.largest)][:, None]
        start_C = np.maximum((used_CR & (slack_CR < cost_C1)).sum(1) - expired_C, 0)
        behind_CR = place_R - (expired_C + start_C)[:, None]
        rounds_CR = 1 + behind_CR // np.maximum(size_C, 1)[:, None]
        met_C = (used_CR & (behind_CR >= 0) & (slack_CR >= cost_C1 * rounds_CR)).sum(1)
        better = (met_C > best_met) | ((met_C == best_met) & (start_C < best_start))
        better |= (met_C == best_met) & (start_C == best_start) & (size_C > best_size)
        better &= (size_C <= most_C) & (most_C > 0)
        best_met = np.where(better, met_C, best_met)
        best_start = np.where(better, start_C, best_start)
        best_size = np.where(better, size_C, best_size)
    # Where no row seems feasible, the one with the most time left runs all the same.
    start_C = np.where(best_met > 0, best_start, np.maximum(feasible_C - 1, 0))
    return expired_C + start_C, np.minimum(best_size, feasible_C - start_C)
