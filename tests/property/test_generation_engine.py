"""The engine of answers that take steps: rows join and leave at random; each answer is that of its request alone."""

from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.application import Application
from penstock.core.errors import Overloaded
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.runtime.generation.generation_ahead import AheadExecutor
from penstock.runtime.generation.generation_executor import GenerationExecutor
from penstock.serve.engine.generation_engine import GenerationEngine
from penstock.serve.engine.multiplex import Multiplexer
from penstock.serve.frontend.table_writer import SlotHandle, TableWriter
from penstock.serve.table import slots
from penstock.serve.table.costs import Costs
from penstock.serve.table.generation_costs import GenerationCosts
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import LengthGrid
from penstock.serve.table.slots import SlotTable, TableLayout
from tests.support.generated import examples
from tests.support.generating import (
    COUNTER,
    MOST,
    PAST,
    Counter,
    Endless,
    Failing,
    FullAtBegin,
    FunctionalCounter,
    counter,
    digits,
)
from tests.support.host_lanes import HostLanes, executor_of
from tests.support.thorough import thorough
from tests.unit.test_generation_executor import by_hand

BUDGET_NS = 1_000_000_000


def record(given: dict[str, Array]) -> Array:
    assert isinstance(COUNTER.input, RecordSpec)
    return COUNTER.input.check(given)


def ahead_executor(network: type[Counter], max_rows: int) -> AheadExecutor:
    """An executor that launches steps ahead, on a CPU, with small rooms, so that all of them are used."""
    example = record(digits(7))
    lanes, nan = HostLanes(), float("nan")
    with patch("penstock.runtime.generation.generation_graphs.LEAST_ROOM", 4):
        return executor_of(network(), counter(network), lanes=lanes, example=example, max_rows=max_rows, padding=nan)


class Server:
    """An engine and a front-end on one table, with a clock that stands still."""

    def __init__(
        self, network: type[Counter] = Counter, max_rows: int = 6, places: int = 16, *, ahead: bool = False
    ) -> None:
        application: Application = counter(network)
        self.now_ns = 1
        layout = TableLayout.of(application, slots=places, frontends=1)
        self.table = SlotTable.private(layout)
        grid = LengthGrid.of(application.input)
        assert grid is not None
        begin = LengthCosts(grid, [1, 2, 4], np.full((len(grid.edges), 3), 1000.0))
        self.executor = (
            ahead_executor(network, max_rows)
            if ahead
            else GenerationExecutor(network(), application, max_rows=max_rows, padding=float("nan"))
        )
        self.engine = GenerationEngine(
            self.executor,
            self.table,
            first_budget_ns=BUDGET_NS,
            step_budget_ns=BUDGET_NS,
            clock_ns=lambda: self.now_ns,
            costs=GenerationCosts(begin, Costs([1, max_rows], [1000.0, 1000.0]), 4.0, beside=ahead),
        )
        self.writer = TableWriter(self.table, budget_ns=BUDGET_NS, wake=lambda: None)
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, int] = {}

    def submit(self, number: int, given: dict[str, Array]) -> SlotHandle:
        self.tokens[number] = []

        def done(status: int, output: Array, last: bool) -> None:
            assert number not in self.ended, "a result after the last"
            if output.size:
                self.tokens[number].append(int(output["token"][0]))
            if last:
                self.ended[number] = status

        return self.writer.submit(record(given), done=done, arrival_ns=self.now_ns)

    def tick(self) -> int:
        chosen = self.engine.tick(self.now_ns)
        self.writer.collect()
        return chosen.run.size + chosen.expire.size

    def rows(self) -> int:
        return self.engine.progress.rows

    def drain(self) -> None:
        for turn in count():
            if not self.tick():
                break
            assert turn < 10_000
        assert self.writer.in_use == 0
        assert self.engine.progress.rows == 0


