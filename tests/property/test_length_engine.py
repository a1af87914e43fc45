"""Engine and front-end with rows of different lengths: answers, padding, admission, measurement."""

import gc
import sys
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import DeadlineImpossible, Overloaded, ServeError
from penstock.core.named_arrays import chunks_of, feeds_of
from penstock.core.spec import Array
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.serve.engine.engine import Engine
from penstock.serve.frontend.balancer import RequestBalancer
from penstock.serve.frontend.table_writer import SlotHandle, TableWriter
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.slots import EXPIRED, OK, SlotTable, TableLayout
from tests.support.generated import examples
from tests.support.varying import SUMS, WORDS, WordSums, linear_costs, words

MS = 1_000_000
BUDGET_NS = 50 * MS


class Clock:
    def __init__(self) -> None:
        self.ns = 1_000 * MS

    def __call__(self) -> int:
        self.ns += 1_000
        return self.ns


class Server:
    def __init__(self, executor: Executor, slots: int = 32, costs: LengthCosts | None = None) -> None:
        self.clock = Clock()
        self.table = SlotTable.private(TableLayout(slots=slots, chunks=1, input=WORDS, output=SUMS))
        costs = costs or linear_costs(1_000, 10)
        self.engine = Engine(executor, self.table, budget_ns=BUDGET_NS, clock_ns=self.clock, costs=costs)
        self.frontend = TableWriter(self.table, budget_ns=BUDGET_NS, wake=lambda: None)
        self.answers: dict[int, list[tuple[int, Any]]] = defaultdict(list)

    def ask(self, key: int, record: Array, **options: Any) -> SlotHandle:
        def done(status: int, output: Array, last: bool) -> None:
            answer = None if status != OK else {name: each.copy() for name, each in SUMS.unpack(output).items()}
            self.answers[key].append((status, answer))

        options = {"arrival_ns": self.clock(), **options}
        return self.frontend.submit(record, done=done, **options)

    def tick(self) -> int:
        chosen = self.engine.tick(self.clock())
        self.frontend.collect()
        self.frontend.refresh()
        return chosen.run.size + chosen.expire.size

    def drain(self) -> None:
        for _ in range(1_000):
            if not self.tick():
                return
        raise AssertionError("never idle")


def expected(record: Array) -> dict[str, Array]:
    given = WORDS.unpack(record)["words"]
    return {"sum": given.sum(0), "first": given[:, 0]}


@given(st.lists(st.integers(1, 64), min_size=1, max_size=40), st.integers(0, 2**31), st.integers(1, 16))
@settings(max_examples=examples(100), deadline=None)
def test_answers_are_the_same_in_any_grouping_and_whatever_the_padding_holds(
    lengths: list[int], seed: int, max_rows: int
) -> None:
    rng = np.random.default_rng(seed)
    server = Server(WordSums(), slots=16, costs=linear_costs(1_000, 10, max_rows))
    # Whatever lies beyond a length in the table is poison.
    server.table.input["words"] = np.nan
    asked: dict[int, Array] = {}
    for key, length in enumerate(lengths):
        record = words(length, seed + key)
        poisoned = record.copy()
        poisoned["words"][length:] = np.nan
        try:
            server.ask(key, poisoned)
        except Overloaded:
            continue
        asked[key] = record
        if rng.random() < 0.3:
            server.tick()
    server.drain()
    assert asked
    for key, record in asked.items():
        ((status, answer),) = server.answers[key]
        assert status == OK
        for name, array in expected(record).items():
            assert np.array_equal(answer[name], array), (key, name)
    assert server.frontend.in_use == 0
    assert not server.table.held_lengths.any()


def test_a_batch_is_as_long_as_its_longest_row() -> None:
    executor = WordSums()
    server = Server(executor)
    for key, length in enumerate((3, 5, 4)):
        server.ask(key, words(length))
    server.drain()
    assert executor.shapes == [(3, 5, 2)]
    assert sorted(server.table.length[server.table.length > 0]) == [3, 4, 5]


def test_long_and_short_rows_run_apart() -> None:
    executor = WordSums()
    server = Server(executor, costs=linear_costs(100_000, 10_000))
    for key in range(8):
        server.ask(key, words(64 if key % 2 else 4))
    server.drain()
    assert sorted(executor.shapes) == [(4, 4, 2), (4, 64, 2)]


def test_a_tick_makes_as_many_python_calls_for_one_row_as_for_many() -> None:
    def calls(rows: int) -> int:
        server = Server(WordSums(512), slots=512, costs=linear_costs(1_000, 0, 512))
        for key in range(rows):
            server.ask(key, words(8))
        count = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        now = server.clock()
        gc.disable()
        sys.setprofile(profile)
        server.engine.tick(now)
        sys.setprofile(None)
        gc.enable()
        assert server.engine.tick(server.clock()).run.size == 0
        return count

    # The ranges of lengths are listed once.
    calls(2)
    # Other branches, never more calls for more rows.
    assert abs(calls(40) - calls(512)) < 40


