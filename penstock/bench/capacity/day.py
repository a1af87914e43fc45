"""A day of a service: moments of it are simulated side by side, each as a lane."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.bench.capacity.demand import DAY_S, Demand
from penstock.bench.capacity.fleet_lanes import FleetLanes
from penstock.bench.capacity.fleet_service import Conditions, Service, Simulated, simulate
from penstock.bench.capacity.sizing import MAX_SIMULATED, PERCENT, WARM_S, Outage, failing_part

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# Moments of a day, one each quarter of an hour.
MOMENTS = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceDay:
    """A simulated day.

    Args:
        service: The service.
        servers: Its servers.
        hour_T: Hour of each moment, `[T]`.
        lost_T: Moments at which a zone and nodes are down.
        rate_T: Requests or beginnings of streams a second of the whole fleet.
        p99_s_T: 99th percentile of the latency of what was answered, in seconds.
        refused_T: Share of requests or streams that were refused.
        busy_T: Share of the time that the engines which are up worked.
        p99_s: 99th percentile of the day over all requests, those without an answer included.
        simulated: Requests or chunks that were simulated.
        cells: Servers of all moments, which advanced in lockstep.
    """

    service: Service
    servers: int
    hour_T: Floats
    lost_T: Flags
    rate_T: Floats
    p99_s_T: Floats
    refused_T: Floats
    busy_T: Floats
    p99_s: float
    simulated: int
    cells: int


def simulate_day(
    service: Service, demand: Demand, outage: Outage, conditions: Conditions, *, servers: int, moment_s: float
) -> ServiceDay:
    """Simulate a day in which a zone and some nodes are lost at the peak.

    Args:
        service: The service.
        demand: The shape of the day.
        outage: What is lost, and for how long.
        conditions: Policy, age of views and seed.
        servers: Servers of the service.
        moment_s: Simulated seconds of each moment.
    """
    second_T = np.arange(MOMENTS, dtype=np.float64) * (DAY_S / MOMENTS)
    since_peak_T = (second_T - demand.peak_hour * 3600) % DAY_S
    # A short outage has one moment too.
    lost_T = since_peak_T < max(outage.minutes * 60, DAY_S / MOMENTS)
    rate_T = service.peak_rate * demand.share_of_peak(second_T)
    part = min(servers, MAX_SIMULATED)
    exists_TS = np.ones((MOMENTS, part), bool)
    exists_TS[lost_T] &= ~failing_part(outage, part, servers)
    # Each server that is there has its share of the load.
    there_T = np.where(lost_T, np.maximum(outage.survivors(servers), 1), servers)
    lanes = FleetLanes(
        rate_L=rate_T * exists_TS.sum(1) / there_T,
        exists_LS=exists_TS,
        slowness_LS=np.tile(conditions.slowness(part), (MOMENTS, 1)),
    )
    conditions = replace(conditions, seed=conditions.seed + 2)
    found = simulate(service, lanes, conditions, seconds=WARM_S + moment_s, warm_s=WARM_S)
    return ServiceDay(
        service=service,
        servers=servers,
        hour_T=second_T / 3600,
        lost_T=lost_T,
        rate_T=rate_T,
        p99_s_T=found.counts.percentiles_s(PERCENT, answered_only=True),
        refused_T=_refused(found),
        busy_T=found.busy_L,
        p99_s=found.counts.percentile_s(PERCENT),
        simulated=int(found.counts.offered.sum()),
        cells=exists_TS.size,
    )


def _refused(found: Simulated) -> Floats:
    return found.refused / np.maximum(found.offered, 1)