def requests() -> st.SearchStrategy[list[tuple[int, int, int, int]]]:
    """Length, seed, maximum of steps, and ticks before the next request."""
    length = st.integers(1, 40) | st.sampled_from([15, 16, 17, 31, 32, 33])
    return st.lists(st.tuples(length, st.integers(0, 50), st.integers(1, MOST), st.integers(0, 4)), max_size=14)


def inputs(length: int, seed: int, most: int) -> dict[str, Array]:
    return digits(length, seed) | {"seed": np.array(seed), "most": np.array(most)}


@pytest.mark.parametrize(
    ("network", "ahead"),
    [
        (Counter, False),
        (Counter, True),
        (FunctionalCounter, False),
        thorough(FunctionalCounter, True),
        thorough(Endless, False),
        thorough(Endless, True),
    ],
)
@given(given_requests=requests(), rows=st.integers(1, 6))
@settings(max_examples=examples(8), deadline=None)
def test_each_answer_is_that_of_the_request_alone(
    network: type[Counter], ahead: bool, given_requests: list[tuple[int, int, int, int]], rows: int
) -> None:
    server = Server(network, max_rows=rows, ahead=ahead)
    for number, (length, seed, most, ticks) in enumerate(given_requests):
        server.submit(number, inputs(length, seed, most))
        for _ in range(ticks):
            server.tick()
    server.drain()
    for number, (length, seed, most, _) in enumerate(given_requests):
        alone_steps = GenerationExecutor(network(), COUNTER).run(record(inputs(length, seed, most)).reshape(1))
        alone = [int(step.output_B["token"][0]) for step in alone_steps]
        assert server.tokens[number] == alone
        if network is not Endless:
            assert alone == by_hand(digits(length, seed), seed, most)
        ends_itself = network is not Endless and alone[-1] % 7 == 0
        assert server.ended[number] == (slots.OK if ends_itself else slots.CUT)


@given(given_requests=requests(), gone=st.sets(st.integers(0, 13)))
@settings(max_examples=examples(8), deadline=None)
def test_a_client_that_goes_away_frees_its_row_and_changes_no_other_answer(
    given_requests: list[tuple[int, int, int, int]], gone: set[int]
) -> None:
    server = Server(Endless)
    handles: list[SlotHandle] = []
    for number, (length, seed, most, ticks) in enumerate(given_requests):
        handles.append(server.submit(number, inputs(length, seed, most)))
        for _ in range(ticks):
            server.tick()
        for place in gone & {number - 2}:
            server.writer.cancel(handles[place])
    server.drain()
    for number, (_, _, most, _) in enumerate(given_requests):
        if number in gone and number + 2 < len(given_requests):
            continue
        assert len(server.tokens[number]) == min(most, int(PAST))
    assert int(server.table.in_progress[0]) == 0


