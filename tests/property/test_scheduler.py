"""The scheduler as a pure function: what must hold for any table, any costs and any moment."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.serve.engine.scheduler import Columns, ready_slots, schedule
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import CANCELLED_NS, SOFT_DEADLINE
from tests.support.generated import examples

NOW_NS = 10_000_000_000


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    count = draw(st.integers(1, 7))
    first = draw(st.integers(1_000, 10_000_000))
    growth = draw(st.lists(st.floats(1.0, 2.2), min_size=count - 1, max_size=count - 1))
    ns = [float(first)]
    for factor in growth:
        ns.append(ns[-1] * factor)
    return Costs([1 << exponent for exponent in range(count)], ns)


@st.composite
def tables(draw: st.DrawFn) -> Columns:
    slots, chunks = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    numbers = st.integers(0, 2**31)
    rng = np.random.default_rng(draw(numbers))
    consumed = rng.integers(0, 9, slots)
    busy = rng.integers(0, 2, slots) * (consumed > 0)
    submitted = consumed + rng.integers(0, chunks + 1, slots) * (rng.random(slots) < 0.7)
    submitted = np.minimum(submitted, consumed + chunks - busy)
    produced = consumed + rng.integers(0, 3, slots)
    taken = produced - rng.integers(0, chunks + 1, slots)
    spread = draw(st.sampled_from([1_000, 1_000_000, 50_000_000, 1_000_000_000]))
    deadline_ns = NOW_NS + rng.integers(-spread // 4, spread, (slots, chunks))
    deadline_ns[rng.random((slots, chunks)) < 0.05] = CANCELLED_NS
    flags = np.where(rng.random((slots, chunks)) < draw(st.sampled_from([0.0, 0.3])), SOFT_DEADLINE, 0)
    return Columns(submitted, taken, consumed, produced, busy, deadline_ns, flags)


def current(columns: Columns, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    entry = (columns.consumed[rows] - columns.busy[rows]) % columns.deadline_ns.shape[1]
    return columns.deadline_ns[rows, entry], columns.flags[rows, entry] & SOFT_DEADLINE != 0


@given(tables(), costs())
@settings(max_examples=examples(400), deadline=None)
def test_only_ready_rows_are_chosen_each_once_and_none_is_both_run_and_refused(columns: Columns, curve: Costs) -> None:
    ready = set(ready_slots(columns).tolist())
    chosen = schedule(columns, NOW_NS, curve)
    answered = [*chosen.run.tolist(), *chosen.expire.tolist()]
    assert len(answered) == len(set(answered))
    assert set(answered) <= ready
    assert chosen.waiting == len(ready) - len(answered)


@given(tables(), costs())
@settings(max_examples=examples(400), deadline=None)
def test_a_row_is_ready_when_it_has_a_step_to_take_and_room_for_the_result(columns: Columns, curve: Costs) -> None:
    chunks = columns.deadline_ns.shape[1]
    expected = [
        slot
        for slot in range(columns.submitted.size)
        if (columns.submitted[slot] != columns.consumed[slot] or columns.busy[slot])
        and columns.produced[slot] - columns.taken[slot] < chunks
    ]
    assert ready_slots(columns).tolist() == expected


@given(tables(), costs())
@settings(max_examples=examples(400), deadline=None)
def test_the_batch_fits_and_progress_is_made(columns: Columns, curve: Costs) -> None:
    chosen = schedule(columns, NOW_NS, curve)
    assert chosen.run.size <= curve.largest
    if ready_slots(columns).size:
        assert chosen.run.size + chosen.expire.size > 0


@given(tables(), costs())
@settings(max_examples=examples(400), deadline=None)
def test_every_impatient_row_of_the_batch_is_predicted_to_be_in_time(columns: Columns, curve: Costs) -> None:
    chosen = schedule(columns, NOW_NS, curve)
    if chosen.run.size:
        deadlines, patient = current(columns, chosen.run)
        slack = deadlines[~patient] - NOW_NS
        # But for the one row that is tried when nothing seems possible.
        assert (slack >= curve.of(chosen.run.size)).all() or (slack.size == 1 and slack[0] >= curve.min_compute_ns)


@given(tables(), costs())
@settings(max_examples=examples(400), deadline=None)
def test_what_could_still_be_in_time_alone_is_refused_only_under_pressure(columns: Columns, curve: Costs) -> None:
    chosen = schedule(columns, NOW_NS, curve)
    ready = ready_slots(columns)
    deadlines, patient = current(columns, ready)
    infeasible = ready[(deadlines - NOW_NS < curve.min_compute_ns) & (~patient | (deadlines == CANCELLED_NS))]
    assert set(infeasible.tolist()) <= set(chosen.expire.tolist())
    others = np.setdiff1d(chosen.expire, infeasible)
    _, others_patient = current(columns, others)
    assert not others_patient.any()
    if others.size:
        # Then no batch size would have kept every feasible row in time.
        feasible = np.setdiff1d(ready, infeasible)
        slack = np.sort(np.maximum(current(columns, feasible)[0] - NOW_NS, 0))
        for size in range(1, min(feasible.size, curve.largest) + 1):
            finish = curve.of(size) * (1 + np.arange(feasible.size) // size)
            overdue = int((slack < curve.of(1)).sum())
            assert (slack[overdue:] < finish[overdue:]).any() or size not in {*curve.rows, feasible.size, curve.largest}


@given(tables(), costs())
@settings(max_examples=examples(400), deadline=None)
def test_the_rows_that_run_have_the_earliest_deadlines_of_all_that_are_kept(columns: Columns, curve: Costs) -> None:
    chosen = schedule(columns, NOW_NS, curve)
    waiting = np.setdiff1d(ready_slots(columns), np.concatenate([chosen.run, chosen.expire]))
    if waiting.size and chosen.run.size:
        assert current(columns, chosen.run)[0].max() <= current(columns, waiting)[0].min()


def test_when_nothing_seems_possible_the_row_with_the_most_time_left_is_tried() -> None:
    curve = Costs([1, 4], [30e6, 60e6], min_compute_ns=5e6)
    columns = waiting_table([NOW_NS + ms * 1_000_000 for ms in (4, 10, 20, 15)])
    chosen = schedule(columns, NOW_NS, curve)
    assert chosen.run.tolist() == [2]
    assert sorted(chosen.expire.tolist()) == [0, 1, 3]


def test_a_cancelled_row_never_runs_however_patient() -> None:
    one = np.ones(1, np.int64)
    columns = Columns(
        submitted=one,
        taken=one * 0,
        consumed=one * 0,
        produced=one * 0,
        busy=one * 0,
        deadline_ns=np.full((1, 1), CANCELLED_NS),
        flags=np.full((1, 1), SOFT_DEADLINE),
    )
    chosen = schedule(columns, NOW_NS, Costs([1, 2], [1.0, 2.0]))
    assert chosen.run.size == 0
    assert chosen.expire.tolist() == [0]


def waiting_table(deadlines_ns: list[int]) -> Columns:
    count = len(deadlines_ns)
    zeros = np.zeros(count, np.int64)
    deadlines = np.array(deadlines_ns, np.int64).reshape(count, 1)
    return Columns(np.ones(count, np.int64), zeros, zeros, zeros, zeros, deadlines, np.zeros((count, 1), np.int64))


def test_overload_gives_up_the_row_that_would_force_a_small_batch() -> None:
    # One row alone takes 8 ms, sixteen take 10 ms: serving the row that is due in 9 ms costs fifteen others.
    curve = Costs([1, 16], [8e6, 10e6])
    columns = waiting_table([NOW_NS + 9_000_000, *([NOW_NS + 12_000_000] * 15)])
    chosen = schedule(columns, NOW_NS, curve)
    assert chosen.expire.tolist() == [0]
    assert sorted(chosen.run.tolist()) == list(range(1, 16))


def test_a_tight_row_runs_first_in_a_small_batch_when_the_others_can_wait() -> None:
    curve = Costs([1, 16], [2e6, 10e6])
    columns = waiting_table([NOW_NS + 50_000_000] * 15 + [NOW_NS + 3_000_000])
    chosen = schedule(columns, NOW_NS, curve)
    assert chosen.run.tolist() == [15]
    assert chosen.expire.size == 0
    assert chosen.waiting == 15


@given(st.integers(0, 2**31), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_nobody_starves_and_everybody_is_answered_once(seed: int, requests: int) -> None:
    """A stream of arrivals with many budgets: each is run or refused exactly once, and none after its deadline."""
    rng = np.random.default_rng(seed)
    curve = Costs([1, 2, 4, 8], [1e6, 1.2e6, 1.8e6, 3e6])
    arrivals = np.sort(rng.integers(0, 40_000_000, requests))
    deadlines = arrivals + rng.choice([2_000_000, 10_000_000, 60_000_000], requests)
    columns = waiting_table(deadlines.tolist())
    submitted, consumed = columns.submitted * 0, columns.consumed.copy()
    now, answers = 0, np.zeros(requests, int)
    while answers.sum() < requests:
        submitted = (arrivals <= now).astype(np.int64)
        produced = consumed
        view = columns._replace(submitted=submitted, consumed=consumed, produced=produced, taken=produced)
        chosen = schedule(view, now, curve)
        answers[chosen.expire] += 1
        answers[chosen.run] += 1
        consumed = consumed.copy()
        consumed[chosen.run] += 1
        consumed[chosen.expire] += 1
        if chosen.run.size:
            now += curve.of(chosen.run.size)
            assert (deadlines[chosen.run] >= now).all()
        elif not chosen.expire.size:
            now = int(arrivals[arrivals > now].min())
    assert (answers == 1).all()


@given(costs(), st.lists(st.tuples(st.integers(1, 64), st.integers(0, 10**9)), max_size=60))
@settings(max_examples=examples(200), deadline=None)
def test_costs_stay_finite_and_positive_whatever_is_observed(curve: Costs, seen: list[tuple[int, int]]) -> None:
    for rows, ns in seen:
        curve.observe(min(rows, curve.largest), ns)
    assert all(curve.of(rows) >= 0 for rows in range(1, curve.largest + 1))
    assert all(curve.of(rows) < 2 * 10**9 for rows in range(1, curve.largest + 1))


def test_costs_follow_a_slower_machine_within_some_batches() -> None:
    curve = Costs([1, 2, 4, 8], [1e6, 1.5e6, 2e6, 3e6])
    for _ in range(60):
        curve.observe(8, 6_000_000)
    assert 5_500_000 < curve.of(8) <= 6_100_000
    assert curve.of(1) == 1_000_000
    for _ in range(60):
        curve.observe(8, 3_000_000)
    assert curve.of(8) < 3_200_000


def test_the_predicted_finish_of_a_newcomer_counts_the_batches_before_it() -> None:
    curve = Costs([1, 4], [1e6, 2e6])
    assert curve.finish_ns(0) == 1_000_000
    assert curve.finish_ns(3) == 2_000_000
    # Until its turn comes its own batch has filled, too.
    assert curve.finish_ns(4) == 2 * 2_000_000
    assert curve.finish_ns(11) == 3 * 2_000_000
