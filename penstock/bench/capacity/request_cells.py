"""One-shot requests on many servers in lockstep.

Time advances in steps for all servers of all lanes at once. Within a step arrivals have exact times, and batches begin
and end at exact times; the balancer and admission control see the servers as they were at its beginning.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from penstock.bench.capacity.batch_choice import choose_batches
from penstock.bench.capacity.fleet_lanes import FleetLanes
from penstock.bench.capacity.latency_counts import LatencyCounts
from penstock.bench.capacity.policies import Balancer, Policy, ServerViews, aged_views, rank_in_group
from penstock.bench.capacity.server_model import CostTables

# N cells: servers of all lanes, cell = lane * S + server; A arrivals of a step; C cells that do something;
# R places of their queues; L lanes, S servers of a lane

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

# Redispatches that a lane may have of its arrivals, as a proxy's retry budget.
RETRY_SHARE = 0.1
RETRY_BURST = 100.0

# Draws the factors of batch times: shape -> factors.
Noise = Callable[[np.random.Generator, int], Floats]


def lognormal(sigma: float) -> Noise:
    """Return factors with this standard deviation of their logarithm, and the mean 1."""
    return lambda rng, count: rng.lognormal(-sigma * sigma / 2, sigma, count) if sigma else np.ones(count)


class Arrivals(NamedTuple):
    """Requests for the balancer.

    Args:
        lane: Their lanes, `[A]`, ascending.
        stamp_s: Times at which they were sent, `[A]`; before now for those of a second try.
    """

    lane: Counts
    stamp_s: Floats

    def where(self, select: npt.NDArray[np.bool_]) -> "Arrivals":
        """Select some."""
        return Arrivals(self.lane[select], self.stamp_s[select])


@final
class RequestCells:
    """A simulation of one-shot requests.

    Args:
        lanes: The fleets.
        tables: The costs of a server.
        policy: The balancer's policy.
        step_s: Length of a step in seconds.
        view_age_s: Age of what the balancer sees.
        seed: Seed of arrivals, choices and batch times.
        noise: Factors of batch times.
        seconds: Simulated time; arrivals before `warm_s` are not counted.
        warm_s: Time before the measurement.
        by_second: Count each second of a lane apart; group = second * L + lane.
        redispatch: Send a refused request to another server once, within a retry budget.
    """

    def __init__(
        self,
        lanes: FleetLanes,
        tables: CostTables,
        policy: Policy,
        *,
        step_s: float,
        seconds: float,
        warm_s: float = 0.0,
        view_age_s: float = 0.0,
        seed: int = 0,
        noise: Noise | None = None,
        by_second: bool = False,
        redispatch: bool = True,
    ) -> None:
        self.lanes, self.tables, self._step_s = lanes, tables, step_s
        self._rng, self._noise = np.random.default_rng(seed), noise or lognormal(0.0)
        # Whole steps alone: what comes in the last one belongs to the last second.
        self._steps, self._warm_s, self._by_second = int(seconds / step_s + 1e-6), warm_s, by_second
        self._lanes_count, self._servers = lanes.shape
        cells = self._lanes_count * self._servers
        self._slowness = lanes.slowness_LS.reshape(-1)
        self._up = lanes.exists_LS.reshape(-1).copy()
        self._balancer = Balancer(policy, self._rng, lanes.exists_LS)
        self._views = aged_views(view_age_s, step_s, cells)
        self._queue = np.full((cells, 64), np.inf)
        self._queued, self._running = np.zeros(cells, np.int64), np.zeros(cells, np.int64)
        self._run_stamps = np.zeros((cells, tables.largest))
        self._free_s = np.zeros(cells)
        self._later = defaultdict[int, list[Arrivals]](list)
        self._tokens = np.full(self._lanes_count, RETRY_BURST if redispatch else 0.0)
        self._token_share = RETRY_SHARE if redispatch else 0.0
        seconds_counted = int(np.ceil(seconds - warm_s)) if by_second else 1
        budget_s = tables.budget_s if np.isfinite(tables.budget_s) else 100 * float(tables.batch_s[-1])
        self.counts = LatencyCounts(seconds_counted * self._lanes_count, budget_s)
        self.busy_s, self.rows, self.batches = np.zeros(cells), np.zeros(cells, np.int64), np.zeros(cells, np.int64)

    @property
    def waiting(self) -> int:
        """Requests that are queued, running or between two tries, and are counted."""
        held = self._queue[np.isfinite(self._queue)]
        running = np.arange(self._run_stamps.shape[1]) < self._running[:, None]
        later = [arrivals.stamp_s for listed in self._later.values() for arrivals in listed]
        stamps = np.concatenate([held, self._run_stamps[running], *later])
        return int(np.count_nonzero(stamps >= self._warm_s))

    def run(self) -> "RequestCells":
        """Simulate all steps."""
        for step in range(self._steps):
            self._advance(step)
        return self

    def _advance(self, step: int) -> None:
        now_s = step * self._step_s
        self._fail(step, now_s)
        arrivals = self._new_arrivals(now_s)
        for late in self._later.pop(step, ()):
            arrivals = Arrivals(np.append(arrivals.lane, late.lane), np.append(arrivals.stamp_s, late.stamp_s))
        if arrivals.lane.size:
            order = np.argsort(arrivals.lane, kind="stable")
            self._dispatch(Arrivals(arrivals.lane[order], arrivals.stamp_s[order]), step, now_s)
        else:
            self._views.update(self._present(now_s))
        end_s = now_s + self._step_s
        while True:
            self._finish(end_s)
            ready = ((self._queued > 0) & (self._running == 0) & (self._free_s < end_s)).nonzero()[0]
            if not ready.size or not self._start(ready, now_s, end_s):
                return

    def _new_arrivals(self, now_s: float) -> Arrivals:
        count_L = self._rng.poisson(self.lanes.rate_L * self._step_s)
        lane_A = np.repeat(np.arange(self._lanes_count), count_L)
        stamp_A = now_s + self._rng.random(lane_A.size) * self._step_s
        arrivals = Arrivals(lane_A, stamp_A)
        counted = arrivals.where(stamp_A >= self._warm_s)
        self.counts.offer(self._group(counted))
        self._tokens = np.minimum(self._tokens + self._token_share * count_L, RETRY_BURST)
        return arrivals

    def _present(self, now_s: float) -> ServerViews:
        outstanding = self._queued + self._running
        if self._balancer.policy is not Policy.PREDICTED_FINISH:
            return ServerViews(outstanding.reshape(self.lanes.shape), np.empty((0, 0)))
        rest_s = np.where(self._running > 0, np.maximum(self._free_s - now_s, 0.0), 0.0)
        finish_s = rest_s + self.tables.predicted_s(self._queued) * self._slowness
        return ServerViews(outstanding.reshape(self.lanes.shape), finish_s.reshape(self.lanes.shape))

    def _dispatch(self, arrivals: Arrivals, step: int, now_s: float) -> None:
        views = self._views.update(self._present(now_s))
        refused, server_A = self._try(arrivals, views, step, now_s)
        if refused.lane.size:
            again = rank_in_group(refused.lane) < self._tokens[refused.lane]
            np.add.at(self._tokens, refused.lane[again], -1.0)
            self._refuse(refused.where(~again))
            self._refuse(self._try(refused.where(again), views, step, now_s, server_A[again])[0])

    def _try(
        self, arrivals: Arrivals, views: ServerViews, step: int, now_s: float, refused_A: Counts | None = None
    ) -> tuple[Arrivals, Counts]:
        """Send requests to servers, others than refused them before; return those that are refused, and by which."""
        cell_A = arrivals.lane * self._servers + self._balancer.choose(arrivals.lane, views, refused_A)
        reached = self._up[cell_A]
        if not reached.all():
            assert self.lanes.failures is not None
            lost_s = self.lanes.failures.detection.connect_ms / 1e3
            self._try_later(arrivals.where(~reached), step, lost_s)
            arrivals, cell_A = arrivals.where(reached), cell_A[reached]
        order = np.argsort(cell_A, kind="stable")
        arrivals, cell_A = Arrivals(arrivals.lane[order], arrivals.stamp_s[order]), cell_A[order]
        ahead_A = self._queued[cell_A] + self._running[cell_A] + rank_in_group(cell_A)
        # A server's clock begins at the arrival there; what an earlier try took counts against the budget.
        left_s = np.minimum(arrivals.stamp_s, now_s) + self.tables.budget_s - now_s
        finish_s = self.tables.predicted_s(ahead_A) * self._slowness[cell_A] + self.tables.margin_s
        admitted = (ahead_A == 0) | (finish_s <= left_s)
        self._enqueue(cell_A[admitted], arrivals.stamp_s[admitted])
        return arrivals.where(~admitted), cell_A[~admitted] % self._servers

    def _enqueue(self, cell_A: Counts, stamp_A: Floats) -> None:
        if not cell_A.size:
            return
        place_A = self._queued[cell_A] + rank_in_group(cell_A)
        if place_A.max() >= self._queue.shape[1]:
            more = np.full((len(self._queue), int(place_A.max())), np.inf)
            self._queue = np.concatenate([self._queue, more], axis=1)
        self._queue[cell_A, place_A] = stamp_A
        np.add.at(self._queued, cell_A, 1)

    def _finish(self, end_s: float) -> None:
        """Count the answers of the batches that end before `end_s`."""
        done_C = ((self._running > 0) & (self._free_s < end_s)).nonzero()[0]
        if not done_C.size:
            return
        used_CR = np.arange(self._run_stamps.shape[1]) < self._running[done_C, None]
        stamps = self._run_stamps[done_C][used_CR]
        lane = np.repeat(done_C // self._servers, self._running[done_C])
        ended_s = np.repeat(self._free_s[done_C], self._running[done_C])
        counted = stamps >= self._warm_s
        self.counts.answer(self._group(Arrivals(lane, stamps).where(counted)), (ended_s - stamps)[counted])
        self._running[done_C] = 0

    def _start(self, cells: Counts, now_s: float, end_s: float) -> bool:
        """Start batches that begin before `end_s`; return whether one began or a row expired."""
        width = int(self._queued[cells].max())
        queue_CR = np.sort(self._queue[cells, :width], axis=1)
        start_C = np.maximum(np.maximum(self._free_s[cells], queue_CR[:, 0]), now_s)
        soon = start_C < end_s
        cells, queue_CR, start_C = cells[soon], queue_CR[soon], start_C[soon]
        if not cells.size:
            return False
        ready_C = (queue_CR <= start_C[:, None]).sum(1)
        slowness_C = self._slowness[cells]
        slack_CR = (queue_CR + self.tables.budget_s - start_C[:, None]) / slowness_C[:, None]
        slack_CR[np.arange(width) >= ready_C[:, None]] = np.inf
        first_C, count_C = choose_batches(slack_CR, ready_C, self.tables)
        self._expire(cells, queue_CR, first_C)
        self._run_rows(cells, queue_CR, first_C, count_C)
        time_C = self.tables.batch_s[count_C] * slowness_C * self._noise(self._rng, cells.size)
        ran = count_C > 0
        self._free_s[cells[ran]] = (start_C + time_C)[ran]
        self.busy_s[cells] += time_C * (start_C >= self._warm_s)
        self.rows[cells] += count_C
        self.batches[cells] += ran
        return True

    def _expire(self, cells: Counts, queue_CR: Floats, first_C: Counts) -> None:
        if first_C.any():
            expired = np.arange(queue_CR.shape[1]) < first_C[:, None]
            lanes = np.repeat(cells // self._servers, first_C)
            self._refuse(Arrivals(lanes, queue_CR[expired]))

    def _run_rows(self, cells: Counts, queue_CR: Floats, first_C: Counts, count_C: Counts) -> None:
        """Move rows from the queues into the running batches."""
        width, largest = queue_CR.shape[1], int(count_C.max())
        if largest:
            place = np.minimum(first_C[:, None] + np.arange(largest), width - 1)
            self._run_stamps[cells, :largest] = np.take_along_axis(queue_CR, place, axis=1)
        self._running[cells] = count_C
        gone_C = first_C + count_C
        kept = np.arange(width) + gone_C[:, None]
        left_CR = np.take_along_axis(queue_CR, np.minimum(kept, width - 1), axis=1)
        left_CR[kept >= width] = np.inf
        self._queue[cells, :width] = left_CR
        self._queued[cells] -= gone_C

    def _fail(self, step: int, now_s: float) -> None:
        failures = self.lanes.failures
        if failures is None:
            return
        down = (failures.down_LS & self.lanes.exists_LS).reshape(-1)
        if step == round(failures.at_s / self._step_s):
            self._up &= ~down
            cells = down.nonzero()[0]
            queued = [self._queue[cell, : self._queued[cell]] for cell in cells]
            running = [self._run_stamps[cell, : self._running[cell]] for cell in cells]
            stamps = [np.append(*pair) for pair in zip(queued, running, strict=True)]
            lane = np.repeat(cells // self._servers, [part.size for part in stamps])
            self._queue[cells], self._queued[cells], self._running[cells] = np.inf, 0, 0
            if lane.size:
                # The connections break: a proxy sends what it may send again to another server.
                self._try_later(Arrivals(lane, np.concatenate(stamps)), step, 0.0)
        if step == round((failures.at_s + failures.detection.detect_ms / 1e3) / self._step_s):
            self._balancer.set_up(self._up.reshape(self.lanes.shape))

    def _try_later(self, arrivals: Arrivals, step: int, after_s: float) -> None:
        self._later[step + max(1, round(after_s / self._step_s))].append(arrivals)

    def _refuse(self, arrivals: Arrivals) -> None:
        counted = arrivals.where(arrivals.stamp_s >= self._warm_s)
        if counted.lane.size:
            self.counts.refuse(self._group(counted))

    def _group(self, arrivals: Arrivals) -> Counts:
        if not self._by_second:
            return arrivals.lane
        return (arrivals.stamp_s - self._warm_s).astype(np.int64) * self._lanes_count + arrivals.lane
