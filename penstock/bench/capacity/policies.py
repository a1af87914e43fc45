"""Load-balancing policies: the server of each arrival, for all lanes at once."""

from enum import StrEnum
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import BenchError

# L lanes, S servers of a lane, A arrivals of a step

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# Servers of all lanes, times steps of the past that are kept: a gigabyte.
MAX_VIEWED = 64_000_000


class Policy(StrEnum):
    """Load-balancing policies of a proxy."""

    RANDOM = "random"
    POWER_OF_TWO = "power-of-two"
    LEAST_OUTSTANDING = "least-outstanding"
    JOIN_IDLE = "join-idle"
    PREDICTED_FINISH = "predicted-finish"


class ServerViews(NamedTuple):
    """Servers as a balancer sees them, `[L, S]`.

    Args:
        outstanding: Requests or streams that a server holds.
        finish_s: Predicted time until a new request is answered; of streams the share of the limit.
    """

    outstanding: Counts
    finish_s: Floats


@final
class AgedViews:
    """The servers as they were some steps ago.

    Args:
        steps: Age in steps; 0 for the present.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._past = steps, list[ServerViews]()
        self._at = 0

    def update(self, present: ServerViews) -> ServerViews:
        """Store the present, and return the view of the age; before there is one, the oldest."""
        if not self._steps:
            return present
        copied = ServerViews(present.outstanding.copy(), present.finish_s.copy())
        if len(self._past) <= self._steps:
            self._past.append(copied)
            return self._past[0]
        self._past[self._at] = copied
        self._at = (self._at + 1) % len(self._past)
        return self._past[self._at]


def aged_views(age_s: float, step_s: float, servers: int) -> AgedViews:
    """Make views of an age.

    Args:
        age_s: The age in seconds.
        step_s: Length of a step in seconds.
        servers: Servers of all lanes.

    Raises:
        BenchError: They do not fit into memory.
    """
    steps = round(age_s / step_s)
    if steps * servers > MAX_VIEWED:
        raise BenchError(
            f"views of {servers:,} servers that are {age_s * 1e3:g} ms old, in steps of {step_s * 1e3:.3g} ms, do not "
            f"fit into memory; give an age of at most {MAX_VIEWED // servers * step_s * 1e3:.3g} ms."
        )
    return AgedViews(steps)


@final
class Balancer:
    """Chooses servers by a policy among those that are believed to be up.

    Args:
        policy: The policy.
        rng: Random numbers.
        up: Servers that are believed to be up, `[L, S]`; each lane has one at least.

    Attributes:
        order_LS: The servers of each lane, those that are up first.
    """

    def __init__(self, policy: Policy, rng: np.random.Generator, up: Flags) -> None:
        self.policy, self._rng = policy, rng
        self.set_up(up)

    def set_up(self, up: Flags) -> None:
        """Change the servers that are believed to be up."""
        assert up.any(1).all(), up
        self._up = up.copy()
        # Those that are up come first in their lane's row.
        self.order_LS = np.argsort(~up, axis=1, kind="stable")
        self._count_L = up.sum(1)

    def choose(self, lane_A: Counts, views: ServerViews, refused_A: Counts | None = None) -> Counts:
        """Choose a server for each arrival, `[A]`.

        Args:
            lane_A: Lanes of the arrivals, ascending.
            views: The servers as the balancer sees them.
            refused_A: Servers that refused them, which are not chosen again where others are up.
        """
        if self.policy is Policy.LEAST_OUTSTANDING:
            return self._lowest(lane_A, views.outstanding.astype(np.float64), 1.0, refused_A)
        if self.policy is Policy.JOIN_IDLE:
            # An idle server that was chosen is no longer idle; among those that are not, any will do.
            return self._lowest(lane_A, np.minimum(views.outstanding, 1).astype(np.float64), 0.0, refused_A)
        drawn_A = self._draw(lane_A)
        another_A = self._draw_another(lane_A, drawn_A)
        first, second = self.order_LS[lane_A, drawn_A], self.order_LS[lane_A, another_A]
        values_LS = views.finish_s if self.policy is Policy.PREDICTED_FINISH else views.outstanding
        if self.policy is Policy.RANDOM:
            values_LS = np.zeros_like(views.outstanding)
        better = values_LS[lane_A, second] < values_LS[lane_A, first]
        if refused_A is not None:
            better = (first == refused_A) | (better & (second != refused_A))
        return np.where(better, second, first)

    def _draw(self, lane_A: Counts) -> Counts:
        """Draw a place among the servers of each arrival's lane that are up."""
        return (self._rng.random(lane_A.size) * self._count_L[lane_A]).astype(np.int64)

    def _draw_another(self, lane_A: Counts, drawn_A: Counts) -> Counts:
        """Draw another place than the first one, where there is one."""
        count_A = self._count_L[lane_A]
        further_A = 1 + (self._rng.random(lane_A.size) * (count_A - 1)).astype(np.int64)
        return (drawn_A + further_A) % count_A

    def _lowest(self, lane_A: Counts, values_LS: Floats, more: float, refused_A: Counts | None = None) -> Counts:
        """Give the arrivals of each lane, one after another, to the lowest value; ties are broken at random.

        Args:
            lane_A: Lanes of the arrivals, ascending.
            values_LS: Values, whole numbers.
            more: Added to the value of a server that was chosen; 0 makes it 1.
            refused_A: See `choose`.
        """
        chosen = np.empty(lane_A.size, np.int64)
        if not lane_A.size:
            return chosen
        values_LS = np.where(self._up, values_LS, np.inf)
        turn_A = rank_in_group(lane_A)
        by_turn = np.argsort(turn_A, kind="stable")
        ends = np.cumsum(np.bincount(turn_A))
        for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            arrivals = by_turn[begin:end]
            lanes = lane_A[arrivals]
            rows = values_LS[lanes]
            if refused_A is not None:
                several = (self._count_L[lanes] > 1).nonzero()[0]
                rows[several, refused_A[arrivals[several]]] = np.inf
            picked = np.argmin(rows + self._rng.random(rows.shape) * 0.5, axis=1)
            chosen[arrivals] = picked
            values_LS[lanes, picked] = np.maximum(values_LS[lanes, picked] + more, 1.0)
        return chosen


def rank_in_group(group_A: Counts) -> Counts:
    """Return each element's place among those of its group; equal groups stand side by side."""
    if not group_A.size:
        return np.zeros(0, np.int64)
    begins = np.concatenate([[True], group_A[1:] != group_A[:-1]]).nonzero()[0]
    lengths = np.diff(np.append(begins, group_A.size))
    return np.arange(group_A.size) - np.repeat(begins, lengths)
