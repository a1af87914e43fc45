"""Several front-ends on one table, front-ends that die, and several tables on one processor."""

import os
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import Overloaded
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.serve.engine.engine import Engine
from penstock.serve.engine.multiplex import PATIENCE, Multiplexer
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import OK, SlotTable, TableLayout
from tests.support.generated import examples
from tests.support.toys import POINT, TOTAL, Doubler

MS = 1_000_000
BUDGET_NS = 50 * MS
FRONTENDS = 3


class Clock:
    def __init__(self) -> None:
        self.ns = 1_000 * MS

    def __call__(self) -> int:
        self.ns += 1_000
        return self.ns


class Several:
    """An engine and front-ends, each over its own view of one shared memory, as processes would have it."""

    def __init__(self, slots: int = 12) -> None:
        self.clock = Clock()
        self.layout = TableLayout(slots=slots, chunks=1, input=POINT, output=TOTAL, frontends=FRONTENDS)
        table, self.descriptor = SlotTable.shared(self.layout)
        self.engine = Engine(Doubler(), table, budget_ns=BUDGET_NS, clock_ns=self.clock, costs=Costs([1, 64], [1, 2]))
        self.frontends = [self.attached(index) for index in range(FRONTENDS)]
        self.answers: dict[int, list[list[float]]] = defaultdict(list)

    def attached(self, index: int) -> TableWriter:
        table = SlotTable.attached(self.layout, self.descriptor)
        return TableWriter(table, budget_ns=BUDGET_NS, wake=lambda: None, index=index)

    def ask(self, frontend: int, key: int) -> None:
        def done(status: int, output: np.ndarray, last: bool) -> None:
            assert (status, last) == (OK, True)
            self.answers[key].append(output.tolist())

        self.frontends[frontend].submit(np.full(2, key, np.float32), done=done, arrival_ns=self.clock())

    def close(self) -> None:
        os.close(self.descriptor)


steps = st.lists(
    st.tuples(st.sampled_from(["ask", "tick", "collect", "die"]), st.integers(0, FRONTENDS - 1)), max_size=120
)


@given(steps)
@settings(max_examples=examples(200), deadline=None)
def test_a_front_end_that_dies_takes_nothing_from_the_others(taken: list[tuple[str, int]]) -> None:
    several = Several()
    asked: dict[int, int] = {}
    lost: set[int] = set()
    for key, (step, index) in enumerate(taken, 100):
        frontend = several.frontends[index]
        if step == "ask":
            try:
                several.ask(index, key)
                asked[key] = index
            except Overloaded:
                assert frontend.in_use == 4
        elif step == "tick":
            several.engine.tick(several.clock())
        elif step == "collect":
            frontend.collect()
        else:
            lost |= {key for key, where in asked.items() if where == index and key not in several.answers}
            several.frontends[index] = several.attached(index)
    for _ in range(4):
        several.engine.tick(several.clock())
        for frontend in several.frontends:
            frontend.collect()
    assert all(frontend.in_use == 0 for frontend in several.frontends)
    for key in asked:
        assert several.answers.get(key, []) == ([] if key in lost else [[2.0 * key] * 2])
    several.close()


def test_each_front_end_counts_for_itself_and_all_are_summed() -> None:
    several = Several()
    for index in (0, 1, 1):
        several.ask(index, index)
    table = SlotTable.attached(several.layout, several.descriptor)
    assert table.counts[:, 0].tolist() == [1, 2, 0]
    assert table.held[:, 0].tolist() == [1, 2, 0]
    several.close()


def test_admission_counts_what_waits_at_the_other_front_ends() -> None:
    several = Several()
    slow = Costs([1], [20.0 * MS])
    slow.publish(SlotTable.attached(several.layout, several.descriptor))
    for frontend in several.frontends:
        frontend.refresh()
    several.ask(0, 1)
    several.ask(1, 2)
    with pytest.raises(Overloaded, match="60 ms"):
        several.ask(2, 3)
    several.close()


class Timed(Executor):
    """Takes as long as it is told, on the test's clock."""

    def __init__(self, clock: Clock, ns: int) -> None:
        self.input, self.output, self.max_rows = POINT, TOTAL, 64
        self._clock, self._ns = clock, ns
        self.batches: list[int] = []

    def step(self, batch: StepInput) -> StepOutput:
        self._clock.ns += self._ns
        self.batches.append(batch.slots_B.size)
        return StepOutput(output_B=batch.chunk_B * 2)


