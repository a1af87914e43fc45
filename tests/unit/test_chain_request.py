"""One request of a chain: admission, deadlines of its steps, rows at once, rejections and cancellation."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock import Application, Chain, ChainStep, TensorSpec
from penstock.core.chains.chain_run import ChainPlan
from penstock.core.errors import DeadlineImpossible, Overloaded, RequestError, TooLate, UnknownRoute
from penstock.core.spec import Array
from penstock.serve.frontend.balancer import PredictedFinish
from penstock.serve.frontend.function_pool import FunctionPool
from penstock.serve.registry.chain_request import ChainRun, RequestTerms, StepReport
from penstock.serve.registry.chain_steps import ChainSteps
from penstock.serve.registry.served_model import status_error
from penstock.serve.table.slots import ENGINE_LOST, EXPIRED, OK

MS = 1_000_000


@dataclass
class Handle:
    """A row of a part."""

    chunk: Array
    done: Callable[[int, Array, bool], None]
    arrival_ns: int
    budget_ns: int
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Part:
    """A part whose rows a test answers; doubles its input."""

    ms: int
    waiting: int = 0
    max_rows: int = 4
    refuses: list[RequestError | None] = field(default_factory=list[RequestError | None])
    rows: list[Handle] = field(default_factory=list[Handle])
    rejected: list[RequestError] = field(default_factory=list[RequestError])
    counts: list[int] = field(default_factory=lambda: [0] * 16)
    min_compute_ns: int = MS
    decode_pool: None = None
    application: Any = field(default_factory=lambda: app("part"))
    further_outputs_ns: int = 0

    def reject_lost(self) -> None: ...

    def length_of(self, chunk: Array) -> int:
        return 0

    def predict(self, rows: int, low_priority: bool, length: int) -> PredictedFinish:
        return PredictedFinish(self.ms * MS * rows, self.waiting + rows - 1)

    def submit(self, chunk: Array, done: Any, arrival_ns: int, budget_ns: int, low_priority: bool) -> Handle:
        if self.refuses and (error := self.refuses.pop(0)) is not None:
            raise error
        self.rows.append(Handle(chunk, done, arrival_ns, budget_ns))
        return self.rows[-1]

    def count_rejection(self, error: RequestError) -> None:
        self.rejected.append(error)

    def error_of(self, status: int, budget_ns: int) -> RequestError:
        return status_error(status, budget_ns)

    def answer(self, row: int, status: int = OK) -> None:
        handle = self.rows[row]
        handle.done(status, handle.chunk * 2, True)


def app(name: str) -> Application:
    def spec(tensor: str) -> TensorSpec:
        return TensorSpec(dtype="float32", shape=(1,), meaning="number", name=tensor)

    return Application(name=name, input=spec("a"), output=spec("b"), model=":none")


def several(results: Any, given: Any) -> list[Any]:
    return [given + number for number in range(int(given[0]))]


def total(results: Any, given: Any) -> Any:
    return np.array([sum(-1 if one is None else one[0] for one in results["second"])], np.float32)


class Scene:
    """A chain of two parts: the second gets as many rows as the input says."""

    def __init__(self, *, partial: bool = False, first_ms: int = 10, second_ms: int = 20) -> None:
        self.now_ns = 1000 * MS
        self.parts = {"first": Part(first_ms), "second": Part(second_ms)}
        chain = Chain(
            name="both",
            steps=(ChainStep(part="first"), ChainStep(part="second", each=several, partial=partial)),
            join=total,
            output=TensorSpec(dtype="float32", shape=(1,), meaning="sum", name="sum"),
        )
        plan = ChainPlan(chain=chain, parts={name: app(name) for name in self.parts})
        pool = FunctionPool("both", lambda: self.now_ns)
        self.steps = ChainSteps(plan, self._find, pool, lambda: self.now_ns)
        self.ended: list[tuple[Any, int]] = []
        self.reports: list[StepReport] = []

    def _find(self, name: str) -> Any:
        if name not in self.parts:
            raise UnknownRoute(f"There is no {name}.")
        return self.parts[name]

    def start(self, number: float, *, budget_ms: int = 100) -> ChainRun:
        terms = RequestTerms(
            arrival_ns=self.now_ns, budget_ns=budget_ms * MS, low_priority=False, observe=self.reports.append
        )
        run = ChainRun(self.steps, terms, lambda result, step: self.ended.append((result, step)))
        run.start(np.array([number], np.float32))
        return run


def test_each_part_gets_the_deadline_that_leaves_time_for_the_rest() -> None:
    scene = Scene()
    first, second = scene.parts.values()
    scene.start(2)
    # 100 ms less the 20 ms of the second part.
    assert first.rows[0].budget_ns == 80 * MS
    scene.now_ns += 30 * MS
    first.answer(0)
    assert [row.chunk.tolist() for row in second.rows] == [[2], [3]]
    assert [row.arrival_ns + row.budget_ns for row in second.rows] == [1100 * MS] * 2
    second.answer(1)
    second.answer(0)
    assert scene.ended == [(np.array([10], np.float32), -1)]
    assert [(report.name, report.rows, report.duration_ns) for report in scene.reports] == [
        ("first", 1, 30 * MS),
        ("second", 2, 0),
    ]


def test_where_it_is_tight_the_steps_share_what_is_left() -> None:
    scene = Scene()
    first, second = scene.parts.values()
    second.waiting = 1
    scene.start(1, budget_ms=15)
    assert first.rows[0].budget_ns == 5 * MS
    first.answer(0, EXPIRED)
    assert str(scene.ended[0][0]).endswith(
        "It had 5.0 of the 15.0 ms that were left, since step 'second' is expected to take 20 ms."
    )


def test_an_idle_part_gets_all_of_a_tight_deadline() -> None:
    scene = Scene(second_ms=1000)
    scene.start(1, budget_ms=15)
    assert scene.parts["first"].rows[0].budget_ns == 15 * MS


def test_the_sum_of_all_steps_decides_on_admission() -> None:
    scene = Scene()
    scene.steps.admit(30 * MS, 30 * MS, False)
    # Nothing waits: only a request that runs can correct a prediction that is too high.
    scene.steps.admit(29 * MS, 29 * MS, False)
    scene.parts["second"].waiting = 1
    sentence = "would come after 30 ms, past the budget of 29 ms; part 'second' takes 20 ms"
    with pytest.raises(Overloaded, match=sentence) as e:
        scene.steps.admit(29 * MS, 29 * MS, False)
    assert e.value.retry_after_s == 0.1
    with pytest.raises(DeadlineImpossible, match=r"own time of the chain's networks, 2\.00 ms"):
        scene.steps.admit(1 * MS, 1 * MS, False)
    # The usual number of rows counts.
    for _ in range(100):
        scene.steps.observe(1, 4, 0)
    with pytest.raises(Overloaded, match="after 90 ms"):
        scene.steps.admit(80 * MS, 80 * MS, False)
    del scene.parts["first"]
    with pytest.raises(Overloaded, match="Part 'first': The model is not loaded"):
        scene.steps.admit(80 * MS, 80 * MS, False)


def test_the_steps_of_an_answer_count_where_the_next_part_waits_for_all_of_them() -> None:
    scene = Scene()
    first = scene.parts["first"]
    first.application, first.further_outputs_ns, first.waiting = SimpleNamespace(generate="declared"), 40 * MS, 1
    with pytest.raises(Overloaded, match="would come after 70 ms"):
        scene.steps.admit(69 * MS, 69 * MS, False)
    scene.start(1)
    # Of its first output: 100 ms less 40 of its further outputs and 20 of the second part.
    assert scene.steps.rest_ns(0, False) == (10 * MS, 60 * MS)
    assert scene.steps.rest_ns(1, False) == (20 * MS, 0)


def test_no_more_rows_at_once_than_one_request_may_have() -> None:
    scene = Scene()
    first, second = scene.parts.values()
    scene.start(7)
    first.answer(0)
    assert len(second.rows) == 4
    second.answer(2)
    assert len(second.rows) == 5
    for row in (0, 1, 3, 4, 5, 6):
        second.answer(row)
    assert scene.ended[0][0].tolist() == [2 * sum(7 + number for number in range(7))]


def test_no_row_at_all_goes_on_at_once() -> None:
    scene = Scene()
    scene.start(0)
    scene.parts["first"].answer(0)
    assert scene.ended == [(np.array([0], np.float32), -1)]


def test_a_rejected_row_ends_the_request_with_the_parts_name_and_cancels_the_others() -> None:
    scene = Scene()
    first, second = scene.parts.values()
    scene.start(3)
    first.answer(0)
    second.answer(1, ENGINE_LOST)
    ((error, step),) = scene.ended
    assert isinstance(error, Overloaded)
    assert (str(error)[:15], step) == ("Part 'second': ", 1)
    assert error.retry_after_s == 3.0
    assert [row.cancelled for row in second.rows] == [True, False, True]
    assert len(second.rejected) == 1
    assert scene.reports[-1].error is error
    # A result that was on its way is dropped.
    second.answer(0)
    assert len(scene.ended) == 1


def test_the_share_of_a_step_that_is_too_short_is_no_mistake_of_the_client() -> None:
    scene = Scene()
    first, second = scene.parts.values()
    second.refuses = [DeadlineImpossible("A budget of 3 ms is shorter.")]
    scene.start(1)
    first.answer(0)
    assert isinstance(scene.ended[0][0], TooLate)


@pytest.mark.parametrize("count", [1, 3])
def test_a_partial_request_goes_on_without_the_rejected_rows(count: int) -> None:
    scene = Scene(partial=True)
    first, second = scene.parts.values()
    # All but the last are refused.
    second.refuses.extend([Overloaded("Full.", 1.0)] * (count - 1))
    scene.start(count)
    first.answer(0)
    second.answer(0)
    assert scene.ended[0][0].tolist() == [2 * (2 * count - 1) - (count - 1)]


def test_a_partial_request_all_of_whose_rows_are_rejected_goes_on_too() -> None:
    scene = Scene(partial=True)
    first, second = scene.parts.values()
    second.refuses = [Overloaded("Full.", 1.0)] * 6
    scene.start(6)
    first.answer(0)
    assert scene.ended[0][0].tolist() == [-6]
    assert len(second.rejected) == 6


def test_a_cancelled_request_cancels_its_rows_and_says_nothing() -> None:
    scene = Scene()
    first, second = scene.parts.values()
    run = scene.start(2)
    first.answer(0)
    run.cancel()
    assert [row.cancelled for row in second.rows] == [True, True]
    second.answer(0)
    second.answer(1)
    assert scene.ended == []
    assert cast(Any, run)._waiting == []


@pytest.mark.parametrize("leaves", [False, True])
def test_nobody_waits_for_a_function_past_the_deadline_or_once_the_client_is_gone(leaves: bool) -> None:
    scene, begun, gate = Scene(), threading.Event(), threading.Event()

    def look(results: Any, given: Any) -> Any:
        begun.set()
        return gate.wait(60)

    chain = Chain(
        name="both",
        steps=(ChainStep(part="first"), ChainStep(run=look, name="look")),
        output=TensorSpec(dtype="float32", shape=(1,), meaning="sum", name="sum"),
    )
    plan = ChainPlan(chain=chain, parts={"first": app("first")})
    scene.steps = ChainSteps(plan, scene._find, scene.steps.pool, lambda: scene.now_ns)

    async def ask() -> None:
        run = scene.start(1, budget_ms=30)
        scene.parts["first"].answer(0)
        async with asyncio.timeout(30):
            # Without the loop, in which the deadline would pass.
            assert begun.wait(10)
            if leaves:
                run.cancel()
            await asyncio.sleep(0.06)
            # The thread is still at it.
            assert (scene.steps.pool.waiting, len(scene.ended)) == (1, 0 if leaves else 1)
            gate.set()
            while scene.steps.pool.waiting:
                await asyncio.sleep(0.001)

    asyncio.run(ask())
    if leaves:
        assert scene.ended == []
        return
    ((error, step),) = scene.ended
    assert isinstance(error, TooLate)
    assert (str(error), step) == ("Deadline of 30 ms exceeded in step 'look'; come back later.", 1)
    assert scene.reports[-1].error is error
