"""A service of a fleet: its servers, its load and its budget, and one simulation of it."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.bench.capacity.fleet_lanes import FleetLanes
from penstock.bench.capacity.latency_counts import LatencyCounts
from penstock.bench.capacity.policies import Policy
from penstock.bench.capacity.request_cells import RequestCells, lognormal
from penstock.bench.capacity.server_model import CostTables, ServerModel
from penstock.bench.capacity.stream_cells import StreamCells, StreamShape
from penstock.core.errors import BenchError

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

# Shares of front-ends and of the network that a plan uses at most; only the engines are simulated.
FRONTEND_SHARE = 0.7
NETWORK_SHARE = 0.7
# Steps of a latency budget.
STEPS_A_BUDGET = 50


@dataclass(frozen=True, kw_only=True)
class Service:
    """Servers of one application.

    Args:
        name: Its name.
        server: One of its servers.
        latency_ms: Latency budget of a request or chunk.
        peak_rate: Requests, or beginnings of streams, a second at the peak.
        chunk_ms: Time from one chunk of a stream to the next; None for one-shot requests.
        stream_s: Length of a stream.
    """

    name: str
    server: ServerModel
    latency_ms: float
    peak_rate: float
    chunk_ms: float | None = None
    stream_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency_ms", *(("chunk_ms",) if self.chunk_ms is not None else ())):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise BenchError(f"{name} of {self.name} is {getattr(self, name):g}; it must be above 0.")
        assert self.tables.largest

    @property
    def chunks(self) -> int:
        """Chunks of a stream; 1 for a one-shot request."""
        return 1 if self.chunk_ms is None else max(1, math.ceil(self.stream_s * 1e3 / self.chunk_ms - 1e-9))

    @property
    def peak_messages(self) -> float:
        """Requests or chunks a second at the peak."""
        return self.peak_rate * self.chunks

    @cached_property
    def tables(self) -> CostTables:
        """The scheduler's predictions."""
        return CostTables(self.server.costs(self.latency_ms), self.latency_ms / 1e3)

    @cached_property
    def capacity(self) -> dict[str, float]:
        """Requests or chunks a second that each resource of one server carries."""
        server, tables = self.server, self.tables
        if self.chunk_ms is None:
            engine = tables.largest / float(tables.batch_s[tables.largest])
        else:
            engine = tables.stream_limit(self.chunk_ms / 1e3) * 1e3 / self.chunk_ms
        found = {"engine": engine}
        if server.frontend_us:
            found["front-ends"] = FRONTEND_SHARE * server.frontend_cores * 1e6 / server.frontend_us
        if server.message_bytes:
            found["network"] = NETWORK_SHARE * server.gigabits * 1e9 / 8 / server.message_bytes
        return found

    @property
    def stream_limit(self) -> int:
        """Streams that one server admits: of the engine, or of what its front-ends and network carry."""
        assert self.chunk_ms is not None
        return max(1, int(min(self.capacity.values()) * self.chunk_ms / 1e3))

    def utilization(self, messages_a_second: float, servers: float) -> dict[str, float]:
        """Return the share of each resource that is used; the engine's is simulated, see `Simulated.busy_L`."""
        each = messages_a_second / servers
        shares = {"front-ends": FRONTEND_SHARE, "network": NETWORK_SHARE}
        return {name: share * each / self.capacity[name] for name, share in shares.items() if name in self.capacity}


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """Outcome of a simulation. A group is a lane, or a second of a lane: second * L + lane.

    Args:
        counts: Latencies of requests or chunks, and those without an answer in time.
        refused: Requests or streams that were refused, `[groups]`.
        offered: Requests or streams that came, `[groups]`.
        busy_L: Share of the time that engines worked, over the servers of the lane.
        interrupted_L: Streams that a failure interrupted.
    """

    counts: LatencyCounts
    refused: Counts
    offered: Counts
    busy_L: Floats
    interrupted_L: Counts


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """Conditions of a simulation.

    Args:
        policy: The load balancer's policy.
        view_age_ms: Age of what the balancer sees of the servers.
        slow: Share of the servers at half speed.
        seed: Seed of the random numbers.
    """

    policy: Policy = Policy.PREDICTED_FINISH
    view_age_ms: float = 20.0
    slow: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.view_age_ms) and 0 <= self.view_age_ms <= 10_000):
            raise BenchError(f"the views' age is {self.view_age_ms:g} ms; give 0 to 10,000.")
        if not 0 <= self.slow <= 1:
            raise BenchError(f"the share of slow servers is {self.slow:g}; give 0 to 1.")

    def slowness(self, servers: int) -> Floats:
        """Return the slowness of each server, `[S]`: the slow ones are spread evenly."""
        place = np.arange(servers)
        return np.where(np.floor((place + 1) * self.slow) > np.floor(place * self.slow), 2.0, 1.0)


def simulate(
    service: Service,
    lanes: FleetLanes,
    conditions: Conditions,
    *,
    seconds: float,
    warm_s: float,
    by_second: bool = False,
) -> Simulated:
    """Simulate some lanes of a service.

    Args:
        service: The service.
        lanes: Its fleets and their loads.
        conditions: Policy, age of views and seed.
        seconds: Simulated time, the warm-up included.
        warm_s: Time before the measurement.
        by_second: Count each second apart.
    """
    budget_s = service.latency_ms / 1e3
    noise = lognormal(service.server.jitter)
    age_s, seed = conditions.view_age_ms / 1e3, conditions.seed
    if service.chunk_ms is None:
        cells = RequestCells(
            lanes,
            service.tables,
            conditions.policy,
            step_s=min(budget_s / STEPS_A_BUDGET, 0.005),
            seconds=seconds,
            warm_s=warm_s,
            view_age_s=age_s,
            seed=seed,
            noise=noise,
            by_second=by_second,
        ).run()
        refused, offered = cells.counts.refused, cells.counts.offered
        interrupted = np.zeros(lanes.shape[0], np.int64)
    else:
        chunk_s = service.chunk_ms / 1e3
        cells = StreamCells(
            lanes,
            service.tables,
            StreamShape(chunk_s=chunk_s, stream_s=service.stream_s, limit=service.stream_limit),
            conditions.policy,
            step_s=chunk_s / math.ceil(chunk_s / min(budget_s / STEPS_A_BUDGET * 2, 0.01)),
            seconds=seconds,
            warm_s=warm_s,
            view_age_s=age_s,
            seed=seed,
            noise=noise,
            by_second=by_second,
        ).run()
        refused, offered = cells.streams.refused, cells.streams.offered
        interrupted = cells.interrupted
    busy = cells.busy_s.reshape(lanes.shape).sum(1) / lanes.exists_LS.sum(1) / (seconds - warm_s)
    return Simulated(counts=cells.counts, refused=refused, offered=offered, busy_L=busy, interrupted_L=interrupted)
