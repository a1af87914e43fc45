"""The scheduler of rows of different lengths: what must hold for any table, any costs and any moment."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.serve.engine import length_scheduler
from penstock.serve.engine.length_scheduler import length_backlog, schedule_lengths
from penstock.serve.engine.scheduler import BatchSchedule, Columns, Rows, ready_slots
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.slots import CANCELLED_NS, LOW_PRIORITY, SOFT_DEADLINE
from tests.property.test_scheduler import NOW_NS, current, tables, waiting_table
from tests.support.generated import examples
from tests.support.length_simulation import poisson_load, simulate, together
from tests.support.varying import linear_costs

MS = 1_000_000


@st.composite
def tables_of_lengths(draw: st.DrawFn) -> tuple[Columns, Rows]:
    columns = draw(tables())
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    low = rng.random((columns.flags.shape[0], 1)) < draw(st.sampled_from([0.0, 0.0, 0.5]))
    columns = columns._replace(flags=columns.flags | np.where(low, LOW_PRIORITY, 0))
    return columns, rng.integers(1, 65, columns.flags.shape)


@st.composite
def length_costs(draw: st.DrawFn) -> LengthCosts:
    largest = draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=7, max_size=7))
    return linear_costs(draw(st.integers(0, 5 * MS)), draw(st.integers(1, MS)), largest=largest)


def table_of(slack_ms: list[float], lengths: list[int]) -> tuple[Columns, Rows]:
    columns = waiting_table([NOW_NS + int(ms * MS) for ms in slack_ms])
    return columns, np.array(lengths).reshape(-1, 1)


def decide(slack_ms: list[float], lengths: list[int], costs: LengthCosts) -> tuple[list[int], list[int], int]:
    columns, length = table_of(slack_ms, lengths)
    chosen = schedule_lengths(columns, length, NOW_NS, costs)
    return sorted(chosen.run.tolist()), sorted(chosen.expire.tolist()), chosen.waiting


@given(tables_of_lengths(), length_costs())
@settings(max_examples=examples(400), deadline=None)
def test_every_ready_row_runs_expires_or_waits_once(table: tuple[Columns, Rows], costs: LengthCosts) -> None:
    columns, length = table
    ready = set(ready_slots(columns).tolist())
    chosen: BatchSchedule = schedule_lengths(columns, length, NOW_NS, costs)
    answered = [*chosen.run.tolist(), *chosen.expire.tolist()]
    assert len(answered) == len(set(answered))
    assert set(answered) <= ready
    assert chosen.waiting == len(ready) - len(answered)
    assert bool(answered) == bool(ready)


@given(tables_of_lengths(), length_costs())
@settings(max_examples=examples(400), deadline=None)
def test_the_rows_that_run_are_in_time_and_fit(table: tuple[Columns, Rows], costs: LengthCosts) -> None:
    columns, length = table
    chosen = schedule_lengths(columns, length, NOW_NS, costs)
    if not chosen.run.size:
        return
    entry = (columns.consumed[chosen.run] - columns.busy[chosen.run]) % columns.deadline_ns.shape[1]
    lengths = length[chosen.run, entry]
    deadlines, soft = current(columns, chosen.run)
    assert chosen.run.size <= costs.largest(int(lengths.max()))
    assert (deadlines != CANCELLED_NS).all()
    slack, of_one = deadlines - NOW_NS, costs.min_compute_of(lengths)
    batch_ns = costs.of(chosen.run.size, int(lengths.max()))
    # But for the one row that is tried when nothing seems possible.
    assert (slack[~soft] >= batch_ns - 1).all() or (chosen.run.size == 1 and slack[0] >= of_one[0])


@given(tables_of_lengths(), length_costs())
@settings(max_examples=examples(400), deadline=None)
def test_only_what_cannot_be_in_time_behind_the_batch_expires(table: tuple[Columns, Rows], costs: LengthCosts) -> None:
    columns, length = table
    chosen = schedule_lengths(columns, length, NOW_NS, costs)
    entry = (columns.consumed - columns.busy) % columns.deadline_ns.shape[1]
    lengths = length[np.arange(len(length)), entry]
    batch_ns = costs.of(chosen.run.size, int(lengths[chosen.run].max())) if chosen.run.size else 0
    deadlines, soft = current(columns, chosen.expire)
    late = deadlines - NOW_NS < batch_ns + costs.min_compute_of(lengths[chosen.expire])
    assert (late & (~soft | (deadlines == CANCELLED_NS))).all()


@given(st.lists(st.integers(1, 64), min_size=1, max_size=30), length_costs(), st.integers(0, 2**31))
@settings(max_examples=examples(300), deadline=None)
def test_the_most_urgent_row_runs_where_that_makes_no_other_late(
    lengths: list[int], costs: LengthCosts, seed: int
) -> None:
    # Each row has time for all rows, one after the other.
    work_ns = float(costs.of_each(np.ones(len(lengths), np.int64), np.array(lengths)).sum())
    slack_ms = (work_ns + np.random.default_rng(seed).integers(0, 100 * MS, len(lengths)) + 1) / MS
    run, expire, _ = decide(list(slack_ms), lengths, costs)
    assert int(np.argmin(np.array([int(ms * MS) for ms in slack_ms]))) in run
    assert not expire


@given(st.integers(0, 2**31), st.integers(1, 80), st.sampled_from([0.3, 0.6, 0.9]), length_costs())
@settings(max_examples=examples(150), deadline=None)
def test_no_row_starves_below_the_capacity_of_single_rows(
    seed: int, requests: int, load: float, costs: LengthCosts
) -> None:
    """Arrivals of all lengths at a load below that of rows that run one by one: each is answered once, in time."""
    rng = np.random.default_rng(seed)
    # Many short rows and few long ones, or the other way round.
    lengths = np.where(rng.random(requests) < rng.choice([0.05, 0.5, 0.95]), rng.integers(1, 8, requests), 64)
    alone_ns = costs.of_each(np.ones_like(lengths), lengths)
    arrivals = (np.cumsum(alone_ns) / load).astype(np.int64)
    # A row waits for one batch at most, besides those that came before it.
    worst_ns = int(sum(costs.of(costs.largest(64), 64) for _ in range(2)))
    columns = waiting_table((arrivals + worst_ns + int(alone_ns.sum())).tolist())
    runs, consumed, now = np.zeros(requests, int), np.zeros(requests, np.int64), 0
    started = np.zeros(requests)
    while runs.sum() < requests:
        view = columns._replace(
            submitted=(arrivals <= now).astype(np.int64), consumed=consumed, produced=consumed, taken=consumed
        )
        chosen = schedule_lengths(view, lengths.reshape(-1, 1), now, costs)
        assert not chosen.expire.size
        if not chosen.run.size:
            now = int(arrivals[arrivals > now].min())
            continue
        # The most urgent row of all that wait is in every batch.
        waiting = np.flatnonzero((arrivals <= now) & (runs == 0))
        assert waiting[columns.deadline_ns[waiting, 0].argmin()] in chosen.run
        runs[chosen.run] += 1
        started[chosen.run] = now
        consumed = consumed.copy()
        consumed[chosen.run] += 1
        now += costs.of(chosen.run.size, int(lengths[chosen.run].max()))
    assert (runs == 1).all()


# Batches that gain nothing by more rows, and batches that take nearly as long for one row as for 32.
COSTS = {"linear": linear_costs(MS // 5, 20_000), "flat": linear_costs(2 * MS, 2_000, 32)}


@pytest.mark.parametrize("shape", COSTS)
@pytest.mark.parametrize(("load", "rows"), [(1.5, 1200), (2.0, 1200), (3.0, 2400), (5.0, 1200)])
def test_under_overload_all_lengths_are_answered_alike(load: float, rows: int, shape: str) -> None:
    """Long and short rows offer equally much work, more than there is time for: the same part of each is answered."""
    costs = COSTS[shape]
    offered = poisson_load(costs, [8, 64], load, rows, [20 * MS], seed=1)
    result = simulate(offered, costs)
    share = [result.met_R[offered.lengths_R == length].mean() for length in (8, 64)]
    assert min(share) > 0.8 * max(share), share
    # Nearly all of the time goes into answers.
    assert result.busy_share > (0.94 if shape == "linear" else 0.85), (result, share)


def test_under_overload_short_and_long_budgets_are_answered_alike() -> None:
    costs = COSTS["linear"]
    offered = poisson_load(costs, [8, 64], 3.0, 2400, [20 * MS, 100 * MS], seed=2)
    result = simulate(offered, costs)
    kinds = [(length, budget) for length in (8, 64) for budget in (20 * MS, 100 * MS)]
    share = [
        result.met_R[(offered.lengths_R == length) & (offered.budget_R == budget)].mean() for length, budget in kinds
    ]
    assert min(share) > 0.65 * max(share), dict(zip(kinds, share, strict=True))


@pytest.mark.parametrize("shape", COSTS)
def test_below_capacity_every_row_is_in_time(shape: str) -> None:
    costs = COSTS[shape]
    result = simulate(poisson_load(costs, [8, 64], 0.7, 1200, [20 * MS], seed=3), costs)
    assert result.met_R.mean() > 0.998


def test_long_rows_of_low_priority_run_in_the_time_that_others_leave() -> None:
    costs = COSTS["linear"]
    normal = poisson_load(costs, [8, 64], 0.7, 2000, [20 * MS], seed=4)
    low = poisson_load(costs, [64], 0.2, 200, [200 * MS], seed=5)
    both = together(normal, replace(low, low_R=np.ones_like(low.low_R)))
    result = simulate(both, costs)
    assert result.met_R[both.low_R].all()
    assert result.met_R[~both.low_R].mean() > 0.998
    # There are always rows of normal priority; those of low priority need not wait for a moment without any.
    assert np.percentile(result.latency_R[both.low_R], 99) < 60 * MS


def test_a_flood_of_low_priority_makes_no_other_row_late() -> None:
    costs = COSTS["linear"]
    normal = poisson_load(costs, [8, 64], 0.7, 1500, [20 * MS], seed=6)
    low = poisson_load(costs, [8, 64], 2.0, 4000, [100 * MS], seed=7)
    both = together(normal, replace(low, low_R=np.ones_like(low.low_R)))
    result = simulate(both, costs)
    within = both.arrivals_R < normal.arrivals_R[-1]
    assert result.met_R[~both.low_R].mean() > 0.995
    assert result.met_R[both.low_R & within].any()
    assert result.busy_share > 0.9


def test_rows_of_similar_length_run_together() -> None:
    costs = linear_costs(MS / 2, 50_000)
    # Padded to 64, eight rows of 8 would take as long as those of 64.
    run, expire, waiting = decide([100, *[101] * 7, *[102] * 7], [64, *[8] * 7, *[64] * 7], costs)
    assert (run, expire, waiting) == ([0, *range(8, 15)], [], 7)
    assert decide([100, *[101] * 7, *[102] * 7], [8, *[64] * 7, *[8] * 7], costs)[0] == [0, *range(8, 15)]


def test_short_rows_join_a_batch_that_costs_little_more() -> None:
    # A batch takes 10 ms, whatever its length: alone, each row wastes it.
    costs = linear_costs(10 * MS, 100)
    assert decide([100, 101, 102], [64, 8, 30], costs) == ([0, 1, 2], [], 0)


def test_a_batch_is_no_longer_than_its_most_urgent_row_can_wait() -> None:
    costs = linear_costs(MS, 100_000)
    # 8 rows of 8 take 7.4 ms, 4 take 4.2.
    assert len(decide([7.5] + [60] * 7, [8] * 8, costs)[0]) == 8
    assert len(decide([4.3] + [60] * 7, [8] * 8, costs)[0]) == 4


def test_a_row_that_is_too_long_for_its_deadline_expires_and_a_shorter_one_runs() -> None:
    costs = linear_costs(MS, 100_000)
    assert decide([5, 5], [64, 8], costs) == ([1], [0], 0)


def test_nothing_feasible_tries_the_row_with_the_most_time_left() -> None:
    costs = linear_costs(MS, 100_000)
    costs.min_compute_L = costs.min_compute_L / 2
    assert decide([1.5, 5, 6], [8, 64, 64], costs)[0] == [0]


def test_soft_deadlines_run_late_and_cancelled_rows_never() -> None:
    columns, length = table_of([-5, 50], [8, 8])
    columns.flags[0] = SOFT_DEADLINE
    costs = linear_costs(MS, 1000)
    assert sorted(schedule_lengths(columns, length, NOW_NS, costs).run.tolist()) == [0, 1]
    columns.deadline_ns[0] = CANCELLED_NS
    assert schedule_lengths(columns, length, NOW_NS, costs).expire.tolist() == [0]


def test_low_priority_joins_where_no_row_of_the_batch_is_late() -> None:
    costs = linear_costs(MS, 100_000)
    columns, length = table_of([9, 500, 500, 500], [8, 8, 8, 64])
    columns.flags[1:] = LOW_PRIORITY
    # With the long row the batch would take 26.6 ms, and even alone beside the first 13.8.
    chosen = schedule_lengths(columns, length, NOW_NS, costs)
    assert (sorted(chosen.run.tolist()), chosen.waiting) == ([0, 1, 2], 1)
    columns.flags[:] = LOW_PRIORITY
    assert schedule_lengths(columns, length, NOW_NS, costs).run.size


@pytest.mark.parametrize("lengths", [[8], [8, 64], [8] * 9])
def test_the_backlog_is_the_time_of_the_ready_rows(lengths: list[int]) -> None:
    costs = linear_costs(MS, 100_000)
    columns, length = table_of([50.0 + at for at in range(len(lengths))], lengths)
    rows, slack_ns, batch_ns, work_ns = length_backlog(columns, length, NOW_NS, costs)
    assert rows == len(lengths)
    assert slack_ns == 50 * MS - batch_ns
    assert batch_ns == costs.of(min(rows, 8), 8)
    assert work_ns >= batch_ns
    nothing = columns._replace(submitted=columns.consumed)
    assert length_backlog(nothing, length, NOW_NS, costs) == (0, 0, 0, 0)


@given(tables_of_lengths(), length_costs())
@settings(max_examples=examples(400), deadline=None)
def test_rows_of_one_bucket_that_fit_into_a_batch_run_as_by_the_whole_rule(
    table: tuple[Columns, Rows], costs: LengthCosts
) -> None:
    columns, length = table
    costs.padded = True
    # One bucket, in which batches of all sizes up to the largest are worth running.
    length = 33 + length % 32
    at_once = schedule_lengths(columns, length, NOW_NS, costs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(length_scheduler, "_is_one_batch", lambda *_: False)
        whole = schedule_lengths(columns, length, NOW_NS, costs)
    assert sorted(at_once.run.tolist()) == sorted(whole.run.tolist())
    assert sorted(at_once.expire.tolist()) == sorted(whole.expire.tolist())
    assert at_once.waiting == whole.waiting
