"""Two classes in one table: the background never delays the first class, and is not starved when there is room."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.serve.engine.scheduler import BatchSchedule, Columns, Rows, ready_slots, schedule
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import CANCELLED_NS, LOW_PRIORITY, SOFT_DEADLINE
from tests.property.test_scheduler import NOW_NS, costs, tables, waiting_table
from tests.support.generated import examples


@st.composite
def mixed(draw: st.DrawFn) -> Columns:
    """A table in which some rows have low priority."""
    columns = draw(tables())
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    share = draw(st.sampled_from([0.1, 0.5, 0.9]))
    # A row's priority is its stream's, the same in every chunk.
    low = rng.random((columns.flags.shape[0], 1)) < share
    return columns._replace(flags=columns.flags | np.where(low, LOW_PRIORITY, 0))


class Split(NamedTuple):
    """Chosen and ready rows, by priority."""

    columns: Columns
    chosen: BatchSchedule

    @property
    def ready(self) -> Rows:
        return ready_slots(self.columns)

    def second(self, rows: Rows) -> Rows:
        return rows[self.columns.flags[rows, 0] & LOW_PRIORITY != 0]

    def first(self, rows: Rows) -> Rows:
        return rows[self.columns.flags[rows, 0] & LOW_PRIORITY == 0]

    def slack_ns(self, rows: Rows) -> Rows:
        entry = (self.columns.consumed[rows] - self.columns.busy[rows]) % self.columns.deadline_ns.shape[1]
        return self.columns.deadline_ns[rows, entry] - NOW_NS

    def patient(self, rows: Rows) -> Any:
        entry = (self.columns.consumed[rows] - self.columns.busy[rows]) % self.columns.deadline_ns.shape[1]
        return self.columns.flags[rows, entry] & SOFT_DEADLINE != 0


def split(columns: Columns, curve: Costs) -> Split:
    return Split(columns, schedule(columns, NOW_NS, curve))


def without_background(columns: Columns, ready: Rows) -> Columns:
    """The same table without the rows of low priority."""
    gone = ready[columns.flags[ready, 0] & LOW_PRIORITY != 0]
    submitted, busy = columns.submitted.copy(), columns.busy.copy()
    submitted[gone], busy[gone] = columns.consumed[gone], 0
    return columns._replace(submitted=submitted, busy=busy)


@given(mixed(), costs())
@settings(max_examples=examples(600), deadline=None)
def test_the_first_class_is_served_as_if_the_second_were_not_there(columns: Columns, curve: Costs) -> None:
    both = split(columns, curve)
    alone = schedule(without_background(columns, both.ready), NOW_NS, curve)
    assert sorted(both.first(both.chosen.run)) == sorted(alone.run)
    assert sorted(both.first(both.chosen.expire)) == sorted(alone.expire)


@given(mixed(), costs())
@settings(max_examples=examples(600), deadline=None)
def test_what_the_background_adds_to_a_batch_makes_nobody_of_the_first_class_late(
    columns: Columns, curve: Costs
) -> None:
    both = split(columns, curve)
    first, second = both.first(both.chosen.run), both.second(both.chosen.run)
    if not first.size or not second.size:
        return
    in_time = curve.of(both.chosen.run.size)
    assert both.slack_ns(first).min() >= in_time
    # Who of the first class stays behind waits for this batch: then it holds nobody of the second.
    behind = np.setdiff1d(both.first(both.ready), np.concatenate([both.chosen.run, both.chosen.expire]))
    assert not behind.size


@given(mixed(), costs())
@settings(max_examples=examples(600), deadline=None)
def test_the_background_runs_only_where_it_is_in_time_itself_and_expires_only_where_it_cannot_be(
    columns: Columns, curve: Costs
) -> None:
    both = split(columns, curve)
    second = both.second(both.chosen.run)
    if second.size and both.first(both.chosen.run).size:
        late = second[both.slack_ns(second) < curve.of(both.chosen.run.size)]
        assert both.patient(late).all()
    if both.first(both.chosen.run).size:
        expired = both.second(both.chosen.expire)
        cancelled = both.slack_ns(expired) <= CANCELLED_NS // 2
        assert (cancelled | ~both.patient(expired) & (both.slack_ns(expired) < curve.min_compute_ns)).all()


@given(mixed(), costs())
@settings(max_examples=examples(600), deadline=None)
def test_the_background_fills_the_room_that_there_is(columns: Columns, curve: Costs) -> None:
    both = split(columns, curve)
    first, second = both.first(both.chosen.run), both.second(both.chosen.run)
    waiting = np.setdiff1d(both.second(both.ready), np.concatenate([both.chosen.run, both.chosen.expire]))
    behind = np.setdiff1d(both.first(both.ready), np.concatenate([both.chosen.run, both.chosen.expire]))
    one_more = first.size + second.size + 1
    if not first.size or behind.size or not waiting.size or one_more > curve.largest:
        return
    cost = curve.of(one_more)
    tightest = min(both.slack_ns(first).min(), both.slack_ns(second).min() if second.size else 1 << 60)
    welcome = waiting[both.slack_ns(waiting) >= cost]
    assert tightest < cost or not welcome.size, (one_more, cost, tightest, both.slack_ns(waiting))


def table_of(first_ms: list[float], second_ms: list[float]) -> Columns:
    columns = waiting_table([NOW_NS + int(ms * 1e6) for ms in (*first_ms, *second_ms)])
    columns.flags[len(first_ms) :] |= LOW_PRIORITY
    return columns


def test_room_between_two_measured_sizes_is_room() -> None:
    # Four rows of the first class, due in 12 ms; eight rows would take 16 ms, but six take 12.
    curve = Costs([1, 4, 8], [5e6, 8e6, 16e6])
    chosen = schedule(table_of([12.0] * 4, [500.0] * 9), NOW_NS, curve)
    assert sorted(chosen.run.tolist())[:4] == [0, 1, 2, 3]
    assert chosen.run.size == 6


def test_no_room_no_background() -> None:
    curve = Costs([1, 4, 8], [5e6, 8e6, 16e6])
    assert schedule(table_of([8.0] * 4, [500.0] * 9), NOW_NS, curve).run.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("load", [0.3, 0.6, 0.85])
def test_a_background_row_is_answered_while_the_first_class_leaves_time(load: float) -> None:
    """A steady stream of the first class below what the machine can do, and one patient batch of the second."""
    curve = Costs([1, 2, 4, 8], [2e6, 2.4e6, 3e6, 4e6])
    gap_ns = curve.of(8) / 8 / load
    arrivals = np.concatenate([np.cumsum(np.full(800, gap_ns)), np.zeros(40)]).astype(np.int64)
    budgets = np.concatenate([np.full(800, 30_000_000), np.full(40, 10_000_000_000)])
    columns = waiting_table((arrivals + budgets).tolist())
    columns.flags[800:] |= LOW_PRIORITY
    consumed, ended = np.zeros(840, np.int64), np.zeros(840, np.int64)
    now = 0
    while (consumed[800:] == 0).any() and now < arrivals.max():
        view = columns._replace(
            submitted=(arrivals <= now).astype(np.int64), consumed=consumed, produced=consumed, taken=consumed
        )
        chosen = schedule(view, now, curve)
        assert not chosen.expire.size
        consumed = consumed.copy()
        consumed[chosen.run] += 1
        now = now + curve.of(chosen.run.size) if chosen.run.size else int(arrivals[arrivals > now].min())
        ended[chosen.run] = now
    assert (ended[800:] > 0).all()
    served = np.flatnonzero(ended[:800])
    assert (ended[served] <= arrivals[served] + budgets[served]).all()
