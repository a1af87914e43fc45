"""The simulated server, and the optimum that it is held against."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from benchmarks.acceptance.scheduler.arrival_traces import KINDS, generated, recorded
from benchmarks.acceptance.scheduler.simulation import (
    POLICIES,
    ArrivalTrace,
    SimulatedMachine,
    fixed_delay,
    in_time,
    optimum,
)
from penstock.core.errors import BenchError

SMALL = SimulatedMachine(name="small", overhead_ms=4.0, row_ms=1.0, max_batch=3)


def best_by_trying_everything(trace: ArrivalTrace, machine: SimulatedMachine) -> int:
    """Every choice of requests, cut into batches in every way, each batch as early as it can be."""

    def feasible(chosen: tuple[int, ...], now: float) -> bool:
        if not chosen:
            return True
        for size in range(1, min(machine.max_batch, len(chosen)) + 1):
            end = max(now, trace.arrival_s[chosen[size - 1]]) + machine.batch_s(size)
            if end <= trace.deadline_s[chosen[0]] and feasible(chosen[size:], end):
                return True
        return False

    count = len(trace.arrival_s)
    return max(
        answered
        for answered in range(count + 1)
        if any(feasible(chosen, 0.0) for chosen in combinations(range(count), answered))
    )


@pytest.mark.parametrize("seed", range(25))
def test_the_optimum_is_what_trying_everything_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrivals = np.sort(rng.uniform(0, 0.03, 8))
    trace = ArrivalTrace(name="tiny", arrival_s=arrivals, budget_s=np.full(8, rng.uniform(0.006, 0.02)))
    assert optimum(trace, SMALL) == best_by_trying_everything(trace, SMALL)


@pytest.mark.parametrize("kind", KINDS)
def test_no_policy_beats_the_optimum_and_light_loads_are_all_kept(kind: str) -> None:
    machine = SimulatedMachine(name="steady", overhead_ms=1.0, row_ms=0.2, max_batch=16)
    for load in (0.3, 2.0):
        trace = generated(kind, load * machine.capacity, 200 / (load * machine.capacity), 0)
        best = optimum(trace, machine)
        kept = {name: in_time(trace, policy(trace, machine, 0)) for name, policy in POLICIES.items()}
        # A lucky noise may end a batch a little earlier than the noiseless machine of the optimum.
        assert all(count <= best * 1.05 + 2 for count in kept.values()), (kept, best)
        if load < 1:
            assert kept["penstock"] == len(trace.arrival_s)


def test_the_scheduler_keeps_more_than_the_others_under_overload() -> None:
    machine = SimulatedMachine(name="steady", overhead_ms=1.0, row_ms=0.2, max_batch=16)
    trace = generated("steady", 2 * machine.capacity, 0.3, 0)
    kept = {name: in_time(trace, policy(trace, machine, 0)) for name, policy in POLICIES.items()}
    assert kept["penstock"] > max(count for name, count in kept.items() if name != "penstock")


def test_fixed_delay_waits_for_its_batch_and_no_longer() -> None:
    machine = SimulatedMachine(name="exact", overhead_ms=1.0, row_ms=0.0, max_batch=4)
    trace = ArrivalTrace(name="three", arrival_s=np.array([0.0, 0.001, 0.1]), budget_s=np.full(3, 1.0))
    answered_s = fixed_delay(2, 50.0)(trace, machine, 0)
    assert answered_s[0] == answered_s[1] == pytest.approx(0.002, rel=0.3)
    assert answered_s[2] == pytest.approx(0.151, rel=0.05)


def test_generated_traces_have_their_rate_and_are_the_same_for_the_same_seed() -> None:
    for kind in KINDS:
        trace = generated(kind, 1000, 2.0, 1)
        assert len(trace.arrival_s) == pytest.approx(2000, rel=0.15)
        assert (np.diff(trace.arrival_s) >= 0).all()
        np.testing.assert_array_equal(trace.arrival_s, generated(kind, 1000, 2.0, 1).arrival_s)
    with pytest.raises(BenchError, match="no kind of trace 'tide'"):
        generated("tide", 1, 1, 0)


def test_a_recorded_trace_is_stretched_to_a_rate(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("# by hand\narrival_s,budget_ms\n5.0,50\n7.0,20\n6.0,50\n")
    trace = recorded(file, 3.0)
    assert trace.arrival_s.tolist() == [0.0, 0.5, 1.0]
    assert trace.budget_s.tolist() == [0.05, 0.05, 0.02]
    file.write_text("time\n1\n")
    with pytest.raises(BenchError, match=r"not a trace .*arrival_s,budget_ms"):
        recorded(file, 1.0)
