"""Figures of isolation from a hostile client, and of recovery from faults."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from benchmarks.acceptance.figures import Repetitions
from penstock.bench.chaos.chaos_result import ChaosResult, ChaosSettings
from penstock.bench.chaos.chaos_run import run_chaos
from penstock.bench.chaos.fault_schedule import HITLESS
from penstock.bench.chaos.lateness import Lateness
from penstock.bench.chaos.run_load import SUSTAINED_S
from penstock.bench.isolation.isolation_run import IsolationResult, IsolationSettings, run_isolation

INPUT_S = 0.35
CONNECTIONS, LOAD = 200, 0.7
SEEDS, CHAOS_S = 5, 300.0
HITLESS_LOAD, HITLESS_S, WORST_OF_S = 0.8, 240.0, SUSTAINED_S
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
    counted = _counted([float(result.avoidable_5xx + len(result.violations)) for result in _hitless()], _hitless())
    without, paused = (
        sum(counts) for counts in zip(*((one.without_faults_5xx, one.paused_5xx) for one in _hitless()), strict=True)
    )
    note = (
        f"{without:,} answers of 500 and more in as long a time without faults, {paused:,} beside pauses of the machine"
    )
    return replace(counted, note=f"{counted.note}; {note}")


def hitless_over_budget_ms() -> Repetitions:
    """Return the worst lateness of each seed past the budget, beyond that of its times without faults."""
    results = _hitless()
    counted = _counted([result.over_budget_ms for result in results if result.over_budget_ms is not None], results)
    # They make a busy server late, and the control processes do not see them.
    others = max(result.others_cores for result in results)
    busy = sum(result.busy for result in results) / len(results)
    rates = [rate for result in results for rate in result.rates]
    worst = max(result.left_out.over_ms for result in results)
    left_out, pairs = (sum(counts) for counts in zip(*((one.late_pairs, one.pairs) for one in results), strict=True))
    beside = _past_budget([result.beside_faults for result in results])
    without = _past_budget([result.without_faults for result in results])
    note = (
        f"{counted.note}, at {min(rates):,.0f} to {max(rates):,.0f} requests/s; beside faults {beside}; without, "
        f"{without}, and the server's cores were busy {busy:.0%} of the time; {left_out} of {pairs} pairs of times "
        f"left out, late without faults, and up to {worst:,.0f} ms with; other processes used up to {others:.2f} cores"
    )
    return replace(counted, note=note)


def _past_budget(each: Sequence[Lateness | None]) -> str:
    measured = [lateness for lateness in each if lateness is not None]
    worst = ", ".join(f"{lateness.over_ms:,.0f}" for lateness in measured)
    late, requests = (sum(values) for values in zip(*((one.late, one.requests) for one in measured), strict=True))
    return f"up to {worst} ms past the budget, {late:,} of {requests:,} requests"


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
        load=HITLESS_LOAD,
        seconds=HITLESS_S,
        measure_lateness=True,
        from_whole=True,
        server_cpus=SERVER,
        client_cpus=CLIENTS,
    )
    return tuple(run_chaos(replace(settings, seed=seed), print) for seed in range(SEEDS))