class Shared:
    """Several tables on one processor; those of `live` have streams."""

    def __init__(self, batch_ns: dict[int, int], live: tuple[int, ...] = ()) -> None:
        self.executors: dict[int, Timed] = {}
        self.clock = Clock()
        self.engines = Multiplexer(self.clock)
        self.frontends: dict[int, TableWriter] = {}
        self.late: dict[int, list[bool]] = defaultdict(list)
        self.waited_ns: dict[int, list[int]] = defaultdict(list)
        for key, ns in batch_ns.items():
            layout = TableLayout(slots=64, chunks=4 if key in live else 1, input=POINT, output=TOTAL)
            table = SlotTable.private(layout)
            costs = Costs([1, 8], [float(ns), float(ns)])
            self.executors[key] = Timed(self.clock, ns)
            engine = Engine(self.executors[key], table, budget_ns=BUDGET_NS, clock_ns=self.clock, costs=costs)
            self.engines.add(key, engine)
            self.frontends[key] = TableWriter(table, budget_ns=BUDGET_NS, wake=lambda: None, margin_ns=BUDGET_NS // 10)

    def ask(self, key: int) -> bool:
        arrival_ns = self.clock()

        def done(status: int, output: Any, last: bool) -> None:
            self.waited_ns[key].append(self.clock.ns - arrival_ns)
            self.late[key].append(status != OK or self.clock.ns > arrival_ns + BUDGET_NS)

        try:
            self.frontends[key].submit(np.zeros(2, np.float32), done=done, arrival_ns=self.clock.ns)
        except Overloaded:
            return False
        return True

    def tick(self) -> None:
        if (ticked := self.engines.tick()) is not None:
            frontend = self.frontends[ticked[0]]
            frontend.collect()
            frontend.refresh()

    def run_beside_overload(self, *, busy: int, other: int, every_ns: int, ticks: int) -> None:
        """Run ticks: one table has all the rows that it takes, another one gets a row in each interval."""
        next_ns = self.clock.ns
        for _ in range(ticks):
            while self.ask(busy):
                pass
            if self.clock.ns >= next_ns:
                next_ns += every_ns
                self.ask(other)
            self.tick()


@pytest.mark.parametrize("batch_ns", [2 * MS, 8 * MS])
def test_a_model_under_overload_does_not_make_another_ones_requests_late(batch_ns: int) -> None:
    shared = Shared({0: 8 * MS, 1: batch_ns})
    next_ns, refused = shared.clock.ns, 0
    for _ in range(600):
        while shared.ask(0):
            pass
        if shared.clock.ns >= next_ns:
            next_ns += 60 * MS
            refused += not shared.ask(1)
        shared.tick()
        shared.clock.ns += 100_000
    assert len(shared.late[1]) > 40
    assert sum(shared.late[1]) == 0
    assert refused <= 0.05 * len(shared.late[1])
    assert np.mean(shared.late[0]) < 0.1


def test_a_model_that_uses_little_waits_for_few_batches_of_one_under_overload() -> None:
    shared = Shared({0: 8 * MS, 1: MS})
    shared.run_beside_overload(busy=0, other=1, every_ns=20 * MS, ticks=600)
    assert len(shared.waited_ns[1]) > 100
    # A batch that is under way, those that it waits for, and its own.
    assert max(shared.waited_ns[1]) <= (8 + PATIENCE + 8 + 1) * MS


def test_two_models_under_overload_share_the_processor() -> None:
    shared = Shared({0: 5 * MS, 1: 5 * MS})
    for _ in range(400):
        for key in (0, 1):
            while shared.ask(key):
                pass
        shared.tick()
    answered = [len(shared.late[key]) for key in (0, 1)]
    assert min(answered) > 0.8 * max(answered)


def test_chunks_of_streams_wait_for_a_larger_batch_while_others_have_work() -> None:
    shared = Shared({0: 2 * MS, 1: MS}, live=(0,))
    shared.run_beside_overload(busy=1, other=0, every_ns=4 * MS, ticks=1_000)
    waited_ns = shared.waited_ns[0]
    assert len(waited_ns) > 150
    assert np.mean(shared.executors[0].batches[10:]) > 3
    # Two fifths of the budget, a batch of the others and its own.
    assert max(waited_ns) < 0.4 * BUDGET_NS + 5 * MS
    assert not any(shared.late[0])


def test_chunks_of_streams_run_at_once_while_others_have_none() -> None:
    shared = Shared({0: 2 * MS, 1: MS}, live=(0,))
    for _ in range(100):
        shared.ask(0)
        shared.tick()
        shared.clock.ns += 4 * MS
    assert shared.executors[0].batches == [1] * 100
