"""An engine that begins the next batch while one runs on a device, which takes two milliseconds for each."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import Overloaded
from penstock.core.spec import Array
from penstock.runtime.executor import StepInput, StepOutput
from penstock.serve.engine.engine import OVERLAPPED_NS
from penstock.serve.engine.multiplex import Multiplexer
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import EXPIRED, FAILED, NOT_FINITE, OK
from tests.property.test_engine import MS, Clock, Server
from tests.support.toys import Doubler

BATCH_NS = 2 * MS


@dataclass(frozen=True)
class OnDevice:
    """A batch on the device."""

    begun_ns: int
    end_ns: int
    chunks: list[float]
    result: StepOutput


@final
@dataclass
class Device(Doubler):
    """`Doubler` on a device of its own, beside the host; it runs one batch after the other."""

    overlaps = True
    clock: Clock = field(default_factory=Clock)
    took_ns: int = BATCH_NS
    polled: Callable[[], object] = lambda: None
    batches_begun: list[OnDevice] = field(default_factory=list[OnDevice])
    most: int = 0
    _free_ns: int = 0
    _under_way: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def begin(self, batch: StepInput) -> Any:
        read: Array = batch.chunk_B.copy()
        result = super().begin(StepInput(**{**_columns(batch), "chunk_B": read}))
        now_ns = self.clock()
        self._free_ns = max(now_ns, self._free_ns) + self.took_ns
        made = OnDevice(now_ns, self._free_ns, read[:, 0].tolist(), result)
        self.batches_begun.append(made)
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        return made

    def done(self, begun: Any) -> bool:
        self.polled()
        self.clock.ns += MS // 10
        return not isinstance(begun, OnDevice) or self.clock.ns >= begun.end_ns

    def finish(self, begun: Any) -> StepOutput:
        if not isinstance(begun, OnDevice):
            return super().finish(begun)
        self._under_way -= 1
        self.clock.ns = max(self.clock.ns, begun.end_ns)
        return begun.result


def _columns(batch: StepInput) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in batch.__dataclass_fields__}


def serving(took_ns: int = BATCH_NS, slots: int = 8) -> tuple[Server, Device]:
    device = Device(took_ns=took_ns)
    costs = Costs([1, slots], [float(took_ns), float(took_ns)])
    server = Server(device, slots=slots, curve=costs)
    device.clock = server.clock
    return server, device


@given(st.lists(st.integers(0, 20), max_size=60), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_everyone_gets_the_answer_to_their_own_question_once(values: list[int], seed: int) -> None:
    logging.disable(logging.CRITICAL)
    server, device = serving()
    rng = np.random.default_rng(seed)
    refused = set()
    asked = iter(enumerate(values))

    def ask() -> None:
        if rng.random() < 0.2 and (each := next(asked, None)) is not None:
            try:
                server.ask(each[0], each[1])
            except Overloaded:
                refused.add(each[0])

    device.polled = ask
    while (each := next(asked, None)) is not None:
        try:
            server.ask(each[0], each[1])
        except Overloaded:
            refused.add(each[0])
        if rng.random() < 0.4:
            server.tick()
    server.drain()
    logging.disable(logging.NOTSET)
    for key, value in enumerate(values):
        if key in refused:
            assert key not in server.answers
            continue
        ((status, output, _),) = server.answers[key]
        assert status in ({13: FAILED, 17: NOT_FINITE}.get(value, OK), EXPIRED)
        if status == OK:
            assert output == [2.0 * value] * 2
    assert server.frontend.in_use == 0
    assert device.most <= 2


def test_a_request_that_comes_while_a_batch_runs_is_begun_before_its_end() -> None:
    server, device = serving()
    server.ask(0, 100)

    def ask_late() -> None:
        # Within the last half of the first batch.
        (first,) = device.batches_begun
        if len(server.answers) == 0 and device.clock.ns > first.begun_ns + 1.2 * MS:
            device.polled = lambda: None
            server.ask(1, 101)

    device.polled = ask_late
    server.tick()
    first, second = device.batches_begun
    assert (first.chunks, second.chunks) == ([100.0], [101.0])
    assert first.begun_ns + MS < second.begun_ns < first.end_ns
    assert second.end_ns == first.end_ns + BATCH_NS
    assert [*server.answers] == [0]
    assert server.engine.running
    server.tick()
    assert server.answers[1] == [(OK, [202.0] * 2, True)]
    assert not server.engine.running


def test_time_of_a_batch_counts_from_the_end_of_the_one_before() -> None:
    server, device = serving()
    for key in range(40):
        server.ask(key, 100)
        server.tick()
    server.drain()
    assert len(device.batches_begun) > 10
    assert server.engine.costs.of(1) == pytest.approx(BATCH_NS, rel=0.2)  # type: ignore[union-attr]


def test_nothing_is_begun_ahead_while_other_tables_wait_or_for_short_batches() -> None:
    server, device = serving()
    server.engine.others_wait = lambda: True
    brief, other = serving(OVERLAPPED_NS // 2)
    for each, executor in ((server, device), (brief, other)):
        each.ask(0, 100)
        executor.polled = lambda: pytest.fail("it waited")
        each.tick()
        assert not each.engine.running
        assert each.answers[0] == [(OK, [200.0] * 2, True)]


def test_a_batch_ahead_is_finished_before_another_table_has_its_turn() -> None:
    server, device = serving()
    other, _ = serving()
    multiplexer = Multiplexer(server.clock)
    multiplexer.add(0, server.engine)
    server.ask(0, 100)
    asked = iter([1])
    device.polled = lambda: [server.ask(key, 101) for key in asked]
    assert multiplexer.tick() is not None
    assert server.engine.running
    # Its rows are more urgent.
    multiplexer.add(1, other.engine)
    other.ask(0, 102, budget_ns=5 * MS)
    ran = multiplexer.tick()
    assert ran is not None
    assert ran[0] == 0
    assert not server.engine.running
    ran = multiplexer.tick()
    assert ran is not None
    assert ran[0] == 1


def test_a_running_batch_may_be_larger_than_the_largest_that_is_worth_running_now() -> None:
    device = Device(took_ns=BATCH_NS)
    curve = Costs([1, 2, 4, 8], [BATCH_NS, BATCH_NS, BATCH_NS, 1.2 * BATCH_NS])
    server = Server(device, slots=16, curve=curve)
    device.clock = server.clock
    asked = iter(range(1, 9))
    device.polled = lambda: [server.ask(key, 100) for key in asked]
    server.ask(0, 100)
    server.tick()
    assert server.engine.running
    server.engine.improve(4, 0.1 * BATCH_NS)
    assert isinstance(server.engine.costs, Costs)
    assert server.engine.costs.largest == 4
    server.drain()
    assert all(server.answers[key] == [(OK, [200.0] * 2, True)] for key in range(9))


def test_a_row_is_not_late_by_a_prediction_on_a_device_that_is_idle() -> None:
    server, device = serving(20 * MS)
    device.took_ns = 2 * MS
    asked = iter([1])
    device.polled = lambda: [server.ask(key, 101, budget_ns=24 * MS) for key in asked]
    server.ask(0, 100)
    server.drain()
    assert server.answers[1] == [(OK, [202.0] * 2, True)]


def test_nothing_is_begun_ahead_where_rows_of_another_table_come_while_a_batch_runs() -> None:
    server, device = serving(20 * MS)
    other, _ = serving()
    multiplexer = Multiplexer(server.clock)
    multiplexer.add(0, server.engine)
    multiplexer.add(1, other.engine)
    asked = iter([1])

    def ask() -> None:
        for key in asked:
            server.ask(key, 101)
            other.ask(0, 102)

    device.polled = ask
    server.ask(0, 100)
    multiplexer.tick()
    server.frontend.collect()
    # Nothing was begun ahead, so that the more urgent table is next.
    assert server.answers.keys() == {0}
    assert not server.engine.running


def test_one_request_whose_result_cannot_be_used_fails_alone() -> None:
    server, device = serving()

    def finish(begun: Any) -> StepOutput:
        result = Device.finish(device, begun)
        if (result.output_B == 18).any():
            raise ValueError("a length that it may not give")
        return result

    device.finish = finish  # type: ignore[method-assign]
    for key in range(4):
        server.ask(key, 9 if key == 2 else 100)
    server.drain()
    assert {key: status for key, [(status, _, _)] in server.answers.items()} == {0: OK, 1: OK, 2: FAILED, 3: OK}
    assert server.frontend.in_use == 0
