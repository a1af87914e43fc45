"""Second tries of the rows of an engine that died: which rows, where, how often, and what each client is told."""

from typing import Any

import numpy as np
import pytest

from penstock.core.spec import TensorSpec
from penstock.serve.frontend.second_tries import QUARANTINE_NS, SecondTries
from penstock.serve.frontend.table_writer import SlotHandle, TableWriter
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import (
    LAST,
    LOST_TWICE,
    LOW_PRIORITY,
    OFFERED,
    OK,
    ONE_ENGINE_LOST,
    SOFT_DEADLINE,
    SlotTable,
    TableLayout,
)
from tests.support.varying import SUMS, WORDS, linear_costs, words

MS = 1_000_000
NOW_NS = 1_000 * MS
BUDGET_NS = 50 * MS
POINT = TensorSpec(dtype="float32", shape=(3,), meaning="a point")
TOTALS = TensorSpec(dtype="float32", shape=(2,), meaning="two totals")
# 8 ms alone, 20 ms for a batch of 4.
COSTS = Costs([1, 4], [8.0 * MS, 20.0 * MS])
NOT_ADMITTED = ONE_ENGINE_LOST


class World:
    """Some engines that a test moves by hand, and one front-end."""

    def __init__(self, engines: int = 2, *, results: int = 0, slots: int = 8) -> None:
        self.now_ns = NOW_NS
        layout = TableLayout(slots=slots, chunks=1, input=POINT, output=TOTALS, results=results)
        self.tables = [SlotTable.private(layout) for _ in range(engines)]
        for table in self.tables:
            COSTS.publish(table)
        self.writers = [TableWriter(table, budget_ns=BUDGET_NS, wake=lambda: None) for table in self.tables]
        self.tries = SecondTries(lambda: self.now_ns)
        self.statuses: dict[str, list[int]] = {}
        self.handles: dict[str, SlotHandle] = {}
        self.dead: set[int] = set()

    def submit(self, name: str, engine: int = 0, **options: Any) -> SlotHandle:
        """Submit a row whose first number is the length of its name."""
        heard = self.statuses[name] = []
        chunk = np.array([len(name), 2, 3], np.float32)
        handle = self.handles[name] = self.writers[engine].submit(
            chunk, done=lambda status, output, last: heard.append(status), arrival_ns=NOW_NS, **options
        )
        return handle

    def begin(self, *names: str) -> None:
        for name in names:
            handle = self.handles[name]
            table = self.tables[self.writers.index(handle.writer)]
            table.begun[handle.slot] = table.generation[handle.slot]

    def answer(self, name: str) -> None:
        handle = self.handles[name]
        table, slot = self.tables[self.writers.index(handle.writer)], handle.slot
        assert table.input[slot, 0].tolist() == [len(name), 2, 3]
        table.output_length[slot] = 2
        table.produced[slot] += 1
        table.consumed[slot] += 1
        table.done[0, table.done_count[0] % table.done.shape[1]] = slot
        table.done_count[0] += 1
        handle.writer.collect()

    def lose(self, engine: int) -> int:
        self.dead.add(engine)
        others = [writer for index, writer in enumerate(self.writers) if index not in self.dead]
        return self.tries.settle(self.writers[engine], others, ONE_ENGINE_LOST)

    def where(self, name: str) -> int:
        return self.writers.index(self.handles[name].writer)


def test_a_row_is_put_as_it_was_into_the_table_of_another_engine() -> None:
    world = World()
    handle = world.submit("row", low_priority=True, budget_ns=40 * MS)
    world.now_ns += 5 * MS
    assert world.lose(0) == 1
    assert world.statuses["row"] == []
    assert (world.where("row"), world.writers[1].in_use) == (1, 1)
    table, slot = world.tables[1], handle.slot
    assert (table.deadline_ns[slot, 0], table.arrival_ns[slot, 0]) == (NOW_NS + 40 * MS, NOW_NS)
    assert table.flags[slot, 0] & LOW_PRIORITY
    assert table.held[0].tolist()[:2] == [0, 1]
    # It is no new request.
    assert table.counts[0, OFFERED] == 0
    world.answer("row")
    assert world.statuses["row"] == [OK]
    assert table.held[0].tolist()[:2] == [0, 0]


def test_a_row_whose_length_varies_keeps_it() -> None:
    layout = TableLayout(slots=4, chunks=1, input=WORDS, output=SUMS)
    tables = [SlotTable.private(layout) for _ in range(2)]
    for table in tables:
        linear_costs(1.0 * MS, 0.01 * MS).publish(table)
    first, second = [TableWriter(table, budget_ns=10**12, wake=lambda: None) for table in tables]
    handle = first.submit(words(5), done=lambda *result: None, arrival_ns=NOW_NS)
    assert SecondTries(lambda: NOW_NS).settle(first, [second], ONE_ENGINE_LOST) == 1
    assert tables[1].length[handle.slot, 0] == tables[0].length.max() > 0
    assert tables[1].held_lengths[0].tolist() == tables[0].held_lengths[0].tolist()
    assert tables[1].input[handle.slot].tobytes()[: words(5).nbytes] == words(5).tobytes()


def test_a_row_that_cannot_be_answered_in_time_is_told_as_before() -> None:
    world = World()
    for number in range(3):
        world.submit(f"mine {number}", engine=1)
    world.submit("late")
    world.submit("patient", budget_ns=200 * MS)
    world.now_ns += 40 * MS
    assert world.lose(0) == 1
    assert (world.statuses["late"], world.statuses["patient"]) == ([NOT_ADMITTED], [])


