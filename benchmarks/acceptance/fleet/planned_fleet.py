"""The fleet that `penstock bench capacity` plans for 300 million users: its day, and a zone that is lost."""

from dataclasses import replace
from functools import cache

import typer

from penstock.bench.capacity.capacity_run import CapacityResult, CapacitySettings, run_capacity
from penstock.bench.capacity.fleet_service import simulate
from penstock.bench.capacity.sizing import BEFORE_S, WARM_S, WINDOW_S, failing_lanes, window_percentiles
from penstock.core.errors import BenchError

SETTINGS = CapacitySettings()
MOMENT_S = SETTINGS.moment_s
# Seeds of the failure; the plan has others.
SEEDS = 5
FIRST_SEED = 100


def day_seconds() -> list[float]:
    """Return the time of simulating the day of both services.

    Raises:
        BenchError: The day's 99th percentile is beyond a budget: the planned fleet does not carry the day.
    """
    result = _planned()
    for day in result.days:
        if day.p99_s > day.service.latency_ms / 1e3:
            raise BenchError(f"the day of {day.service.name} does not keep its budget, so no figure is given.")
    return [result.day_seconds]


def zone_lost_p99() -> list[float]:
    """Return the larger one of both services' 99th percentiles over their budgets, one figure for each seed."""
    ratios: list[float] = []
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        conditions = replace(SETTINGS.conditions, seed=seed)
        found: list[float] = []
        for each in _planned().plans:
            lanes, _ = failing_lanes(each.service, SETTINGS.outage, conditions, [each.servers])
            failure = simulate(
                each.service, lanes, conditions, seconds=BEFORE_S + WINDOW_S, warm_s=WARM_S, by_second=True
            )
            found.append(float(window_percentiles(failure, 1)[0]) * 1e3 / each.service.latency_ms)
        ratios.append(max(found))
    return ratios


@cache
def _planned() -> CapacityResult:
    return run_capacity(SETTINGS, typer.echo)
