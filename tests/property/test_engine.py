"""The engine and the front-end over one table, with clocks and clients that a test makes up."""

import gc
import itertools
import logging
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import DeadlineImpossible, Overloaded, ServeError
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.serve.engine.engine import Engine
from penstock.serve.frontend.rejections import REJECTION_NS
from penstock.serve.frontend.table_writer import SlotHandle, TableWriter
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import (
    EXPIRED,
    FAILED,
    FIRST,
    LAST,
    NOT_FINITE,
    OK,
    SOFT_DEADLINE,
    SlotTable,
    TableLayout,
)
from tests.support.toys import POINT, TOTAL, Afar, Countdown, Doubler, RunningSum

MS = 1_000_000
BUDGET_NS = 50 * MS


class Clock:
    def __init__(self) -> None:
        self.ns = 1_000 * MS

    def __call__(self) -> int:
        self.ns += 1_000
        return self.ns


def measure(engine: Engine) -> Costs:
    for _ in engine.measuring(np.zeros(2, np.float32)):
        pass
    assert isinstance(engine.costs, Costs)
    return engine.costs


class Server:
    """Engine and front-end together, the network taking a millisecond."""

    def __init__(self, executor: Executor, slots: int = 32, chunks: int = 1, curve: Costs | None = None) -> None:
        self.clock = Clock()
        self.table = SlotTable.private(TableLayout(slots=slots, chunks=chunks, input=POINT, output=TOTAL))
        self.engine = Engine(executor, self.table, budget_ns=BUDGET_NS, clock_ns=self.clock, costs=curve)
        if curve is None:
            measure(self.engine)
        self.frontend = TableWriter(self.table, budget_ns=BUDGET_NS, wake=lambda: None)
        self.answers: dict[int, list[tuple[int, list[float], bool]]] = defaultdict(list)

    def ask(self, key: int, value: float, **options: Any) -> SlotHandle:
        def done(status: int, output: np.ndarray, last: bool) -> None:
            self.answers[key].append((status, output.tolist(), last))

        chunk = np.full(2, value, np.float32)
        return self.frontend.submit(chunk, done=done, arrival_ns=self.clock(), **options)

    def tick(self) -> int:
        chosen = self.engine.tick(self.clock())
        self.frontend.collect()
        return chosen.run.size + chosen.expire.size

    def drain(self) -> None:
        for _ in range(1_000):
            if not self.tick():
                return
        raise AssertionError("never idle")