def test_admission_predicts_by_the_length_of_a_request_and_of_those_ahead() -> None:
    # A token takes 0.1 ms: a row of 64 takes 6.4 ms, one of 4 takes 0.4 ms; batches gain nothing.
    server = Server(WordSums(), costs=linear_costs(0, 100_000, 1))
    with pytest.raises(DeadlineImpossible, match=r"network's own time of 6\.40 ms for a length of 64"):
        server.ask(0, words(64), budget_ns=5 * MS)
    server.ask(1, words(4), budget_ns=5 * MS)
    for key in range(2, 8):
        server.ask(key, words(64))
    # 38.8 ms wait: one more of 64 ends after 45 ms, another after 51 ms.
    server.ask(8, words(64))
    with pytest.raises(Overloaded, match="past the budget of 50 ms"):
        server.ask(9, words(64))
    # That is no rejection of shorter ones.
    assert server.frontend.cached_rejection(server.clock.ns, BUDGET_NS) is None
    handle = server.ask(10, words(4))
    assert handle.length == 4
    server.drain()
    assert {key for key, answers in server.answers.items() if answers[0][0] == OK} == {1, *range(2, 9), 10}


def test_the_rejection_of_the_shortest_request_holds_for_all() -> None:
    server = Server(WordSums(), costs=linear_costs(10 * MS, 1, 1))
    for key in range(4):
        server.ask(key, words(64))
    with pytest.raises(Overloaded):
        server.ask(9, words(1))
    assert server.frontend.cached_rejection(server.clock.ns, 40 * MS) is not None
    assert server.frontend.cached_rejection(server.clock.ns, 70 * MS) is None


def test_the_balancer_predicts_by_length_too() -> None:
    servers = [Server(WordSums(), costs=linear_costs(0, 100_000, 1)) for _ in range(2)]
    balancer = RequestBalancer([each.frontend for each in servers], BUDGET_NS)
    # Two long rows take longer than three short ones.
    for key in range(2):
        servers[0].ask(key, words(64))
    for key in range(3):
        servers[1].ask(key, words(1))
    taken = balancer.submit(words(64), done=lambda *_: None, arrival_ns=1_000 * MS, now_ns=1_000 * MS)
    assert taken.writer is servers[1].frontend
    finish = [each.frontend.predict(2, BUDGET_NS, False, 64)[0] for each in servers]
    assert finish[0] == 4 * 6_400_000


def test_a_late_row_expires_and_a_cancelled_one_frees_its_length() -> None:
    server = Server(WordSums())
    server.ask(0, words(5))
    handle = server.ask(1, words(7))
    server.frontend.cancel(handle)
    server.clock.ns += 60 * MS
    server.drain()
    assert server.answers[0] == [(EXPIRED, None)]
    assert 1 not in server.answers
    assert not server.table.held_lengths.any()


def test_slots_of_an_earlier_front_end_are_taken_over() -> None:
    server = Server(WordSums())
    server.ask(0, words(5))
    server.frontend = TableWriter(server.table, budget_ns=BUDGET_NS, wake=lambda: None)
    server.drain()
    assert server.frontend.in_use == 0
    assert not server.table.held_lengths.any()


class Slow(Executor):
    """Takes a constant and a time a token, on the clock of a test."""

    def __init__(self, clock: Clock, batch_ns: int, token_ns: int, max_rows: int = 32) -> None:
        self.input, self.output, self.max_rows = WORDS, SUMS, max_rows
        self.clock, self.batch_ns, self.token_ns = clock, batch_ns, token_ns

    def step(self, batch: StepInput) -> StepOutput:
        feeds, lengths = feeds_of(self.input, batch.chunk_B)
        given = feeds["words"]
        self.clock.ns += self.batch_ns + self.token_ns * given.shape[0] * given.shape[1]
        return StepOutput(output_B=chunks_of(self.output, {"sum": given.sum(1), "first": given[..., 0]}, lengths))


def measured(batch_ns: int, token_ns: int) -> LengthCosts:
    clock = Clock()
    table = SlotTable.private(TableLayout(slots=32, chunks=1, input=WORDS, output=SUMS))
    engine = Engine(Slow(clock, batch_ns, token_ns), table, budget_ns=BUDGET_NS, clock_ns=clock)
    for _ in engine.measuring(words(9)):
        pass
    assert isinstance(engine.costs, LengthCosts)
    assert engine.describe_costs().count("length") == len(engine.costs.grid.edges)
    return engine.costs


def test_costs_are_measured_at_start_by_rows_and_length() -> None:
    costs = measured(MS, 10_000)
    for rows, length in ((1, 2), (1, 64), (8, 4), (2, 30)):
        assert costs.of(rows, length) == pytest.approx(MS + 10_000 * rows * length, rel=0.02)
    # 32 rows of 64 take 21 ms: less than half the budget.
    assert [costs.largest(length) for length in (1, 64)] == [32, 32]
    # A row of 64 takes 12.8 ms; a batch of 2 would take more than half the budget.
    assert measured(0, 200_000).largest(64) == 1


def test_lengths_that_are_slower_than_the_budget_are_said_and_refused(caplog: pytest.LogCaptureFixture) -> None:
    costs = measured(0, 2 * MS)
    assert "one request of length 32 takes 64.0 ms" in caplog.text
    assert costs.largest(64) == 1
    with pytest.raises(ServeError, match=r"62\.0 ms for one request of the smallest length"):
        measured(58 * MS, 2 * MS)


def test_the_costs_follow_what_batches_take() -> None:
    clock = Clock()
    executor = Slow(clock, MS, 10_000)
    server = Server(executor, costs=linear_costs(3 * MS, 30_000))
    executor.clock = server.clock
    for key in range(60):
        server.ask(key, words(20))
        server.drain()
    assert isinstance(server.engine.costs, LengthCosts)
    assert server.engine.costs.of(1, 20) == pytest.approx(MS + 200_000, rel=0.1)
    # Other lengths keep what was measured, but for their neighbours.
    assert server.engine.costs.of(1, 64) == 3 * MS + 30_000 * 64
