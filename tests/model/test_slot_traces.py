"""The slot table's own code against the model: every store and every read of a real front-end and a real engine.

The arrays of the engine's columns call back after each store, and there, in the middle of a publication, the front-end
puts in, cancels, collects, answers for an engine that hangs, or is replaced by its next process. The model takes the
same steps and must have the same counters, the same free slots and the same answers. Input and output rows of slots
that hold nothing are poisoned.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.serve.frontend.table_writer import SlotHandle, TableWriter
from penstock.serve.table.slots import EXPIRED, FIRST, LAST, OK, SOFT_DEADLINE, SlotTable
from tests.model import slot_protocol as model
from tests.model.slot_state import Rules, State
from tests.property.test_engine import BUDGET_NS, MS, Server
from tests.support.thorough import thorough
from tests.support.toys import Countdown, RunningSum

POISON = -7.5e8
# A deadline that no engine finds passed, and a time at which a front-end gives the request up.
FAR_NS, FARTHER_NS = 1 << 50, 1 << 51
STORES = ("produced", "busy", "consumed", "done", "done_count")


class Watched(np.ndarray[Any, Any]):
    """A column that calls back after each store into it."""

    stored: "Callable[[], object] | None" = None

    def __array_finalize__(self, other: Any) -> None:
        self.stored = getattr(other, "stored", None)

    def __setitem__(self, at: Any, value: Any) -> None:
        super().__setitem__(at, value)
        if self.stored is not None and self.base is not None:
            self.stored()


class Traced:
    """A real server and the model, side by side.

    Args:
        rules: The sizes.
        executor: The network, on as many slots.
        seed: Of what happens.
    """

    def __init__(self, rules: Rules, executor: Any, seed: int) -> None:
        self.rules, self.state = rules, State(rules)
        self.server = Server(executor, slots=rules.slots, chunks=rules.chunks)
        self.rng = np.random.default_rng(seed)
        self.handles: dict[int, tuple[SlotHandle, list[float]]] = {}
        self.ended: dict[int, bool] = {}
        self.answers: dict[int, list[float]] = {}
        self.sent: dict[int, list[float]] = {}
        self.taken_over = self.inside = self.given_up = 0
        self.draining = False
        table = self.table = self.server.table
        table.input[:] = table.output[:] = POISON
        for name in STORES:
            column = getattr(table, name).view(Watched)
            column.stored = lambda name=name: self._stored(name)
            setattr(table, name, column)
        self._results = self.server.engine._results
        self._publish = self._results._publish
        self._results._publish = self._published  # type: ignore[method-assign]
        if self._results._rows is not None:
            self._results._rows = TracedRows(self._results._rows, self)  # type: ignore[assignment]
        self._rows: list[int] = []

    def begin(self, rows_B: Any, busy_B: Any) -> None:
        """The engine begins to publish: its outputs are there, and no counter is."""
        assert self.state.engine == ()
        self._rows = rows_B.tolist()
        put = self.table.produced[rows_B] % self.rules.chunks
        rows: list[tuple[int, str, int]] = []
        for row, at, busy in zip(self._rows, put, np.broadcast_to(busy_B, len(rows_B)).tolist(), strict=True):
            assert model.ready(self.rules, self.state, row)
            rows.append((row, "expire" if self.table.status[row, at] == EXPIRED else "run", int(busy)))
        model.begin(self.rules, self.state, rows)
        self._engine_steps("output")

    def _published(self, rows_B: Any, took_B: Any, busy_B: Any) -> None:
        self.begin(rows_B, busy_B)
        self._publish(rows_B, took_B, busy_B)
        assert self.state.engine == ()

    def _stored(self, name: str) -> None:
        self._engine_steps({"done": "ring", "done_count": "visible"}.get(name, name))
        self.compare()
        if not self.draining and self.rng.random() < 0.3:
            self.inside += 1
            self.frontend_action()

    def _engine_steps(self, name: str) -> None:
        for row in self._rows[: 1 if name == "visible" else None]:
            step = self.state.engine[0]
            assert step[0] == name, (name, self.state.engine)
            assert name == "visible" or step[1] == row
            self.state = model.engine_step(self.rules, self.state)

    def frontend_steps(self) -> None:
        while self.state.frontend:
            self.state = model.frontend_step(self.rules, self.state)

    def compare(self) -> None:
        state, table, frontend = self.state, self.table, self.server.frontend
        for name, column in (
            ("submitted", table.submitted),
            ("taken", table.taken),
            ("consumed", table.consumed),
            ("produced", table.produced),
            ("busy", table.busy),
            ("gen", table.generation),
        ):
            assert getattr(state, name) == column.tolist(), name
        assert state.count == table.done_count[0]
        assert state.visible == table.done_count[0] - frontend._read
        assert state.free == frontend._free
        assert state.settling == (frontend._released is not frontend._free)
        assert state.held_back == (frontend._released if state.settling else [])
        assert {key: state.streams[key][2] for key in self.ended} == self.ended

    def frontend_action(self) -> None:
        action = self.rng.random()
        if action < 0.25 and self.server.frontend._free:
            self.open()
        elif action < 0.5 and self.handles:
            self.push(int(self.rng.choice(list(self.handles))))
        elif action < 0.6 and self.handles:
            self.cancel(int(self.rng.choice(list(self.handles))))
        elif action < 0.65:
            self.replace_frontend()
        elif action < 0.8:
            self.server.frontend.expire_overdue(self.server.clock() + FARTHER_NS)
        else:
            self.collect()
        self.compare()

    def open(self) -> None:
        key = len(self.state.streams)

        def done(status: int, output: np.ndarray, last: bool) -> None:
            if status == EXPIRED:
                self.given_up += 1
                self.ended[key] = last
                model.cancel(self.rules, self.state, self.handles.pop(key)[0].slot)
                self.frontend_steps()
                return
            assert status == OK
            assert POISON not in output
            self.answers[key].append(float(output[0]))
            self.ended[key] = last

        handle = self.server.frontend.open(done)
        self.handles[key] = (handle, [])
        self.answers[key], self.sent[key], self.ended[key] = [], self.handles[key][1], False
        assert model.open_stream(self.rules, self.state, ended=False) == handle.slot
        self.frontend_steps()

    def push(self, key: int) -> None:
        handle, values = self.handles[key]
        has_room = self.server.frontend.room(handle) > 0
        assert has_room == model.room(self.rules, self.state, handle.slot)
        if handle.ended or not has_room:
            return
        value, last = float(self.rng.integers(0, 3)), self.rng.random() < 0.4
        now_ns, patient = self.server.clock(), self.rng.random() < 0.5
        flags = (SOFT_DEADLINE if patient else 0) | (0 if values else FIRST) | (LAST if last else 0)
        values.append(value)
        chunk = np.array([value, 7], np.float32)
        deadline_ns = now_ns + (MS if patient else FAR_NS)
        self.server.frontend.push(handle, chunk, deadline_ns=deadline_ns, arrival_ns=now_ns, flags=flags)
        model.push(self.rules, self.state, handle.slot, last=last)
        self.frontend_steps()

    def cancel(self, key: int) -> None:
        handle, _ = self.handles.pop(key)
        held = self.server.frontend._handles[handle.slot] is handle
        self.server.frontend.cancel(handle)
        if held:
            self.ended[key] = True
            model.cancel(self.rules, self.state, handle.slot)
            self.frontend_steps()

    def collect(self) -> None:
        self.server.frontend.collect()
        self.state.frontend = model._collect(self.state)
        self.frontend_steps()
        self._poison_free_slots()

    def replace_frontend(self) -> None:
        self.taken_over += 1
        self.handles.clear()
        self.ended.clear()
        self.server.frontend = TableWriter(self.table, budget_ns=BUDGET_NS, wake=lambda: None)
        self.state.budget[model.FRONTEND_KILLS] = 1
        self.state = model.restarted_frontend(self.rules, model._killed_frontend(self.state))
        self.frontend_steps()

    def _poison_free_slots(self) -> None:
        if not self.state.engine:
            self.table.input[self.server.frontend._free] = POISON
            self.table.output[self.server.frontend._free] = POISON

    def tick(self) -> None:
        self.server.engine.tick(self.server.clock())

    def drain(self) -> None:
        self.draining = True
        for key in list(self.handles):
            if not self.handles[key][0].ended:
                self.cancel(key)
        # A busy row takes a few steps, each after its result was taken.
        for _ in range(12 * self.rules.slots * self.rules.chunks):
            self.tick()
            self.collect()
            self.compare()
        assert sorted(self.state.free) == list(range(self.rules.slots))
        model.check_end(self.rules, self.state)


class TracedRows:
    """The compiled writer of results, whose stores no column reports."""

    def __init__(self, rows: Any, traced: Traced) -> None:
        self.write, self.check_finite, self._rows, self._traced = rows.write, rows.check_finite, rows, traced

    def produce(self, rows_B: Any, consumed_B: Any) -> None:
        """Count results, of a network whose rows are never busy."""
        self._traced.begin(rows_B, 0)
        self._rows.produce(rows_B, consumed_B)
        self._traced._stored("produced")
        self._traced._stored("busy")

    def list_done(self, rows_B: Any) -> int:
        """List the slots; the caller publishes their number."""
        count = self._rows.list_done(rows_B)
        self._traced._stored("done")
        return count


@pytest.mark.parametrize(("slots", "chunks"), [(1, 1), thorough(2, 1), thorough(1, 2), (2, 2)])
@pytest.mark.parametrize("kind", [RunningSum, Countdown])
def test_the_real_table_takes_the_steps_of_the_model(kind: Any, slots: int, chunks: int) -> None:
    taken_over = inside = answered = given_up = 0
    for seed in range(40):
        traced = Traced(Rules(slots=slots, chunks=chunks), kind(slots), seed)
        for _ in range(60):
            if traced.rng.random() < 0.4:
                traced.tick()
            else:
                traced.frontend_action()
        traced.drain()
        taken_over, inside = taken_over + traced.taken_over, inside + traced.inside
        given_up += traced.given_up
        if kind is RunningSum:
            for key, answers in traced.answers.items():
                assert answers == np.cumsum(traced.sent[key]).tolist()[: len(answers)]
                answered += len(answers)
    assert taken_over > 10
    assert inside > 50
    assert kind is Countdown or answered > 10
    assert (given_up > 0) == (chunks == 1)


def test_a_result_for_a_killed_front_end_is_never_read_as_one_of_the_next_stream() -> None:
    """A front-end dies while its result is published; the next one opens a stream on that slot as soon as it can."""
    server = Server(RunningSum(1), slots=1)
    table: SlotTable = server.table
    server.ask(0, 1)
    for name in ("consumed", "produced"):
        setattr(table, name, getattr(table, name).view(Watched))
    consumed, produced = table.consumed, table.produced
    assert isinstance(consumed, Watched)
    assert isinstance(produced, Watched)

    def ask() -> None:
        if not server.answers and server.frontend.next_slot is not None:
            server.ask(1, 5)

    def replace() -> None:
        # The slot is idle, and the entry of its result is not in the ring yet.
        consumed.stored = None
        server.frontend = TableWriter(table, budget_ns=BUDGET_NS, wake=lambda: None)
        ask()

    consumed.stored = replace
    server.engine.tick(server.clock())
    # The entry is read while the next result of the slot is being published.
    produced.stored = lambda: bool(server.frontend.collect())
    if not server.frontend.in_use or server.frontend._released is not server.frontend._free:
        server.frontend.collect()
        ask()
    server.drain()
    assert server.answers == {1: [(OK, [5.0, 5.0], True)]}
    assert server.frontend.in_use == 0
