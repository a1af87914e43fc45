"""Servers that a service needs so that it keeps its budget while a zone and some nodes fail at the peak."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from penstock.bench.capacity.fleet_lanes import Detection, Failures, FleetLanes, equal_servers, zone_and_nodes
from penstock.bench.capacity.fleet_service import Conditions, Service, Simulated, simulate
from penstock.core.errors import BenchError

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# A percentile over all requests: those that are refused or lost count as infinitely late.
PERCENT = 99.0
# Seconds before the failure, the first of which are a warm-up, and from it on.
WARM_S, BEFORE_S, WINDOW_S = 1.0, 3.0, 60.0
# Servers of a lane: a larger fleet is simulated as this part of it, with this part of the load.
MAX_SIMULATED = 64
CANDIDATES = 6
MAX_ROUNDS = 8
MAX_SERVERS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """A failure at the peak.

    Args:
        zones: Zones over which the servers are spread; with two or more, one is lost.
        nodes: Servers of other zones that fail at the same moment.
        minutes: Time until they are back.
        detection: What others see of it.
    """

    zones: int = 3
    nodes: int = 2
    minutes: float = 30.0
    detection: Detection = field(default_factory=Detection)

    def __post_init__(self) -> None:
        if not 1 <= self.zones <= 1000:
            raise BenchError(f"there are {self.zones} zones; give 1 to 1,000.")
        if not 0 <= self.nodes <= MAX_SERVERS:
            raise BenchError(f"{self.nodes} nodes fail; give 0 to {MAX_SERVERS:,}.")
        if not 0 < self.minutes <= 12 * 60:
            raise BenchError(f"the outage lasts {self.minutes:g} minutes; give more than 0 and at most 720.")

    def survivors(self, servers: int) -> int:
        """Return how many of so many servers stay."""
        zone = -(-servers // self.zones) if self.zones > 1 else 0
        return max(servers - zone - self.nodes, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServicePlan:
    """Servers of a service, and the failure at the peak with them.

    Args:
        service: The service.
        servers: Servers.
        binding: The resource that determines their number; `latency` where no resource is full.
        bounds: Servers that each resource needs, by its capacity alone.
        failure: The simulated failure, by second; second 0 is the first after the warm-up.
        interrupted_streams: Streams that the failure interrupts, of the whole fleet.
        p99_s: 99th percentile from the failure on, in seconds.
    """

    service: Service
    servers: int
    binding: str
    bounds: dict[str, int]
    failure: Simulated
    interrupted_streams: int
    p99_s: float


def plan(
    service: Service,
    outage: Outage,
    conditions: Conditions,
    say: Callable[[str], None],
    servers: int | None = None,
) -> ServicePlan:
    """Find the servers that a service needs, and simulate the failure with them.

    Args:
        service: The service.
        outage: What fails.
        conditions: Policy, age of views and seed.
        say: Called with a sentence on the progress.
        servers: So many servers instead of the fewest that keep the budget.

    Raises:
        BenchError: No number of servers keeps the budget, or all of them fail.
    """
    bounds = bounds_of(service, outage, conditions)
    binding = max(bounds, key=lambda name: bounds[name])
    if servers is None:
        servers = _fewest(service, outage, conditions, bounds[binding], say)
        if servers > bounds[binding] * 1.1 + 1:
            binding = "latency"
    elif not outage.survivors(servers):
        raise BenchError(
            f"all {servers:,} servers of {service.name} fail with a zone and {outage.nodes} nodes; give more servers, "
            f"or fewer nodes that fail."
        )
    say(f"{service.name}: the failure at the peak with {servers:,} servers")
    # Other random numbers than those by which the number was found.
    fresh = replace(conditions, seed=conditions.seed + 1)
    lanes, fractions = failing_lanes(service, outage, fresh, [servers])
    failure = simulate(service, lanes, fresh, seconds=BEFORE_S + WINDOW_S, warm_s=WARM_S, by_second=True)
    p99_s = float(window_percentiles(failure, 1)[0])
    assert lanes.failures is not None
    # The part that is simulated loses more than its share.
    down = max(float(lanes.failures.down_LS.mean()), 1e-9)
    share = (servers - outage.survivors(servers)) / servers / down
    return ServicePlan(
        service=service,
        servers=servers,
        binding=binding,
        bounds=bounds,
        failure=failure,
        interrupted_streams=round(float(failure.interrupted_L.sum()) / fractions[0] * share),
        p99_s=p99_s,
    )


def bounds_of(service: Service, outage: Outage, conditions: Conditions) -> dict[str, int]:
    """Return the servers that each resource needs when those that stay carry the peak."""
    # Half the speed is half an engine.
    engine_share = 1 - conditions.slow / 2
    bounds: dict[str, int] = {}
    for name, capacity in service.capacity.items():
        needed = service.peak_messages / (capacity * (engine_share if name == "engine" else 1.0))
        if needed > MAX_SERVERS:
            raise BenchError(
                f"{service.name} needs {needed:,.0f} servers by their {name}, more than {MAX_SERVERS:,}; give faster "
                f"servers or fewer users."
            )
        servers = max(1, math.ceil(needed))
        while outage.survivors(servers) < max(1, math.ceil(needed)):
            servers += max(1, (math.ceil(needed) - outage.survivors(servers)) // 2)
        bounds[name] = servers
    return bounds


def failing_lanes(
    service: Service, outage: Outage, conditions: Conditions, servers: list[int]
) -> tuple[FleetLanes, list[float]]:
    """Make a lane at the peak for each number of servers, with the failure; return the part of the fleet in each."""
    simulated = [min(count, MAX_SIMULATED) for count in servers]
    fractions: list[float] = []
    down = np.zeros((len(servers), max(simulated)), bool)
    for lane, (part, count) in enumerate(zip(simulated, servers, strict=True)):
        down[lane, :part] = failing_part(outage, part, count)
        # A part of 64 loses more than its share, in whole servers; those that stay have theirs of the load.
        left = part - int(down[lane].sum())
        fractions.append(left / max(outage.survivors(count), left))
    slowness = np.tile(conditions.slowness(max(simulated)), (len(servers), 1))
    failures = Failures(at_s=BEFORE_S, down_LS=down, detection=outage.detection)
    rates = [service.peak_rate * fraction for fraction in fractions]
    return equal_servers(rates, simulated, slowness_LS=slowness, failures=failures), fractions


def failing_part(outage: Outage, part: int, servers: int) -> Flags:
    """Return which servers fail of a part of a fleet, `[part]`."""
    return zone_and_nodes([part], outage.zones, math.ceil(outage.nodes * part / servers))[0]


def window_percentiles(failure: Simulated, lanes: int, seconds: float = WINDOW_S) -> Floats:
    """Return the 99th percentile of each lane over some seconds from the failure on, `[L]`."""
    second = np.arange(failure.counts.groups) // lanes
    begin = BEFORE_S - WARM_S
    inside = (second >= begin) & (second < begin + seconds)
    lane = np.arange(failure.counts.groups) % lanes
    found = [
        failure.counts.percentile_s(PERCENT, (inside & (lane == each)).astype(np.float64)) for each in range(lanes)
    ]
    return np.array(found)


def _fewest(service: Service, outage: Outage, conditions: Conditions, first: int, say: Callable[[str], None]) -> int:
    """Search the fewest servers from which on the budget is kept, to within a hundredth."""
    step, found = max(1, first // 20), None
    for _ in range(MAX_ROUNDS):
        tried = [first + step * at for at in range(CANDIDATES)]
        say(f"{service.name}: {tried[0]:,} to {tried[-1]:,} servers")
        lanes, _ = failing_lanes(service, outage, conditions, tried)
        failure = simulate(service, lanes, conditions, seconds=BEFORE_S + WINDOW_S, warm_s=WARM_S, by_second=True)
        # Nan, where nothing came, is kept.
        kept = ~(window_percentiles(failure, len(tried)) > service.latency_ms / 1e3)
        failed = (~kept).nonzero()[0]
        if kept[-1]:
            found = tried[failed[-1] + 1 if failed.size else 0]
        if found is None:
            first, step = tried[-1] + step, step * 2
        elif kept[-1] and failed.size and step > max(1, found // 100):
            first, step = tried[failed[-1]] + 1, math.ceil((step - 1) / (CANDIDATES - 1))
        else:
            break
    if found is not None:
        return found
    raise BenchError(
        f"{service.name} does not keep {service.latency_ms:g} ms for {PERCENT:g}% of all requests with {first:,} "
        f"servers while a zone and {outage.nodes} nodes fail; give a longer budget, more zones or quicker detection."
    )
