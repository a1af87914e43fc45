"""Histograms of latency by group, and the counts of what was not answered."""

import math
from typing import final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

BINS_A_BUDGET = 200
BUDGETS = 8


@final
class LatencyCounts:
    """Counts of one kind of requests. A group is a lane, or a second of a lane.

    Args:
        groups: Number of groups.
        budget_s: Latency budget; the histogram reaches to `BUDGETS` of it.
    """

    def __init__(self, groups: int, budget_s: float) -> None:
        self.groups, self.bin_s = groups, budget_s / BINS_A_BUDGET
        self._bins = BINS_A_BUDGET * BUDGETS
        self.answered = np.zeros((groups, self._bins + 1), np.int64)
        self.refused, self.offered = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
        self.latency_sum_s = 0.0

    def answer(self, group_A: Counts, latency_A: Floats, weight_A: Counts | None = None) -> None:
        """Count answers.

        Args:
            group_A: Their groups.
            latency_A: Their latencies in seconds.
            weight_A: How many have this latency; one each by default.
        """
        bin_A = np.minimum((latency_A / self.bin_s).astype(np.int64), self._bins)
        flat = group_A * (self._bins + 1) + bin_A
        if weight_A is None:
            np.add.at(self.answered.reshape(-1), flat, 1)
            self.latency_sum_s += float(latency_A.sum())
        else:
            np.add.at(self.answered.reshape(-1), flat, weight_A)
            self.latency_sum_s += float(latency_A @ weight_A)

    def refuse(self, group_A: Counts, weight_A: Counts | int = 1) -> None:
        """Count requests that get no answer in time: refused, expired, or lost."""
        np.add.at(self.refused, group_A, weight_A)

    def offer(self, group_A: Counts, weight_A: Counts | int = 1) -> None:
        """Count requests."""
        np.add.at(self.offered, group_A, weight_A)

    def percentile_s(self, percent: float, weight: Floats | None = None, *, answered_only: bool = False) -> float:
        """Return a percentile over all requests, those without an answer as infinite; nan if there are none.

        Args:
            percent: 0 to 100.
            weight: Weight of each group, `[groups]`.
            answered_only: Leave out those without an answer.
        """
        weight = np.ones(self.groups) if weight is None else weight
        lost = 0.0 if answered_only else float(weight @ self.refused)
        return self._percentile(weight @ self.answered, lost, percent)

    def percentiles_s(self, percent: float, *, answered_only: bool = False) -> Floats:
        """Return a percentile of each group, `[groups]`; nan where it has no request."""
        none = np.zeros(self.groups) if answered_only else self.refused
        return np.array(
            [self._percentile(counts, float(lost), percent) for counts, lost in zip(self.answered, none, strict=True)]
        )

    @property
    def mean_s(self) -> float:
        """Mean latency of the answers, in seconds."""
        return self.latency_sum_s / max(int(self.answered.sum()), 1)

    def refused_share(self, weight: Floats | None = None) -> float:
        """Return the share of the finished requests that got no answer."""
        weight = np.ones(self.groups) if weight is None else weight
        refused, answered = float(weight @ self.refused), float(weight @ self.answered.sum(1))
        return refused / max(refused + answered, 1e-300)

    def _percentile(self, counts: npt.NDArray[np.generic], lost: float, percent: float) -> float:
        cumulated = np.cumsum(counts.astype(np.float64))
        if not cumulated[-1] + lost:
            return math.nan
        rank = percent / 100 * (cumulated[-1] + lost)
        if rank > cumulated[-1]:
            return math.inf
        at = int(np.searchsorted(cumulated, rank))
        if at >= self._bins:
            return math.inf
        before = cumulated[at - 1] if at else 0.0
        share = (rank - before) / max(cumulated[at] - before, 1e-300)
        return (at + min(max(share, 0.0), 1.0)) * self.bin_s