def test_a_row_on_which_the_network_raises_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(Failing)
    given_digits = {
        0: digits(5, 1),
        1: {"digits": np.array([29, 1])},
        2: {"digits": np.array([30, 3])},
        3: digits(20, 2),
        4: digits(17, 3),
    }
    for number, each in given_digits.items():
        server.submit(number, each)
    server.drain()
    assert {number for number, status in server.ended.items() if status == slots.FAILED} == {1, 2}
    assert len(server.tokens[2]) == 4, "three outputs, and one without numbers"
    for number in (0, 3, 4):
        assert server.tokens[number] == by_hand(given_digits[number])
    assert "alone fails" in caplog.text


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_that_begins_full_fails_alone(ahead: bool, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(FullAtBegin, ahead=ahead)
    seeds = [0, FullAtBegin.SEED, 1, FullAtBegin.SEED, FullAtBegin.SEED]
    for number, seed in enumerate(seeds):
        server.submit(number, inputs(5, number, MOST) | {"seed": np.array(seed)})
        if number == 2:
            server.drain()
    server.drain()
    for number, seed in enumerate(seeds):
        full = seed == FullAtBegin.SEED
        assert (server.ended[number] == slots.FAILED) == full
        assert server.tokens[number] == ([] if full else by_hand(digits(5, number), seed, MOST))
    assert "which is all that Dim('past', max=50) allows" in caplog.text


def test_memory_follows_the_rows_in_progress() -> None:
    server = Server(Endless, max_rows=6)
    for number in range(6):
        server.submit(number, inputs(40 if number == 0 else 3, number, 40 if number == 0 else 2))
    server.tick()
    while server.rows() != 6:
        server.tick()
    state: Any = server.engine.progress.state
    assert state.named()["memory"].shape[:2] == (6, 40)
    while server.rows() != 1:
        server.tick()
    for _ in range(20):
        server.tick()
    state = server.engine.progress.state
    assert state.named()["keys"].shape == (1, 2, 32, 4), "22 entries or more in pages of 16"
    server.submit(9, inputs(3, 1, 2))
    server.drain()
    assert len(server.tokens[0]) == 40


def test_no_more_rows_are_in_progress_than_the_costs_allow_and_the_others_follow() -> None:
    server = Server(Endless, max_rows=3)
    for number in range(8):
        server.submit(number, inputs(4, number, 5))
    most = 0
    for _ in range(100):
        server.tick()
        most = max(most, server.engine.progress.rows)
    assert most == 3
    assert set(server.ended.values()) == {slots.CUT}
    assert all(len(tokens) == 5 for tokens in server.tokens.values())


def test_a_request_that_waits_past_its_deadline_expires_and_one_in_progress_does_not() -> None:
    server = Server(Endless, max_rows=1)
    server.submit(0, inputs(4, 0, 50))
    server.tick()
    server.submit(1, inputs(4, 1, 50))
    server.now_ns += 2 * BUDGET_NS
    server.drain()
    assert server.ended == {0: slots.CUT, 1: slots.EXPIRED}
    assert len(server.tokens[0]) == 50


def test_admission_rejects_a_request_whose_first_output_would_be_late() -> None:
    server = Server(Endless, max_rows=1)
    server.engine.costs.mean_steps = 1e6
    server.engine.costs.publish(server.table)
    server.writer.refresh()
    server.submit(0, inputs(4, 0, 50))
    with pytest.raises(Overloaded, match="The answer would come after"):
        server.submit(1, inputs(4, 1, 50))


@pytest.mark.thorough
@given(given_requests=requests(), dies=st.integers(0, 13))
@settings(max_examples=examples(8), deadline=None)
def test_a_front_end_that_dies_leaves_no_row_behind(given_requests: list[tuple[int, int, int, int]], dies: int) -> None:
    server = Server(Endless)
    for number, (length, seed, most, ticks) in enumerate(given_requests):
        server.submit(number, inputs(length, seed, most))
        for _ in range(ticks):
            server.engine.tick(server.now_ns)
            if number % 2:
                server.writer.collect()
        if number == dies:
            server.tokens, server.ended = {}, {}
            server.writer = TableWriter(server.table, budget_ns=BUDGET_NS, wake=lambda: None)
    server.drain()
    # The slots of the dead process are used again.
    for number in range(16):
        server.submit(100 + number, digits(3, number))
    server.drain()
    assert all(server.ended[number] == slots.CUT for number in server.tokens)


def test_two_applications_on_one_processor_both_go_on() -> None:
    one, other = Server(Endless), Server(Counter)
    multiplexer = Multiplexer(lambda: one.now_ns)
    multiplexer.add(1, one.engine)
    multiplexer.add(2, other.engine)
    for number in range(4):
        one.submit(number, inputs(4, number, 40))
        other.submit(number, digits(9, number))
    ran: list[int] = []
    while True:
        one.now_ns = other.now_ns = one.now_ns + 1_000_000
        found = multiplexer.tick()
        if found is None or not found[1].run.size:
            break
        ran.append(found[0])
        one.writer.collect()
        other.writer.collect()
    assert [len(tokens) for tokens in one.tokens.values()] == [40] * 4
    assert list(other.tokens.values()) == [by_hand(digits(9, number)) for number in range(4)]
    assert set(ran) == {1, 2}
