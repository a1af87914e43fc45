"""Figures of isolation from a hostile client, and of recovery from faults."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from benchmarks.acceptance.figures import Repetitions
from penstock.bench.chaos.chaos_run import ChaosResult, ChaosSettings, measured_rate, run_chaos
from penstock.bench.chaos.fault_schedule import HITLESS
from penstock.bench.isolation.isolation_run import IsolationResult, IsolationSettings, run_isolation

INPUT_S = 0.35
CONNECTIONS, LOAD = 200, 0.7
SEEDS, CHAOS_S = 5, 300.0
HITLESS_LOAD, HITLESS_S = 0.8, 100.0
# The clients' work must not be taken for the server's.
_CORES = sorted(os.sched_getaffinity(0))
SERVER, CLIENTS = frozenset(_CORES[:-1] or _CORES), frozenset(_CORES[-1:])


def isolation_p99_ratio() -> list[float]:
    """Return the p99 of others beside the worst input over the quiet one."""
    return [_isolation().worst_ratio]


def isolation_refused() -> list[float]:
    """Return the requests of others that were refused over all inputs."""
    return [float(_isolation().refused)]


def chaos_recovery_s() -> Repetitions:
    """Return the longest recovery of each seed, beyond one load."""
    return _counted([result.worst[1] for result in _chaos() if result.worst is not None], _chaos())


def chaos_stuck() -> Repetitions:
    """Return the violations of each seed, and the servers that had to be started anew."""
    return _counted([float(len(result.violations) + result.restarts) for result in _chaos()], _chaos())


def hitless_avoidable_5xx() -> Repetitions:
    """Return the avoidable answers of 500 and more of each seed, and its violations, such as avoidable resets."""
    return _counted([float(result.avoidable_5xx + len(result.violations)) for result in _hitless()], _hitless())


def hitless_over_budget_ms() -> Repetitions:
    """Return the worst lateness of each seed past the budget, beyond the control processes."""
    values = [result.over_budget[0] for result in _hitless() if result.over_budget is not None]
    counted = _counted(values, _hitless())
    # They make a busy server late, and the control processes do not see them.
    others = max(result.others_cores for result in _hitless())
    return replace(counted, note=f"{counted.note}; other processes used up to {others:.2f} cores")


def _counted(values: list[float], results: Sequence[ChaosResult]) -> Repetitions:
    return Repetitions(values, f"{sum(len(result.recovery) for result in results):,} faults in all")


@cache
def _isolation() -> IsolationResult:
    return run_isolation(IsolationSettings(seconds=INPUT_S, connections=CONNECTIONS, load=LOAD), print)


@cache
def _chaos() -> tuple[ChaosResult, ...]:
    return tuple(run_chaos(ChaosSettings(seed=seed, seconds=CHAOS_S), print) for seed in range(SEEDS))


@cache
def _hitless() -> tuple[ChaosResult, ...]:
    settings = ChaosSettings(
        kinds=HITLESS,
        seconds=HITLESS_S,
        measure_lateness=True,
        from_whole=True,
        server_cpus=SERVER,
        client_cpus=CLIENTS,
    )
    settings = measured_rate(settings, HITLESS_LOAD)
    return tuple(run_chaos(replace(settings, seed=seed), print) for seed in range(SEEDS))
