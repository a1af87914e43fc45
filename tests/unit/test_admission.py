"""Whether one more stream can be carried, against a simulation of the eager batches that the rule is about."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.serve.frontend.admission import admits, cycle_ns, max_streams
from penstock.serve.table.costs import Costs
from tests.support.generated import examples

MS = 1_000_000


def simulated_cycle_ns(streams: int, chunk_s: float, costs: Costs) -> float | None:
    """The mean time of the later batches; None where ever more rows wait."""
    period_ns = chunk_s * 1e9
    phases = np.sort(np.random.default_rng(0).uniform(0, period_ns, streams))
    now, taken, come, times = 0.0, 0, 0, []
    while now < 60 * period_ns:
        come = int(now // period_ns) * streams + int(np.searchsorted(phases, now % period_ns, side="right"))
        if come == taken:
            laps, at = divmod(taken, streams)
            now = max(now, laps * period_ns + phases[at])
            come = taken + 1
        rows = min(come - taken, costs.largest)
        taken += rows
        ns = costs.of(rows)
        now += ns
        if now > 30 * period_ns:
            times.append(ns)
            if come - taken > 2 * streams:
                return None
    return float(np.mean(times)) if come - taken <= costs.largest else None


CURVE = Costs([1, 16, 256, 1024], [1.0 * MS, 2.0 * MS, 10.0 * MS, 35.0 * MS])


@pytest.mark.parametrize("streams", [1, 20, 100, 400, 900, 1400])
def test_the_settled_batch_is_the_simulated_one(streams: int) -> None:
    predicted, simulated = cycle_ns(streams, 0.08, CURVE), simulated_cycle_ns(streams, 0.08, CURVE)
    assert predicted is not None
    assert simulated is not None
    assert predicted == pytest.approx(simulated, rel=0.15)


def test_beyond_what_the_network_can_carry_there_is_no_batch() -> None:
    # 35 ms for 1,024 rows: 2,340 streams of 80 ms.
    assert cycle_ns(2_500, 0.08, CURVE) is None
    assert simulated_cycle_ns(2_500, 0.08, CURVE) is None
    assert not admits(2_500, 0.08, CURVE, 10_000 * MS)


def test_two_cycles_fit_the_budget() -> None:
    for streams in (50, 500, 1500):
        cycle = cycle_ns(streams, 0.08, CURVE)
        assert cycle is not None
        assert admits(streams, 0.08, CURVE, int(2 * cycle) + 1)
        assert not admits(streams, 0.08, CURVE, int(2 * cycle) - 1)


def test_handling_and_other_tables_count() -> None:
    costly = Costs([1, 16, 256, 1024], [1.0 * MS, 2.0 * MS, 10.0 * MS, 35.0 * MS], handling_ns=50_000)
    assert admits(1_000, 0.08, CURVE, 80 * MS)
    assert not admits(1_000, 0.08, costly, 80 * MS)
    assert not admits(1_400, 0.08, CURVE, 80 * MS, share=0.5)


@given(
    st.lists(st.floats(0.01, 5), min_size=1, max_size=6),
    st.floats(0.005, 1),
    st.integers(1, 5_000),
    st.integers(1, 200),
)
@settings(max_examples=examples(300))
def test_more_streams_are_never_easier(steps: list[float], chunk_s: float, streams: int, budget_ms: int) -> None:
    costs = Costs([1 << index for index in range(len(steps))], list(np.cumsum(steps) * MS))
    if admits(streams + 1, chunk_s, costs, budget_ms * MS):
        assert admits(streams, chunk_s, costs, budget_ms * MS)
    if admits(streams, chunk_s, costs, budget_ms * MS):
        assert admits(streams, chunk_s, costs, budget_ms * MS + MS)


@given(
    st.lists(st.floats(0.01, 5), min_size=1, max_size=6),
    st.floats(0.005, 1),
    st.integers(1, 200),
    st.floats(0.5, 1),
)
@settings(max_examples=examples(300))
def test_as_many_streams_as_are_said_to_be_the_most_are_admitted(
    steps: list[float], chunk_s: float, budget_ms: int, share: float
) -> None:
    costs = Costs([1 << index for index in range(len(steps))], list(np.cumsum(steps) * MS))
    most = int(max_streams(chunk_s, costs, budget_ms * MS, share) * (1 - 1e-6))
    assert most <= 1 or admits(most, chunk_s, costs, budget_ms * MS, share)
    # And hardly more: only in between two measured sizes.
    assert most <= 1 or not admits(3 * most, chunk_s, costs, budget_ms * MS, share)