def test_an_idle_engine_does_not_try_what_would_be_late() -> None:
    world = World()
    world.submit("row")
    world.now_ns += 43 * MS
    assert world.lose(0) == 0
    assert world.statuses["row"] == [NOT_ADMITTED]


def test_the_most_urgent_rows_come_first_and_the_slots_are_the_limit() -> None:
    world = World(slots=2)
    world.submit("patient", budget_ns=900 * MS)
    world.submit("urgent", budget_ns=500 * MS)
    world.submit("there", engine=1, budget_ns=900 * MS)
    assert world.lose(0) == 1
    assert (world.statuses["urgent"], world.statuses["patient"]) == ([], [NOT_ADMITTED])


def test_rows_go_where_fewest_wait() -> None:
    world = World(engines=3)
    for number in range(6):
        world.submit(f"row {number}", budget_ns=900 * MS)
    assert world.lose(0) == 6
    assert [writer.in_use for writer in world.writers[1:]] == [3, 3]


def test_a_row_is_tried_twice_at_most() -> None:
    world = World(engines=3)
    world.submit("waits")
    world.submit("runs")
    world.begin("runs")
    assert world.lose(0) == 2
    world.begin("runs")
    assert world.lose(world.where("runs")) == 0
    # One that two engines were running when they died may have killed both: its client must not send it again.
    assert world.statuses["runs"] == [LOST_TWICE]


def test_a_row_that_only_waited_in_both_is_told_to_ask_again() -> None:
    world = World(engines=3)
    world.submit("waits")
    assert world.lose(0) == 1
    assert world.lose(world.where("waits")) == 0
    assert world.statuses["waits"] == [ONE_ENGINE_LOST]


def test_rows_that_were_being_run_go_to_one_engine_alone() -> None:
    world = World(engines=4)
    names = [f"row {number}" for number in range(6)]
    for name in names:
        world.submit(name, budget_ns=900 * MS)
    world.begin(*names[:4])
    assert world.lose(0) == 6
    assert len({world.where(name) for name in names[:4]}) == 1
    assert world.where(names[0]) not in {world.where(name) for name in names[4:]}


@pytest.mark.parametrize("engines", [2, 3, 5])
def test_poison_that_is_sent_again_and_again_does_not_take_all_engines_each_time(engines: int) -> None:
    """A client that sends a row that kills any engine; engines come back between its requests."""
    world = World(engines=engines)
    deaths: list[int] = []
    for attempt in range(4):
        name = f"poison {attempt}"
        world.now_ns += 1_000 * MS
        world.submit(name, budget_ns=BUDGET_NS + (attempt + 1) * 1_000 * MS)
        died = 0
        while not world.statuses[name]:
            world.begin(name)
            world.lose(world.where(name))
            died += 1
        deaths.append(died)
        # They are started again, with new tables.
        fresh = World(engines=engines)
        world.tables, world.writers, world.dead = fresh.tables, fresh.writers, set()
    assert deaths == [2, 1, 1, 1]
    # Those that only waited beside it do get their second try.
    world.submit("innocent", budget_ns=10_000 * MS)
    world.submit("beside", budget_ns=10_000 * MS)
    world.begin("beside")
    assert world.lose(0) == 1
    assert (world.statuses["innocent"], world.statuses["beside"]) == ([], [ONE_ENGINE_LOST])
    world.now_ns += QUARANTINE_NS
    world.dead = set()
    world.submit("later", budget_ns=200_000 * MS)
    world.begin("later")
    assert world.lose(0) == 1


def test_a_stream_and_a_row_that_was_answered_in_part_get_no_second_try() -> None:
    world = World(results=4)
    world.submit("steps", budget_ns=900 * MS)
    slot = world.handles["steps"].slot
    world.tables[0].busy[slot] = 1
    world.answer("steps")
    assert world.statuses["steps"] == [OK]
    heard = list[int]()
    stream = world.writers[0].open(lambda status, output, last: heard.append(status))
    chunk = np.zeros(3, np.float32)
    assert world.writers[0].push(stream, chunk, deadline_ns=10**15, arrival_ns=NOW_NS, flags=SOFT_DEADLINE | LAST)
    assert world.lose(0) == 0
    assert world.statuses["steps"] == [OK, ONE_ENGINE_LOST]
    assert heard == [ONE_ENGINE_LOST]


def test_a_row_that_was_begun_and_gave_nothing_yet_gets_a_second_try_though_its_answer_takes_steps() -> None:
    world = World(results=4)
    world.submit("steps", budget_ns=900 * MS)
    table, slot = world.tables[0], world.handles["steps"].slot
    table.busy[slot] = 1
    table.consumed[slot] += 1
    assert world.lose(0) == 1


def test_a_row_is_cancelled_where_it_is_now() -> None:
    world = World()
    handle = world.submit("row")
    gone = world.submit("gone")
    gone.cancel()
    assert world.lose(0) == 1
    handle.cancel()
    assert world.tables[1].deadline_ns[handle.slot, 0] < 0
    assert handle.done is None


def test_a_client_that_cancels_its_other_rows_when_one_fails_cancels_them_where_they_are() -> None:
    world = World()
    kept = world.submit("kept", budget_ns=900 * MS)
    stream = world.writers[0].open(lambda *result: kept.cancel())
    assert world.lose(0) == 1
    assert stream.writer is world.writers[0]
    assert kept.done is None
    assert world.tables[1].deadline_ns[kept.slot, 0] < 0
