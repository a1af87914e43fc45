"""Rows found and begun slot by slot, as compiled, are those that NumPy finds and begins in a whole table."""

import itertools

import numpy as np
import pytest

from penstock.core.spec import Array, TensorSpec
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.serve.engine import scheduler
from penstock.serve.engine.engine import Engine
from penstock.serve.table import slots
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import SlotTable, TableLayout

NUMBERS = TensorSpec(dtype="float32", shape=(3,), meaning="numbers")
SLOTS, MS = 24, 1_000_000


class Recorder(Executor):
    """Records the rows of each step; some need another one."""

    def __init__(self, *, busy: bool) -> None:
        self.input, self.output, self.max_rows = NUMBERS, NUMBERS, SLOTS
        self._busy = busy
        self._chance = np.random.default_rng(3)
        self.steps: list[list[Array]] = []

    def step(self, batch: StepInput) -> StepOutput:
        assert batch.last_B is not None
        seen = (batch.slots_B, batch.chunk_B, batch.length_B, batch.fresh_B, batch.last_B)
        self.steps.append([each.copy() for each in seen])
        busy_B = self._chance.random(batch.slots_B.size) < 0.2 if self._busy else None
        return StepOutput(output_B=batch.chunk_B * 2, busy_B=busy_B)


def put_in(table: SlotTable, rng: np.random.Generator, now_ns: int) -> None:
    """Put chunks into some slots with room, and take the results out."""
    room = table.submitted - table.consumed + table.busy < table.chunks
    for slot in np.flatnonzero(room & (rng.random(SLOTS) < 0.6)):
        entry = slot, table.submitted[slot] % table.chunks
        table.generation[slot] += rng.random() < 0.3
        table.input[entry] = rng.normal(size=3)
        table.length[entry] = rng.integers(1, 4)
        table.flags[entry] = rng.choice([0, slots.FIRST, slots.LAST, slots.FIRST | slots.LAST, slots.RESETS])
        table.deadline_ns[entry] = now_ns + rng.integers(0, 50 * MS)
        table.submitted[slot] += 1
    table.taken[:] = np.where(rng.random(SLOTS) < 0.8, table.produced, table.taken)


def run(monkeypatch: pytest.MonkeyPatch, chunks: int, *, busy: bool, scanned: bool) -> tuple[Recorder, SlotTable]:
    monkeypatch.setattr(scheduler, "COMPILED", scanned)
    executor, rng = Recorder(busy=busy), np.random.default_rng(chunks)
    table = SlotTable.private(TableLayout(slots=SLOTS, chunks=chunks, input=NUMBERS, output=NUMBERS, frontends=2))
    costs = Costs([1, 8, 16], [5.0 * MS, 12.0 * MS, 20.0 * MS])
    clock = itertools.count(100 * MS, 1000)
    engine = Engine(executor, table, budget_ns=50 * MS, clock_ns=lambda: next(clock), costs=costs)
    for turn in range(60):
        now_ns = 100 * MS + turn * MS
        put_in(table, rng, now_ns)
        engine.tick(now_ns)
        engine.backlog(now_ns)
        engine.hold_ns(now_ns)
    return executor, table


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("chunks", [1, 4])
def test_rows_are_found_and_begun_as_by_numpy(monkeypatch: pytest.MonkeyPatch, chunks: int, busy: bool) -> None:
    (one, table), (other, scanned) = (
        run(monkeypatch, chunks, busy=busy, scanned=compiled) for compiled in (False, True)
    )
    assert len(one.steps) == len(other.steps) > 20
    for step, again in zip(one.steps, other.steps, strict=True):
        for mine, theirs in zip(step, again, strict=True):
            np.testing.assert_array_equal(mine, theirs)
            assert mine.dtype == theirs.dtype
    for column in table.layout.columns():
        np.testing.assert_array_equal(getattr(table, column.name), getattr(scanned, column.name), column.name)
    assert table.outcomes[[slots.OK, slots.EXPIRED]].all()
    assert {bool(fresh) for step in one.steps for fresh in step[3]} == {True, False}


def test_a_scan_finds_a_full_ring_and_an_empty_table() -> None:
    table = SlotTable.private(TableLayout(slots=SLOTS, chunks=2, input=NUMBERS, output=NUMBERS))
    columns = scheduler.Columns.of(table)._replace(scan=scheduler.SlotScan(table))
    assert scheduler.ready_slots(columns).size == 0
    table.submitted[:3] = 1
    # The second has no room for its result.
    table.produced[1] = 2
    table.deadline_ns[:3, 0] = 30, 10, 20
    assert scheduler.ready_slots(columns).tolist() == [0, 2]
    assert scheduler.most_urgent(columns, 5) == (2, 15)