@given(st.lists(st.integers(0, 20), max_size=60), st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_everyone_gets_the_answer_to_their_own_question_once(values: list[int], seed: int) -> None:
    logging.disable(logging.CRITICAL)
    server = Server(Doubler(), slots=8)
    rng = np.random.default_rng(seed)
    refused = set()
    for key, value in enumerate(values):
        try:
            server.ask(key, value)
        except Overloaded:
            refused.add(key)
        if rng.random() < 0.4:
            server.tick()
    server.drain()
    logging.disable(logging.NOTSET)
    for key, value in enumerate(values):
        if key in refused:
            assert key not in server.answers
            continue
        ((status, output, last),) = server.answers[key]
        assert last
        expected = {13: FAILED, 17: NOT_FINITE}.get(value, OK)
        assert status == expected
        if status == OK:
            assert output == [2.0 * value] * 2
    assert server.frontend.in_use == 0


def test_one_request_that_raises_fails_alone_and_is_found_by_halves(caplog: pytest.LogCaptureFixture) -> None:
    executor = Doubler()
    server = Server(executor)
    executor.batches.clear()
    for key in range(16):
        server.ask(key, 13 if key == 5 else 100 + key)
    server.drain()
    assert {key for key, [(status, _, _)] in server.answers.items() if status == FAILED} == {5}
    assert all(server.answers[key] == [(OK, [200.0 + 2 * key] * 2, True)] for key in range(16) if key != 5)
    assert len(executor.batches) == 1 + 2 * 4
    assert sum(record.exc_info is not None for record in caplog.records) == 1


def test_a_late_request_is_refused_and_never_run() -> None:
    executor = Doubler()
    server = Server(executor)
    executor.batches.clear()
    server.ask(0, 1)
    server.clock.ns += 60 * MS
    server.drain()
    assert server.answers[0] == [(EXPIRED, [], True)]
    assert executor.batches == []
    assert server.frontend.in_use == 0


def test_a_cancelled_request_does_not_run_and_its_slot_comes_back() -> None:
    executor = Doubler()
    server = Server(executor)
    executor.batches.clear()
    ticket = server.ask(0, 1)
    server.frontend.cancel(ticket)
    assert server.frontend.in_use == 1
    server.drain()
    assert server.answers == {}
    assert executor.batches == []
    assert server.frontend.in_use == 0
    server.frontend.cancel(ticket)
    assert server.frontend.in_use == 0


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("stores", range(5))
def test_a_slot_that_is_taken_over_while_its_result_is_published_is_freed(chunks: int, stores: int) -> None:
    server = Server(RunningSum(4), slots=4, chunks=chunks)
    for key in range(2):
        server.ask(key, key)
    table, engine = server.table, server.engine
    published: list[Callable[[], None]] = []
    engine._results._publish = lambda rows, took, busy: published.extend(  # type: ignore[method-assign]
        (
            lambda: table.produced.__setitem__(rows, table.produced[rows] + 1),
            lambda: table.busy.__setitem__(rows, busy),
            lambda: table.consumed.__setitem__(rows, table.consumed[rows] + took),
            lambda: table.done[0].__setitem__(np.arange(rows.size), rows),
            lambda: table.done_count.__setitem__(0, rows.size),
        )
    )
    engine.tick(server.clock())
    for store in published[:stores]:
        store()
    server.frontend = TableWriter(table, budget_ns=BUDGET_NS, wake=lambda: None)
    for store in published[stores:]:
        store()
    del engine._results._publish
    server.drain()
    assert server.frontend.in_use == 0
    server.ask(7, 1)
    server.drain()
    assert [status for status, _, _ in server.answers[7]] == [OK]


def test_admission_refuses_what_would_be_late_and_says_when_to_come_back() -> None:
    server = Server(Doubler(), slots=32, curve=Costs([1, 2], [10 * MS, 12 * MS]))
    with pytest.raises(DeadlineImpossible, match="A budget of 5 ms"):
        server.ask(0, 1, budget_ns=5 * MS)
    for key in range(8):
        server.ask(key, 1)
    with pytest.raises(Overloaded) as refusal:
        server.ask(9, 1)
    assert 0.05 < refusal.value.retry_after_s < 0.1
    server.tick()
    server.ask(9, 1)


def test_a_refusal_stands_for_a_moment_until_a_result_comes() -> None:
    server = Server(Doubler(), slots=32, curve=Costs([1, 2], [10 * MS, 12 * MS]))
    frontend, clock = server.frontend, server.clock
    for key in range(8):
        server.ask(key, 1)
    # The refusal of a row with a short budget or of low priority is not cached: others may still be admitted.
    for options in ({"budget_ns": 20 * MS}, {"low_priority": True}):
        with pytest.raises(Overloaded):
            server.ask(9, 1, **options)
        assert frontend.cached_rejection(clock()) is None
    with pytest.raises(Overloaded, match="past the budget of 50 ms") as refusal:
        server.ask(9, 1)
    standing = frontend.cached_rejection(clock())
    assert standing is not None
    assert (str(standing), standing.retry_after_s) == (str(refusal.value), refusal.value.retry_after_s)
    assert standing.__traceback__ is None
    assert frontend.cached_rejection(clock() + REJECTION_NS) is None
    with pytest.raises(Overloaded):
        server.ask(9, 1)
    assert frontend.cached_rejection(clock()) is not None
    server.tick()
    assert frontend.cached_rejection(clock()) is None
    server.ask(9, 1)


def test_the_refusal_of_an_old_request_does_not_stand_for_those_that_have_more_time() -> None:
    server = Server(Doubler(), slots=32, curve=Costs([1, 4], [5 * MS, 5 * MS]))
    for key in range(20):
        server.ask(key, 1)
    with pytest.raises(Overloaded):
        server.ask(20, 1, now_ns=server.clock() + 30 * MS)
    now_ns = server.clock.ns + 30 * MS
    assert server.frontend.cached_rejection(now_ns, 20 * MS) is not None
    assert server.frontend.cached_rejection(now_ns, BUDGET_NS) is None
    server.ask(21, 1)


def test_no_free_slot_is_a_refusal() -> None:
    server = Server(Doubler(), slots=2)
    server.ask(0, 1)
    server.ask(1, 1)
    with pytest.raises(Overloaded, match="All 2 slots"):
        server.ask(2, 1)
    assert server.frontend.cached_rejection(server.clock(), BUDGET_NS) is not None


def test_a_network_slower_than_the_budget_is_refused_at_start() -> None:
    table = SlotTable.private(TableLayout(slots=4, chunks=1, input=POINT, output=TOTAL))
    clock = Clock()

    class Slow(Executor):
        input, output, max_rows = POINT, TOTAL, 4

        def step(self, batch: StepInput) -> StepOutput:
            clock.ns += 80 * MS
            return StepOutput(output_B=batch.chunk_B)

    with pytest.raises(ServeError, match=r"80\.0 ms for one request.*budget of 50 ms"):
        measure(Engine(Slow(), table, budget_ns=BUDGET_NS, clock_ns=clock))


def test_the_largest_bucket_takes_at_most_half_the_budget_and_must_pay() -> None:
    clock = Clock()

    class Linear(Executor):
        input, output, max_rows = POINT, TOTAL, 4096

        def __init__(self, per_batch_ns: int, per_row_ns: int) -> None:
            self.per_batch_ns, self.per_row_ns = per_batch_ns, per_row_ns

        def step(self, batch: StepInput) -> StepOutput:
            clock.ns += self.per_batch_ns + self.per_row_ns * batch.slots_B.size
            return StepOutput(output_B=batch.chunk_B)

    def measured(per_batch_ns: int, per_row_ns: int) -> Costs:
        table = SlotTable.private(TableLayout(slots=4096, chunks=1, input=POINT, output=TOTAL))
        engine = Engine(Linear(per_batch_ns, per_row_ns), table, budget_ns=BUDGET_NS, clock_ns=clock)
        return measure(engine)

    assert measured(1 * MS, MS // 10).rows[-1] == 128
    assert measured(10_000, 10 * MS).rows[-1] == 1
    assert measured(1 * MS, 1).rows[-1] == 4096


def test_faster_batches_are_used_larger_ones_too_if_they_fit_into_the_budget() -> None:
    class Quick(Executor):
        input, output, max_rows = POINT, TOTAL, 64

        def step(self, batch: StepInput) -> StepOutput:
            return StepOutput(output_B=batch.chunk_B)

    table = SlotTable.private(TableLayout(slots=64, chunks=1, input=POINT, output=TOTAL))
    curve = Costs([1, 2, 4], [1.0 * MS, 2.0 * MS, 4.0 * MS], handling_ns=7.0)
    engine = Engine(Quick(), table, budget_ns=BUDGET_NS, clock_ns=Clock(), costs=curve)

    def sizes() -> dict[int, float]:
        assert isinstance(engine.costs, Costs)
        # Front-ends admit from what is published.
        assert Costs.published(table).times_ns == engine.costs.times_ns
        assert engine.costs.handling_ns == 7
        return {rows: ns / MS for rows, ns in engine.costs.times_ns.items()}

    engine.improve(4, 2.0 * MS)
    assert sizes() == {1: 1, 2: 2, 4: 2}
    engine.improve(16, 5.0 * MS)
    assert sizes() == {1: 1, 2: 2, 4: 2, 16: 5}
    # No size that is measured, too slow for the budget, and not worth its latency.
    for rows, ms in ((12, 3.0), (64, 26.0), (32, 11.0)):
        engine.improve(rows, ms * MS)
    assert sizes() == {1: 1, 2: 2, 4: 2, 16: 5}
    engine.improve(1, 0.5 * MS)
    assert sizes()[1] == 0.5
    assert engine.costs.min_compute_ns == MS / 2  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("kind", [RunningSum, Afar])
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_streams_keep_their_state_apart_in_any_interleaving(kind: Any, seed: int, chunks: int, slots: int) -> None:
    """Streams open, push, end and leave at random over few slots; each sees the running sum of its own chunks only."""
    rng = np.random.default_rng(seed)
    server = Server(kind(slots), slots=slots, chunks=chunks)
    keys = itertools.count()
    live: dict[int, tuple[SlotHandle, list[float]]] = {}
    sent: dict[int, list[float]] = {}
    seen: dict[int, list[float]] = defaultdict(list)

    def open_one() -> None:
        key = next(keys)

        def done(status: int, output: np.ndarray, last: bool) -> None:
            assert status == OK
            seen[key].append(float(output[0]))

        live[key] = (server.frontend.open(done), [])
        sent[key] = live[key][1]

    gone = set()
    for _ in range(120):
        action = rng.random()
        if action < 0.2 and server.frontend.in_use < slots:
            open_one()
        elif action < 0.7 and live:
            key = int(rng.choice(list(live)))
            ticket, values = live[key]
            if server.frontend.room(ticket) > 0:
                value = float(rng.integers(1, 100))
                last = rng.random() < 0.2
                flags = SOFT_DEADLINE | (FIRST if not values else 0) | (LAST if last else 0)
                values.append(value)
                server.frontend.push(
                    ticket,
                    np.array([value, 7], np.float32),
                    deadline_ns=server.clock() + int(rng.integers(-5, 20)) * MS,
                    arrival_ns=server.clock(),
                    flags=flags,
                )
                if last:
                    del live[key]
        elif action < 0.75 and live:
            key = int(rng.choice(list(live)))
            server.frontend.cancel(live.pop(key)[0])
            gone.add(key)
        else:
            server.tick()
    server.drain()
    for key, values in sent.items():
        sums = np.cumsum(values).tolist()
        if key in gone:
            assert seen[key] == sums[: len(seen[key])]
        else:
            assert seen[key] == sums
    for ticket, _ in live.values():
        server.frontend.cancel(ticket)
    assert server.frontend.in_use == 0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_a_busy_row_steps_on_without_input_until_it_is_done(values: list[int]) -> None:
    server = Server(Countdown(16), slots=16)
    for key, value in enumerate(values):
        server.ask(key, value)
    server.drain()
    for key, value in enumerate(values):
        results = server.answers[key]
        assert [output[0] for _, output, _ in results] == list(range(value, -1, -1))
        assert [len(output) for _, output, _ in results] == [2 if n % 2 == 0 else 1 for n in range(value, -1, -1)]
        assert [last for _, _, last in results] == [False] * value + [True]
    assert server.frontend.in_use == 0


def test_a_busy_row_that_is_cancelled_stops() -> None:
    server = Server(Countdown(4), slots=4)
    ticket = server.ask(0, 1_000_000)
    server.tick()
    server.tick()
    server.frontend.cancel(ticket)
    server.drain()
    assert len(server.answers[0]) == 2
    assert server.frontend.in_use == 0


def test_a_row_waits_while_nobody_takes_its_results() -> None:
    server = Server(Countdown(4), slots=4)
    server.ask(0, 5)
    server.engine.tick(server.clock())
    assert server.engine.tick(server.clock()).run.size == 0
    server.frontend.collect()
    assert server.engine.tick(server.clock()).run.size == 1


def test_statistics_add_up() -> None:
    server = Server(Doubler())
    for key in range(5):
        server.ask(key, key)
    server.tick()
    server.ask(9, 1)
    server.clock.ns += 70 * MS
    server.drain()
    table = server.table
    assert table.outcomes.tolist() == [5, 1, 0, 0, 0]
    assert table.batch_counts.sum() == 1
    assert table.queue_counts.sum() == table.latency_counts.sum() == table.compute_counts.sum() == 5
    assert table.sums[0] == 5
    assert table.sums[3] >= table.sums[1] + table.sums[2]


def test_a_request_that_is_cancelled_while_it_runs_misses_no_deadline() -> None:
    executor = Doubler()
    server = Server(executor)
    handles = [server.ask(key, key) for key in range(3)]
    step = executor.step

    def cancel_and_step(batch: StepInput) -> StepOutput:
        server.frontend.cancel(handles[0])
        return step(batch)

    executor.step = cancel_and_step
    server.drain()
    assert server.table.outcomes.tolist() == [3, 0, 0, 0, 0]

    def late_step(batch: StepInput) -> StepOutput:
        server.clock.ns += 70 * MS
        return step(batch)

    executor.step = late_step
    server.ask(5, 1)
    server.drain()
    assert server.table.outcomes.tolist() == [4, 0, 0, 0, 1]


def test_a_tick_makes_as_many_python_calls_for_one_row_as_for_many() -> None:
    class Silent(Executor):
        input, output, max_rows = POINT, TOTAL, 512
        answer = np.zeros((512, 2), np.float32)

        def step(self, batch: StepInput) -> StepOutput:
            return StepOutput(output_B=self.answer[: batch.slots_B.size])

    def calls(rows: int) -> int:
        server = Server(Silent(), slots=512, curve=Costs([1, 512], [1_000.0, 2_000.0]))
        for key in range(rows):
            server.ask(key, key)
        count = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        now = server.clock()
        # A collection in between would count the calls of whoever listens to it.
        gc.disable()
        sys.setprofile(profile)
        server.engine.tick(now)
        sys.setprofile(None)
        gc.enable()
        return count

    assert calls(1) == calls(512)


@pytest.mark.parametrize("kind", [RunningSum, Afar])
def test_a_late_stream_catches_up_within_a_tick(kind: Any) -> None:
    server = Server(kind(4), slots=4, chunks=8, curve=Costs([1, 4], [1.0 * MS, 4.0 * MS]))
    seen: dict[str, list[float]] = {"late": [], "one": [], "two": []}
    tickets = {
        name: server.frontend.open(lambda status, output, last, name=name: seen[name].append(float(output[0])))
        for name in seen
    }

    def push(name: str, *values: float) -> None:
        for value in values:
            chunk = np.array([value, 0], np.float32)
            now_ns = server.clock()
            server.frontend.push(tickets[name], chunk, deadline_ns=now_ns + BUDGET_NS, arrival_ns=now_ns)

    push("late", 1, 2, 3, 4, 5, 6)
    push("one", 10)
    push("two", 20, 30)
    server.tick()
    # The batch of three takes 3 ms; in as much time once more, one of two rows and one of a single row follow.
    assert seen["late"] == [1, 3, 6]
    assert (seen["one"], seen["two"]) == ([10], [20, 50])
    server.tick()
    assert seen["late"] == [1, 3, 6, 10, 15]
    server.drain()
    assert seen["late"] == [1, 3, 6, 10, 15, 21]


def test_a_size_that_was_not_worth_running_for_a_while_keeps_its_time() -> None:
    server = Server(Doubler(), slots=64, curve=Costs([1, 2, 4], [1.0 * MS, 1.5 * MS, 2.0 * MS]))
    server.engine.improve(8, 6.0 * MS)
    server.engine.improve(16, 3.0 * MS)
    assert isinstance(server.engine.costs, Costs)
    # Eight rows are slower than four by the row, and were left out until sixteen were known.
    assert server.engine.costs.times_ns == {1: 1.0 * MS, 2: 1.5 * MS, 4: 2.0 * MS, 8: 6.0 * MS, 16: 3.0 * MS}
