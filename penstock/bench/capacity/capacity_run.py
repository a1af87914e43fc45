"""`penstock bench capacity`: plan a fleet, simulate its day, and say what it costs."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.bench.capacity.day import ServiceDay, simulate_day
from penstock.bench.capacity.demand import Demand
from penstock.bench.capacity.fleet_file import FleetServers
from penstock.bench.capacity.fleet_service import Conditions, Service
from penstock.bench.capacity.sizing import MAX_SERVERS, Outage, ServicePlan, plan
from penstock.core.errors import BenchError


@dataclass(frozen=True, kw_only=True)
class CapacitySettings:
    """Settings of a simulated fleet.

    Args:
        demand: Users and their requests.
        servers: One server of each service.
        outage: What fails at the peak.
        conditions: Policy, age of views, slow servers, seed.
        pictures_ms: Latency budget of a picture.
        speech_ms: Latency budget of a chunk of sound.
        chunk_ms: Time from one chunk to the next.
        counts: Servers by service, instead of the fewest that keep the budget.
        moment_s: Simulated seconds of each moment of the day.
        price: Price of a server hour, in any currency, or None.
    """

    demand: Demand = field(default_factory=Demand)
    servers: FleetServers = field(default_factory=FleetServers)
    outage: Outage = field(default_factory=Outage)
    conditions: Conditions = field(default_factory=Conditions)
    pictures_ms: float = 50.0
    speech_ms: float = 50.0
    chunk_ms: float = 80.0
    counts: dict[str, int] = field(default_factory=dict[str, int])
    moment_s: float = 10.0
    price: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.moment_s <= 600:
            raise BenchError(f"a moment is {self.moment_s:g} s; give 1 to 600.")
        if self.price is not None and not 0 <= self.price < float("inf"):
            raise BenchError(f"the price of a server hour is {self.price:g}; it must not be below 0.")
        for name, count in self.counts.items():
            if not 1 <= count <= MAX_SERVERS:
                raise BenchError(f"{name} has {count:,} servers; give 1 to {MAX_SERVERS:,}.")

    def services(self) -> list[Service]:
        """Return the services that have a load."""
        demand = self.demand
        found: list[Service] = []
        if demand.utterances:
            found.append(
                Service(
                    name="speech",
                    server=self.servers.speech,
                    latency_ms=self.speech_ms,
                    peak_rate=demand.utterance_rate,
                    chunk_ms=self.chunk_ms,
                    stream_s=demand.utterance_s,
                )
            )
        if demand.pictures:
            found.append(
                Service(
                    name="pictures",
                    server=self.servers.pictures,
                    latency_ms=self.pictures_ms,
                    peak_rate=demand.picture_rate,
                )
            )
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityResult:
    """The plan of a fleet and its day.

    Args:
        settings: The settings.
        plans: The servers of each service, and the failure at the peak.
        days: The day of each service.
        day_seconds: Wall-clock time that simulating the day took.
    """

    settings: CapacitySettings
    plans: list[ServicePlan]
    days: list[ServiceDay]
    day_seconds: float

    @property
    def servers(self) -> int:
        """Servers of the fleet."""
        return sum(each.servers for each in self.plans)

    @property
    def server_hours_a_million(self) -> float:
        """Server hours of a million requests: pictures and utterances."""
        return self.servers * 24 / (self.settings.demand.requests / 1e6)

    @property
    def cost_a_million(self) -> float | None:
        """Cost of a million requests, if a server hour has a price."""
        price = self.settings.price
        return None if price is None else price * self.server_hours_a_million


def run_capacity(settings: CapacitySettings, say: Callable[[str], None]) -> CapacityResult:
    """Plan the servers of each service and simulate the day.

    Args:
        settings: The settings.
        say: Called with a sentence on the progress.

    Raises:
        BenchError: No fleet keeps the budget.
    """
    plans = [
        plan(service, settings.outage, settings.conditions, say, settings.counts.get(service.name))
        for service in settings.services()
    ]
    begin_s = time.perf_counter()
    days: list[ServiceDay] = []
    for each in plans:
        say(f"{each.service.name}: a day of {settings.demand.users:,.0f} users")
        days.append(
            simulate_day(
                each.service,
                settings.demand,
                settings.outage,
                settings.conditions,
                servers=each.servers,
                moment_s=settings.moment_s,
            )
        )
    return CapacityResult(settings=settings, plans=plans, days=days, day_seconds=time.perf_counter() - begin_s)


def capacity_record(result: CapacityResult) -> dict[str, Any]:
    """Return a result for programs; a latency of nothing, or where 1% or more had no answer, is null."""
    return {
        "users": result.settings.demand.users,
        "policy": str(result.settings.conditions.policy),
        "seed": result.settings.conditions.seed,
        "servers": result.servers,
        "server_hours_a_million": result.server_hours_a_million,
        "cost_a_million": result.cost_a_million,
        "day_seconds": result.day_seconds,
        "services": [
            {
                "name": each.service.name,
                "servers": each.servers,
                "binding": each.binding,
                "bounds": each.bounds,
                "latency_ms": each.service.latency_ms,
                "peak_rate": each.service.peak_rate,
                "failure_p99_ms": _ms(each.p99_s),
                "interrupted_streams": each.interrupted_streams,
                "day_p99_ms": _ms(day.p99_s),
                "simulated": day.simulated,
                "moments": [
                    {
                        "hour": hour,
                        "lost": lost,
                        "rate": rate,
                        "p99_ms": p99_ms,
                        "refused": refused,
                        "engine_busy": busy,
                    }
                    for hour, lost, rate, p99_ms, refused, busy in zip(
                        day.hour_T.tolist(),
                        day.lost_T.tolist(),
                        day.rate_T.tolist(),
                        [_ms(value) for value in day.p99_s_T.tolist()],
                        day.refused_T.tolist(),
                        day.busy_T.tolist(),
                        strict=True,
                    )
                ],
            }
            for each, day in zip(result.plans, result.days, strict=True)
        ],
    }


def _ms(seconds: float) -> float | None:
    return seconds * 1e3 if np.isfinite(seconds) else None
