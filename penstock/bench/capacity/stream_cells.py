"""Live streams on many servers in lockstep.

A stream sends a chunk every `chunk_s` at a phase of its own, in steps. A server holds the number of its streams by
phase, so that thousands of streams cost as much as one. Chunks wait in order, and the next batch starts as soon as the
last one ends.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from penstock.bench.capacity.fleet_lanes import FleetLanes
from penstock.bench.capacity.latency_counts import LatencyCounts
from penstock.bench.capacity.policies import Balancer, Policy, ServerViews, aged_views, rank_in_group
from penstock.bench.capacity.request_cells import Noise, lognormal
from penstock.bench.capacity.server_model import CostTables
from penstock.core.errors import BenchError

# N cells: servers of all lanes; B steps of a chunk; E steps of a stream; W steps for which chunks may wait;
# A streams that begin in a step; C cells that start a batch; L lanes, S servers of a lane

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

# Chunks that wait for more than this many budgets are dropped from the queue, and count as late.
MAX_BUDGETS = 4
# Steps of a stream, times servers of all lanes.
MAX_PLACES = 200_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamShape:
    """Chunks of a stream.

    Args:
        chunk_s: Time from one chunk to the next, in seconds.
        stream_s: Length of a stream in seconds; whole chunks are sent.
        limit: Streams that a server admits.
    """

    chunk_s: float
    stream_s: float
    limit: int


class Beginnings(NamedTuple):
    """Streams for the balancer.

    Args:
        lane: Their lanes, `[A]`.
        end: The steps at which they end, `[A]`.
    """

    lane: Counts
    end: Counts

    def where(self, select: npt.NDArray[np.bool_] | Counts) -> "Beginnings":
        """Select some."""
        return Beginnings(self.lane[select], self.end[select])

    def joined(self, other: "Beginnings") -> "Beginnings":
        """Append others."""
        return Beginnings(np.append(self.lane, other.lane), np.append(self.end, other.end))


@final
class StreamCells:
    """A simulation of live streams; it begins with as many streams as last, spread evenly.

    Args:
        lanes: The fleets; their rate is that of new streams.
        tables: The costs of a server.
        shape: Chunks, length and limit.
        policy: The balancer's policy.
        step_s: Length of a step in seconds, a whole part of `chunk_s`.
        seconds: Simulated time; chunks due before `warm_s` are not counted.
        warm_s: Time before the measurement.
        view_age_s: Age of what the balancer sees.
        seed: Seed of beginnings, choices and batch times.
        noise: Factors of batch times.
        by_second: Count each second of a lane apart; group = second * L + lane.

    Attributes:
        counts: Chunks.
        streams: Streams offered, and those that were refused.
        interrupted: Streams that a failure interrupted, by lane.
    """

    def __init__(
        self,
        lanes: FleetLanes,
        tables: CostTables,
        shape: StreamShape,
        policy: Policy,
        *,
        step_s: float,
        seconds: float,
        warm_s: float = 0.0,
        view_age_s: float = 0.0,
        seed: int = 0,
        noise: Noise | None = None,
        by_second: bool = False,
    ) -> None:
        self._phases = round(shape.chunk_s / step_s)
        if self._phases < 1 or abs(self._phases * step_s - shape.chunk_s) > 1e-9:
            raise BenchError(f"a chunk of {shape.chunk_s * 1e3:g} ms is no multiple of the step, {step_s * 1e3:g} ms.")
        self.lanes, self.tables, self.shape, self._step_s = lanes, tables, shape, step_s
        self._rng, self._noise = np.random.default_rng(seed), noise or lognormal(0.0)
        self._steps, self._warm_s, self._by_second = round(seconds / step_s), warm_s, by_second
        self._length = self._phases * max(1, int(np.ceil(shape.stream_s / shape.chunk_s - 1e-9)))
        self._lanes_count, self._servers = lanes.shape
        self._cells = cells = self._lanes_count * self._servers
        if self._length * cells > MAX_PLACES:
            raise BenchError(
                f"streams of {shape.stream_s:g} s on {cells:,} servers do not fit into memory; give utterances of at "
                f"most {shape.stream_s * MAX_PLACES / (self._length * cells):.3g} s."
            )
        self._slowness = lanes.slowness_LS.reshape(-1)
        self._limit = np.maximum((shape.limit / self._slowness).astype(np.int64), 1)
        self._up = lanes.exists_LS.reshape(-1).copy()
        self._balancer = Balancer(policy, self._rng, lanes.exists_LS)
        self._views = aged_views(view_age_s, step_s, cells)
        self._by_phase = np.zeros((self._phases, cells), np.int64)
        self._ending = np.zeros((self._length + self._phases, cells), np.int32)
        self._window = max(4, int(np.ceil(MAX_BUDGETS * tables.budget_s / step_s)))
        self._waiting_by_step = np.zeros((self._window, cells), np.int64)
        self._waiting, self._oldest = np.zeros(cells, np.int64), np.zeros(cells, np.int64)
        self._free_s = np.zeros(cells)
        self._later = defaultdict[int, list[Beginnings]](list)
        seconds_counted = int(np.ceil(seconds - warm_s)) if by_second else 1
        groups = seconds_counted * self._lanes_count
        self.counts = LatencyCounts(groups, tables.budget_s)
        self.streams = LatencyCounts(groups, tables.budget_s)
        self.interrupted = np.zeros(self._lanes_count, np.int64)
        self.busy_s, self.rows, self.batches = np.zeros(cells), np.zeros(cells, np.int64), np.zeros(cells, np.int64)
        self._fill()
        self._open = self._by_phase.sum(0)

    @property
    def open(self) -> Counts:
        """Streams of each server, `[L, S]`."""
        return self._by_phase.sum(0).reshape(self.lanes.shape)

    @property
    def waiting(self) -> int:
        """Chunks in the queues."""
        return int(self._waiting.sum())

    def run(self) -> "StreamCells":
        """Simulate all steps."""
        for step in range(self._steps):
            self._advance(step)
        return self

    def _fill(self) -> None:
        """Begin with the streams that began within the last length of one."""
        servers_L = self.lanes.exists_LS.sum(1)
        for began in range(-self._length, 0):
            count_L = self._rng.poisson(self.lanes.rate_L * self._step_s)
            lane_A = np.repeat(np.arange(self._lanes_count), count_L)
            # Servers in turn, as a balancer that counts would spread them.
            turn_A = (self._rng.integers(0, 1 << 30) + rank_in_group(lane_A)) % servers_L[lane_A]
            cell_A = lane_A * self._servers + self._balancer.order_LS[lane_A, turn_A]
            np.add.at(self._by_phase[began % self._phases], cell_A, 1)
            np.add.at(self._ending[began + self._length], cell_A, 1)
        # What would not have been admitted is not there.
        excess = np.maximum(self._by_phase.sum(0) - self._limit, 0)
        for cell in excess.nonzero()[0]:
            self._trim(cell, int(excess[cell]))

    def _trim(self, cell: int, count: int) -> None:
        for end in range(self._length):
            gone = min(count, int(self._ending[end, cell]))
            self._ending[end, cell] -= gone
            self._by_phase[end % self._phases, cell] -= gone
            count -= gone

    def _advance(self, step: int) -> None:
        now_s = step * self._step_s
        self._fail(step, now_s)
        self._due(step, now_s)
        ending = self._ending[step % len(self._ending)]
        self._by_phase[step % self._phases] -= ending
        self._open -= ending
        ending[:] = 0
        self._begin(step, now_s)
        end_s = now_s + self._step_s
        while True:
            cells = ((self._waiting > 0) & (self._free_s < end_s) & self._up).nonzero()[0]
            if not cells.size:
                return
            self._start(cells, step, now_s)

    def _due(self, step: int, now_s: float) -> None:
        """Queue the chunks that are due now."""
        chunks = self._by_phase[step % self._phases]
        if now_s >= self._warm_s:
            self._add(self.counts.offer, chunks, now_s)
        place = self._waiting_by_step[step % self._window]
        if place.any():
            self._add(self.counts.refuse, place * (now_s - self._window * self._step_s >= self._warm_s), now_s)
            self._waiting -= place
            self._oldest[place > 0] += 1
        self._oldest = np.where(self._waiting > 0, self._oldest, step)
        place[:] = chunks
        self._waiting += chunks

    def _begin(self, step: int, now_s: float) -> None:
        count_L = self._rng.poisson(self.lanes.rate_L * self._step_s)
        lane_A = np.repeat(np.arange(self._lanes_count), count_L)
        begun = Beginnings(lane_A, np.full(lane_A.size, step + self._length))
        if now_s >= self._warm_s:
            self._add(self.streams.offer, count_L, now_s)
        for late in self._later.pop(step, ()):
            # Its remaining chunks come at the phase at which it connects again.
            end = step + np.maximum(-(-(late.end - step) // self._phases), 1) * self._phases
            begun = begun.joined(late._replace(end=end))
        views = self._views.update(self._present())
        if begun.lane.size:
            self._assign(begun.where(np.argsort(begun.lane, kind="stable")), views, step, now_s)

    def _present(self) -> ServerViews:
        shape = self.lanes.shape
        return ServerViews(self._open.reshape(shape), (self._open / self._limit).reshape(shape))

    def _assign(self, begun: Beginnings, views: ServerViews, step: int, now_s: float) -> None:
        cell_A = begun.lane * self._servers + self._balancer.choose(begun.lane, views)
        reached = self._up[cell_A]
        if not reached.all():
            assert self.lanes.failures is not None
            lost = max(1, round(self.lanes.failures.detection.connect_ms / 1e3 / self._step_s))
            self._later[step + lost].append(begun.where(~reached))
            begun, cell_A = begun.where(reached), cell_A[reached]
        order = np.argsort(cell_A, kind="stable")
        begun, cell_A = begun.where(order), cell_A[order]
        admitted = self._open[cell_A] + rank_in_group(cell_A) < self._limit[cell_A]
        cells = cell_A[admitted]
        np.add.at(self._open, cells, 1)
        np.add.at(self._by_phase[step % self._phases], cells, 1)
        np.add.at(self._ending, (begun.end[admitted] % len(self._ending), cells), 1)
        refused = begun.where(~admitted)
        if refused.lane.size and now_s >= self._warm_s:
            group = self._group(refused.lane, now_s)
            self.streams.refuse(group)
            # A new stream has no results, and the rest of an interrupted one has none any more.
            lost = np.maximum((refused.end - step) // self._phases, 0)
            self.counts.offer(group, lost)
            self.counts.refuse(group, lost)

    def _start(self, cells: Counts, step: int, now_s: float) -> None:
        """Start a batch on each cell: the chunks that wait, in order, up to the largest batch."""
        start_C = np.maximum(self._free_s[cells], now_s)
        count_C = np.minimum(self._waiting[cells], self.tables.largest)
        time_C = self.tables.batch_s[count_C] * self._slowness[cells] * self._noise(self._rng, cells.size)
        end_C = start_C + time_C
        oldest = int(self._oldest[cells].min())
        steps_W = np.arange(max(oldest, step - self._window + 1), step + 1)
        waiting_WC = self._waiting_by_step[(steps_W % self._window)[:, None], cells]
        before_WC = np.cumsum(waiting_WC, axis=0) - waiting_WC
        taken_WC = np.clip(count_C - before_WC, 0, waiting_WC)
        self._waiting_by_step[(steps_W % self._window)[:, None], cells] = waiting_WC - taken_WC
        self._waiting[cells] -= count_C
        # The first step of which chunks are left.
        self._oldest[cells] = steps_W[np.argmax(waiting_WC > taken_WC, axis=0)]
        when_W = (steps_W * self._step_s).astype(np.float64)
        at_W, at_C = (taken_WC * (when_W >= self._warm_s)[:, None]).nonzero()
        latency = end_C[at_C] - when_W[at_W]
        lane = cells[at_C] // self._servers
        self.counts.answer(self._group(lane, when_W[at_W]), latency, taken_WC[at_W, at_C])
        self._free_s[cells] = end_C
        self.busy_s[cells] += time_C * (start_C >= self._warm_s)
        self.rows[cells] += count_C
        self.batches[cells] += 1

    def _fail(self, step: int, now_s: float) -> None:
        failures = self.lanes.failures
        if failures is None:
            return
        if step == round(failures.at_s / self._step_s):
            down = (failures.down_LS & self.lanes.exists_LS).reshape(-1).nonzero()[0]
            self._up[down] = False
            self._interrupt(down, step, now_s, failures.detection.reconnect_ms / 1e3)
        if step == round((failures.at_s + failures.detection.detect_ms / 1e3) / self._step_s):
            self._balancer.set_up(self._up.reshape(self.lanes.shape))

    def _interrupt(self, down: Counts, step: int, now_s: float, reconnect_s: float) -> None:
        """Break the streams of servers; their clients connect again, and the chunks in between are lost."""
        self.counts.refuse(self._group(down // self._servers, now_s), self._waiting[down])
        self._waiting_by_step[:, down], self._waiting[down] = 0, 0
        index, which = self._ending[:, down].nonzero()
        left = (index - step) % len(self._ending)
        count = self._ending[index, down[which]]
        left, lane = np.repeat(left, count), np.repeat(down[which] // self._servers, count)
        self._ending[:, down], self._by_phase[:, down], self._open[down] = 0, 0, 0
        np.add.at(self.interrupted, lane, 1)
        away_s = reconnect_s * (1 + self._rng.random(lane.size))
        back = np.maximum((away_s / self._step_s).astype(np.int64), 1)
        missed = -(-np.minimum(back, left) // self._phases)
        self.counts.offer(self._group(lane, now_s), missed)
        self.counts.refuse(self._group(lane, now_s), missed)
        # Those whose utterance is over by then do not come back.
        returning = back < left
        begun = Beginnings(lane, step + left).where(returning)
        back = back[returning]
        for delay in np.unique(back):
            self._later[step + int(delay)].append(begun.where(back == delay))

    def _add(self, count: Callable[[Counts, Counts], None], value_N: Counts, now_s: float) -> None:
        """Add values of cells or lanes to their groups."""
        lane_L = value_N if value_N.size == self._lanes_count else value_N.reshape(self.lanes.shape).sum(1)
        count(self._group(np.arange(self._lanes_count), now_s), lane_L)

    def _group(self, lane_A: Counts, when_s: Floats | float) -> Counts:
        if not self._by_second:
            return lane_A
        return np.maximum((np.asarray(when_s) - self._warm_s).astype(np.int64), 0) * self._lanes_count + lane_A
