"""The share of the loop's time that refusals take, and a front-end under overload on a simulated clock."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from penstock.serve.http.answer_cost import LEAST_ANSWERS, AnswerCost
from penstock.serve.http.refusals import (
    BURST_NS,
    FIRST_NS,
    HELD_BUDGETS,
    IDLE_NS,
    LEAST_SHARE,
    SHARE,
    Refusals,
)
from tests.support.clock import Clock
from tests.support.overload import BUDGET_NS, CAPACITY, US, Simulation, Spent
from tests.support.thorough import thorough


@dataclass
class Loop:
    """An event loop that a test turns."""

    clock: Clock = field(default_factory=Clock)
    ready: deque[Callable[[], None]] = field(default_factory=deque[Callable[[], None]])
    answered: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])

    def write_refusal(self, refusal: bytes) -> None:
        """Answer, which takes no time."""
        self.answered.append((self.clock.ns(), refusal))

    def turn(self, busy_ns: int) -> None:
        """Spend time on something else, and call what is ready."""
        self.clock.sleep(busy_ns / 1e9)
        for _ in range(len(self.ready)):
            self.ready.popleft()()


def refusals_of(loop: Loop, share: float = 0.5) -> Refusals:
    return Refusals(BUDGET_NS, loop.ready.append, loop.clock.ns, share)


def test_a_burst_is_answered_at_once_and_more_is_held() -> None:
    loop = Loop()
    refusals = refusals_of(loop)
    admitted = 0
    while refusals.admit(loop.clock.ns()):
        admitted += 1
    assert admitted == -(-BURST_NS // FIRST_NS)
    refusals.hold(loop, b"held", loop.clock.ns())
    # Others that wait come first.
    loop.clock.sleep(1)
    assert not refusals.admit(loop.clock.ns())


def test_a_busy_loop_answers_at_its_share_oldest_first() -> None:
    loop = Loop()
    refusals = refusals_of(loop)
    while refusals.admit(loop.clock.ns()):
        pass
    for number in range(1_000):
        refusals.hold(loop, b"%d" % number, loop.clock.ns())
    begin_ns = loop.clock.ns()
    for _ in range(20):
        loop.turn(busy_ns=500_000)
    share = len(loop.answered) * FIRST_NS / (loop.clock.ns() - begin_ns)
    assert share == pytest.approx(0.5, abs=0.01)
    assert [refusal for _, refusal in loop.answered] == [b"%d" % number for number in range(len(loop.answered))]
    assert refusals.held == 1_000 - len(loop.answered)


def test_what_is_held_is_answered_in_time_however_busy_the_loop_is() -> None:
    loop = Loop()
    refusals = refusals_of(loop, share=0.0)
    begin_ns = loop.clock.ns()
    for _ in range(10):
        refusals.hold(loop, b"", loop.clock.ns())
    while refusals.held:
        loop.turn(busy_ns=1_000_000)
    assert len(loop.answered) == 10
    assert max(ns for ns, _ in loop.answered) - begin_ns <= HELD_BUDGETS * BUDGET_NS + 1_000_000
    assert not loop.ready


def test_what_is_held_is_answered_in_time_while_the_loop_does_nothing_but_poll() -> None:
    loop = Loop()
    refusals = refusals_of(loop, share=0.0)
    refusals.hold(loop, b"first", loop.clock.ns())
    loop.clock.sleep(HELD_BUDGETS * BUDGET_NS / 1e9 + 0.001)
    refusals.hold(loop, b"second", loop.clock.ns())
    assert [refusal for _, refusal in loop.answered] == [b"first"]
    assert refusals.held == 1


def test_an_idle_loop_answers_what_is_held() -> None:
    loop = Loop()
    refusals = refusals_of(loop, share=0.0)
    refusals.hold(loop, b"", loop.clock.ns())
    loop.turn(busy_ns=IDLE_NS // 2)
    assert len(loop.answered) == 1


def test_a_server_that_ends_answers_all_that_it_holds() -> None:
    loop = Loop()
    refusals = refusals_of(loop, share=0.0)
    for number in range(3):
        refusals.hold(loop, b"%d" % number, loop.clock.ns())
    refusals.end()
    assert [refusal for _, refusal in loop.answered] == [b"0", b"1", b"2"]
    loop.turn(busy_ns=1_000_000)
    assert (len(loop.answered), len(loop.ready)) == (3, 0)


def test_dear_refusals_are_fewer() -> None:
    loop = Loop()
    refusals = refusals_of(loop)
    for _ in range(500):
        refusals.observe(95_000)
    admitted = 0
    while refusals.admit(loop.clock.ns()):
        admitted += 1
    assert admitted == pytest.approx(BURST_NS / 100_000, abs=1)


@pytest.mark.parametrize(("factor", "least"), [(0.9, 0.88), (1.35, 0.5), (1.5, 0.4)])
def test_an_overload_leaves_most_of_the_answers(factor: float, least: float) -> None:
    """Refusing takes half of what an answer does, so 0.63 is the most at 1.35 times the capacity, and 0.46 at 1.5."""
    simulation = Simulation(connections=2_048, rate=factor * CAPACITY)
    outcome = simulation.run()
    assert outcome.good / simulation.seconds / CAPACITY > least
    assert outcome.longest_refusal_ms * 1e6 < 4 * BUDGET_NS


@pytest.mark.parametrize("connections", [4_096, 8_192])
@pytest.mark.parametrize(("factor", "least"), [(0.9, 0.88), thorough(1.2, 0.6), (1.35, 0.5), thorough(1.5, 0.3)])
def test_cheap_answers_leave_what_refusing_leaves(factor: float, least: float, connections: int) -> None:
    """Refusing takes 0.55 of an answer: 0.76, 0.57 and 0.39 are the most. 3,125 connections hold a budget."""
    spent = Spent(read_ns=5 * US, write_ns=6 * US, admit_ns=4 * US, batch_ns=100 * US, row_ns=5 * US)
    simulation = Simulation(connections=connections, rate=factor * spent.capacity, spent=spent)
    assert simulation.run().good / simulation.seconds / spent.capacity > least


@pytest.mark.parametrize(("connections", "least"), [(64, 0.9), (2_048, 0.4), (6_000, 0.18)])
def test_clients_that_try_again_at_once_do_not_take_the_core(connections: int, least: float) -> None:
    simulation = Simulation(connections=connections, rate=None)
    outcome = simulation.run()
    assert outcome.good / simulation.seconds / CAPACITY > least
    assert outcome.longest_refusal_ms * 1e6 < 4 * BUDGET_NS


def test_without_a_share_they_take_it() -> None:
    """What the bound is for."""
    simulation = Simulation(connections=6_000, rate=None, share=float("inf"))
    assert simulation.run().good / simulation.seconds / CAPACITY < 0.1


class Work:
    """A process that answers and refuses: its processor time and its answers."""

    def __init__(self) -> None:
        self.cpu_ns, self.answered = 0, 0

    def cost(self) -> AnswerCost:
        return AnswerCost(lambda: self.cpu_ns, lambda: self.answered)


def test_the_cost_of_an_answer_is_without_the_refusals() -> None:
    work = Work()
    cost = work.cost()
    work.answered, work.cpu_ns = LEAST_ANSWERS, LEAST_ANSWERS * 2_000_000 + 500 * 20_000
    for _ in range(500):
        cost.add_refusal(20_000)
    cost.measure()
    assert cost.ns == pytest.approx(2_000_000)


def test_few_answers_are_no_measurement_and_a_model_that_is_gone_is_none() -> None:
    work = Work()
    cost = work.cost()
    work.answered, work.cpu_ns = LEAST_ANSWERS - 1, 10**9
    cost.measure()
    assert cost.ns == 0
    work.answered = -1
    cost.measure()
    work.answered, work.cpu_ns = LEAST_ANSWERS - 1, 10**9 + LEAST_ANSWERS * 1_000
    cost.measure()
    assert cost.ns == pytest.approx(1_000)


@pytest.mark.parametrize(
    ("answer_ns", "share"), [(30_000, SHARE), (300_000, 0.05 * 9 / 0.95), (15_000_000, LEAST_SHARE), (10_000, SHARE)]
)
def test_refusals_have_the_share_that_ten_times_the_capacity_needs(answer_ns: int, share: float) -> None:
    loop, work = Loop(), Work()
    refusals = Refusals(BUDGET_NS, loop.ready.append, loop.clock.ns, answer_cost=work.cost())
    work.answered, work.cpu_ns = 100, 100 * answer_ns
    loop.clock.sleep(1)
    refusals.admit(loop.clock.ns())
    assert FIRST_NS == 15_000
    assert refusals.share == pytest.approx(share)
