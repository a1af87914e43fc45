"""The writer of one front-end: what it puts into the table, predicts, admits and hands out. A test plays the engine."""

from typing import Any

import numpy as np
import pytest

from penstock.core.errors import DeadlineImpossible, Overloaded
from penstock.core.spec import TensorSpec
from penstock.serve.engine.scheduler import Columns, schedule
from penstock.serve.frontend.balancer import RequestBalancer
from penstock.serve.frontend.rejections import REJECTION_NS
from penstock.serve.frontend.table_writer import NEVER_NS, OVERDUE_NS, SlotHandle, TableWriter
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import (
    CANCELLED_NS,
    ENGINE_LOST,
    EXPIRED,
    FIRST,
    LAST,
    LOW_PRIORITY,
    OFFERED,
    OK,
    REFUSED,
    SOFT_DEADLINE,
    SlotTable,
    TableLayout,
)
from tests.support.varying import SUMS, WORDS, linear_costs, words

MS = 1_000_000
BUDGET_NS = 50 * MS
NOW_NS = 1_000 * MS
CHUNK = np.zeros(3, np.float32)
POINT = TensorSpec(dtype="float32", shape=(3,), meaning="a point")
TOTALS = TensorSpec(dtype="float32", shape=(2,), meaning="two totals")
# A batch of up to 4 rows; each row costs 8 ms alone and 5 ms in a full batch.
COSTS = Costs([1, 2, 4], [8.0 * MS, 12.0 * MS, 20.0 * MS], min_compute_ns=3.0 * MS)

Result = tuple[int, list[float], bool]


class Table:
    """A table of two front-ends with six slots each, its writers, and an engine that a test moves by hand."""

    def __init__(self, chunks: int = 1, frontends: int = 2, margin_ns: int = 0) -> None:
        layout = TableLayout(slots=6 * frontends, chunks=chunks, input=POINT, output=TOTALS, frontends=frontends)
        self.columns = SlotTable.private(layout)
        COSTS.publish(self.columns)
        self.margin_ns = margin_ns
        self.woken = 0
        self.writers = [self.writer(index) for index in range(frontends)]
        self.results: list[Result] = []

    def writer(self, index: int) -> TableWriter:
        return TableWriter(self.columns, budget_ns=BUDGET_NS, wake=self._wake, index=index, margin_ns=self.margin_ns)

    def _wake(self) -> None:
        self.woken += 1

    def done(self, status: int, output: np.ndarray, last: bool) -> None:
        self.results.append((status, output.tolist(), last))

    def submit(self, value: float = 0.0, index: int = 0, **options: object) -> SlotHandle:
        chunk = np.full(3, value, np.float32)
        options = {"arrival_ns": NOW_NS, **options}
        return self.writers[index].submit(chunk, done=self.done, **options)  # pyright: ignore[reportArgumentType]

    def run(self, slot: int, output: tuple[float, ...] = (1.0, 2.0), status: int = OK) -> None:
        """Consume a slot's next chunk and produce a result."""
        table = self.columns
        entry = int(table.produced[slot]) % table.chunks
        table.output[slot, entry, : len(output)] = output
        table.output_length[slot, entry], table.status[slot, entry] = len(output), status
        table.produced[slot] += 1
        table.consumed[slot] += 1
        index = slot // 6
        table.done[index, table.done_count[index] % table.done.shape[1]] = slot
        table.done_count[index] += 1


def test_a_request_is_written_whole_and_wakes_the_engine() -> None:
    table = Table()
    handle = table.submit(7.0, low_priority=True, now_ns=NOW_NS + MS)
    columns, slot = table.columns, handle.slot
    assert columns.input[slot, 0].tolist() == [7.0, 7.0, 7.0]
    assert (columns.length[slot, 0], columns.flags[slot, 0]) == (3, FIRST | LAST | LOW_PRIORITY)
    assert (columns.arrival_ns[slot, 0], columns.deadline_ns[slot, 0]) == (NOW_NS, NOW_NS + BUDGET_NS)
    assert (columns.submitted[slot], columns.generation[slot], table.woken) == (1, 1, 1)
    assert (columns.counts[0, OFFERED], columns.held[0, :2].tolist(), columns.held[1, :2].tolist()) == (
        1,
        [0, 1],
        [0, 0],
    )
    assert columns.flags[table.submit().slot, 0] == FIRST | LAST
    assert table.woken == 2


def test_a_front_end_has_slots_of_its_own() -> None:
    table = Table()
    assert [writer.next_slot for writer in table.writers] == [0, 6]
    slots = [table.submit(index=index).slot for index in (0, 1, 0, 1)]
    assert slots == [0, 6, 1, 7]
    assert [writer.in_use for writer in table.writers] == [2, 2]
    for _ in range(4):
        table.writers[1].open(table.done)
    assert table.writers[1].next_slot is None
    with pytest.raises(Overloaded, match=r"All 6 slots are in use"):
        table.writers[1].open(table.done)
    assert table.writers[0].next_slot == 2


def test_a_result_is_handed_out_once_and_the_slot_comes_back() -> None:
    table = Table()
    writer = table.writers[0]
    handles = [table.submit(), table.submit()]
    table.run(handles[1].slot, (3.0,))
    assert writer.collect() == 1
    assert table.results == [(OK, [3.0], True)]
    assert (writer.collect(), len(table.results), writer.in_use) == (0, 1, 1)
    table.run(handles[0].slot, status=ENGINE_LOST)
    assert writer.collect() == 1
    assert table.results[1:] == [(ENGINE_LOST, [1.0, 2.0], True)]
    assert (writer.in_use, table.columns.held[0, :2].tolist(), table.columns.taken[:2].tolist()) == (0, [0, 0], [1, 1])


def test_a_stream_has_as_many_chunks_as_its_ring_and_only_its_last_result_is_the_last() -> None:
    table = Table(chunks=2)
    writer = table.writers[0]
    handle = writer.open(table.done)
    slot = handle.slot

    def push(value: float, flags: int = SOFT_DEADLINE, **options: int) -> bool:
        chunk = np.full(options.get("length", 3), value, np.float32)
        return writer.push(handle, chunk, deadline_ns=9, arrival_ns=8, flags=flags, **options)

    assert (writer.room(handle), push(1.0), writer.room(handle), push(2.0), writer.room(handle)) == (
        2,
        True,
        1,
        True,
        0,
    )
    assert not push(3.0)
    assert table.columns.input[slot].tolist() == [[1.0] * 3, [2.0] * 3]
    assert table.columns.deadline_ns[slot].tolist() == [9, 9]
    assert table.columns.arrival_ns[slot].tolist() == [8, 8]
    # A row that computes takes its place in the ring until its result is there.
    table.columns.busy[slot] = 1
    table.columns.consumed[slot] += 1
    assert (writer.room(handle), push(3.0)) == (0, False)
    table.columns.busy[slot] = 0
    table.columns.consumed[slot] -= 1
    table.run(slot)
    writer.collect()
    assert (table.results, writer.in_use) == ([(OK, [1.0, 2.0], False)], 1)
    assert push(3.0, LAST, length=2)
    assert (table.columns.input[slot, 0, :2].tolist(), table.columns.length[slot].tolist()) == ([3.0, 3.0], [2, 3])
    table.run(slot)
    writer.collect()
    table.run(slot, (5.0,))
    writer.collect()
    assert [last for *_, last in table.results] == [False, False, True]
    assert table.results[-1] == (OK, [5.0], True)
    assert (writer.in_use, writer.next_slot) == (0, slot)


def filled(table: Table) -> SlotHandle:
    """A stream of three chunks in a ring of two: no result is taken, and the engine leaves its last chunk out."""
    writer = table.writers[0]
    handle = writer.open(table.done)
    for _ in range(2):
        assert writer.push(handle, CHUNK, deadline_ns=0, arrival_ns=0)
        table.run(handle.slot)
    assert writer.push(handle, CHUNK, deadline_ns=0, arrival_ns=0)
    assert not schedule(Columns.of(table.columns), NOW_NS, COSTS).run.size
    table.woken = 0
    return handle


def test_the_engine_is_woken_when_a_full_ring_of_results_has_room() -> None:
    table = Table(chunks=2)
    filled(table)
    assert table.writers[0].collect() == 2
    assert schedule(Columns.of(table.columns), NOW_NS, COSTS).run.size
    assert table.woken == 1


def test_the_engine_is_woken_when_a_full_ring_of_a_group_has_room() -> None:
    table = Table(chunks=2)
    groups = table.writers[0].groups
    groups.join(filled(table).slot, groups.add(lambda slots_B, _: np.ones(slots_B.size, np.bool_)))
    assert table.writers[0].collect() == 2
    assert schedule(Columns.of(table.columns), NOW_NS, COSTS).run.size
    assert table.woken == 1


def test_results_that_leave_no_row_out_wake_nobody() -> None:
    table = Table(chunks=2)
    handle = table.writers[0].open(table.done)
    for _ in range(3):
        assert table.writers[0].push(handle, CHUNK, deadline_ns=0, arrival_ns=0)
        table.run(handle.slot)
        table.woken = 0
        assert table.writers[0].collect() == 1
    request = table.submit(index=1)
    table.run(request.slot)
    table.woken = 0
    assert table.writers[1].collect() == 1
    assert table.woken == 0


def test_two_results_of_a_stream_in_one_turn_end_it_with_the_second() -> None:
    table = Table(chunks=2)
    writer = table.writers[0]
    handle = writer.open(table.done)
    for flags in (FIRST, LAST):
        assert writer.push(handle, np.zeros(3, np.float32), deadline_ns=0, arrival_ns=0, flags=flags)
    table.run(handle.slot, (1.0,))
    table.run(handle.slot, (2.0,))
    assert writer.collect() == 2
    assert table.results == [(OK, [1.0], False), (OK, [2.0], True)]


def test_a_row_that_stays_busy_has_not_given_its_last_result() -> None:
    table = Table(chunks=2)
    writer = table.writers[0]
    handle = table.submit()
    table.columns.busy[handle.slot] = 1
    table.run(handle.slot)
    writer.collect()
    assert (table.results, writer.in_use) == ([(OK, [1.0, 2.0], False)], 1)


def test_a_callback_may_cancel_its_own_stream() -> None:
    table = Table(chunks=2)
    writer = table.writers[0]
    handle = writer.open(lambda *_: writer.cancel(handle))
    writer.push(handle, np.zeros(3, np.float32), deadline_ns=0, arrival_ns=0, flags=FIRST)
    table.run(handle.slot)
    writer.collect()
    assert (writer.in_use, writer.next_slot) == (0, handle.slot)


def test_a_cancelled_request_gives_its_slot_back_with_its_result_and_says_nothing() -> None:
    table = Table()
    writer = table.writers[0]
    handle = table.submit()
    woken = table.woken
    writer.cancel(handle)
    assert (writer.in_use, table.woken, table.columns.deadline_ns[handle.slot, 0]) == (1, woken + 1, CANCELLED_NS)
    table.run(handle.slot)
    writer.collect()
    assert (writer.in_use, table.results) == (0, [])
    # Its slot is another's now.
    other = table.submit()
    assert other.slot == handle.slot
    writer.cancel(handle)
    assert table.columns.deadline_ns[other.slot, 0] == NOW_NS + BUDGET_NS


def test_a_cancelled_stream_without_chunks_gives_its_slot_back_at_once() -> None:
    table = Table(chunks=2)
    handle = table.writers[0].open(table.done)
    table.writers[0].cancel(handle)
    assert table.writers[0].in_use == 0


def test_requests_long_past_their_deadline_are_answered_without_the_engine() -> None:
    table = Table()
    writer = table.writers[0]
    waits, has_result, gone, later = (table.submit() for _ in range(4))
    table.columns.deadline_ns[later.slot, 0] += 1
    writer.cancel(gone)
    table.run(has_result.slot)
    over_ns = NOW_NS + BUDGET_NS + OVERDUE_NS
    assert writer.expire_overdue(over_ns) == 0
    assert writer.expire_overdue(over_ns + 1) == 1
    assert table.results == [(EXPIRED, [], True)]
    assert writer.expire_overdue(over_ns + 1) == 0
    # The result that was there is handed out; the slot comes back once the engine has let go of the row.
    writer.collect()
    assert table.results[1:] == [(OK, [1.0, 2.0], True)]
    assert writer.in_use == 3
    for handle in (waits, gone):
        table.run(handle.slot)
    writer.collect()
    assert (writer.in_use, len(table.results)) == (1, 2)


def test_an_engine_that_does_not_answer_gets_no_more_until_it_does() -> None:
    table = Table(frontends=1)
    writer = table.writers[0]
    waits = table.submit()
    assert writer.expire_overdue(NOW_NS + BUDGET_NS + OVERDUE_NS + 1) == 1
    chunk = np.zeros(3, np.float32)
    with pytest.raises(Overloaded, match="The engine does not answer"):
        table.submit()
    refused = writer.try_submit(chunk, table.done, NOW_NS, NOW_NS, BUDGET_NS, False)
    assert isinstance(refused, Overloaded)
    assert (str(refused), refused.retry_after_s) == ("The engine does not answer; come back later.", 1.0)
    assert writer.predict(1, BUDGET_NS, False) == (NEVER_NS, 1)
    # The costs are read anew all the time.
    writer.refresh()
    assert isinstance(writer.try_submit(chunk, table.done, NOW_NS, NOW_NS, BUDGET_NS, False), Overloaded)
    table.run(waits.slot)
    writer.collect()
    assert isinstance(writer.try_submit(chunk, table.done, NOW_NS, NOW_NS, BUDGET_NS, False), SlotHandle)
    assert writer.predict(1, BUDGET_NS, False)[0] < NEVER_NS


def test_a_long_budget_is_overdue_after_four_of_them() -> None:
    table = Table()
    budget_ns = OVERDUE_NS
    writer = TableWriter(table.columns, budget_ns=budget_ns, wake=lambda: None)
    writer.submit(np.zeros(3, np.float32), done=table.done, arrival_ns=NOW_NS)
    assert writer.expire_overdue(NOW_NS + 5 * budget_ns) == 0
    assert writer.expire_overdue(NOW_NS + 5 * budget_ns + 1) == 1


def test_live_streams_wait_for_their_engine() -> None:
    table = Table(chunks=2)
    writer = table.writers[0]
    writer.push(writer.open(table.done), np.zeros(3, np.float32), deadline_ns=NOW_NS, arrival_ns=NOW_NS)
    assert writer.expire_overdue(NOW_NS + 100 * OVERDUE_NS) == 0


def test_all_are_told_that_the_engine_is_lost() -> None:
    table = Table()
    table.submit()
    table.writers[0].cancel(table.submit())
    table.writers[0].fail(ENGINE_LOST)
    assert table.results == [(ENGINE_LOST, [], True)]
    table.writers[0].fail(ENGINE_LOST)
    assert len(table.results) == 1


def test_a_new_process_takes_over_what_its_predecessor_held() -> None:
    table = Table(chunks=2)
    running, produced, idle = table.submit(1.0), table.submit(2.0), table.submit(3.0)
    table.run(produced.slot)
    table.run(idle.slot)
    table.columns.busy[produced.slot] = 1
    writer = table.writers[0] = table.writer(0)
    # What ran to its end is free again; what may still run is held, cancelled, until it ends.
    assert (writer.in_use, table.columns.held[0, :2].tolist()) == (2, [2, 0])
    assert table.columns.deadline_ns[running.slot].tolist() == [CANCELLED_NS] * 2
    assert table.columns.deadline_ns[idle.slot, 0] == NOW_NS + BUDGET_NS
    table.run(running.slot)
    writer.collect()
    assert (writer.in_use, writer.next_slot, table.results) == (1, running.slot, [])
    table.columns.consumed[produced.slot] -= 1
    table.columns.busy[produced.slot] = 0
    table.run(produced.slot)
    writer.collect()
    assert (writer.in_use, table.results) == (0, [])


def test_rows_of_all_front_ends_wait_before_a_request_but_those_of_low_priority_only_before_their_own() -> None:
    table = Table()
    first, second = table.writers
    for low_priority in (False, False, True):
        table.submit(index=1, low_priority=low_priority)
    table.submit(index=0)
    assert first.predict(1, BUDGET_NS, low_priority=False)[1] == 3
    assert first.predict(1, BUDGET_NS, low_priority=True)[1] == 4
    assert second.predict(3, BUDGET_NS, low_priority=False)[1] == 5


def test_the_table_counts_the_slots_in_use_by_all_front_ends() -> None:
    table = Table()
    first, second = table.writers
    handles = [table.submit(index=1, low_priority=low_priority) for low_priority in (False, True)]
    table.submit(index=0)
    assert (table.columns.in_use, first.in_use, second.in_use) == (3, 1, 2)
    for handle in handles:
        table.run(handle.slot)
    # Until they are read.
    assert table.columns.in_use == 3
    second.collect()
    assert table.columns.in_use == 1


def test_a_finish_is_predicted_from_the_costs() -> None:
    table = Table()
    (writer, _) = table.writers
    # Alone: its own batch after one that may have begun.
    assert writer.predict(1, BUDGET_NS, low_priority=False) == (COSTS.finish_ns(0), 0)
    table.submit()
    assert writer.predict(2, BUDGET_NS, low_priority=False) == (COSTS.finish_ns(2), 2)
    assert writer.predict(5, BUDGET_NS, low_priority=False) == (COSTS.finish_ns(5), 5)
    # More rows than free slots, or a budget shorter than the network's own time: never.
    assert writer.predict(6, BUDGET_NS, low_priority=False)[0] == NEVER_NS
    assert writer.predict(1, 3 * MS - 1, low_priority=False)[0] == NEVER_NS
    assert writer.predict(1, 3 * MS, low_priority=False)[0] == COSTS.finish_ns(1)


def test_a_prediction_counts_reading_a_margin_and_the_other_tables() -> None:
    table = Table(frontends=1, margin_ns=MS)
    (writer,) = table.writers
    own_ns = COSTS.finish_ns(0)

    def predicted_ns() -> int:
        return writer.predict(1, BUDGET_NS, low_priority=False)[0] - MS

    assert predicted_ns() == own_ns
    writer.refresh(reading_share=0.2)
    assert predicted_ns() == pytest.approx(own_ns / 0.8, abs=2)
    # At most half of the time.
    writer.refresh(reading_share=0.9)
    assert predicted_ns() == pytest.approx(2 * own_ns, abs=2)
    writer.refresh()
    # The others' work that waits, at most as much as the own.
    table.columns.other_tables_ns[0] = MS
    assert predicted_ns() == own_ns + MS
    table.columns.other_tables_ns[0] = 900 * MS
    assert predicted_ns() == 2 * own_ns
    # Their share of the device lately, at most half.
    table.columns.other_tables_ns[0] = 0
    table.columns.other_tables_share[0] = 200
    assert predicted_ns() == own_ns + own_ns * 200 // 800
    table.columns.other_tables_share[0] = 900
    assert predicted_ns() == 2 * own_ns


def test_a_request_is_admitted_up_to_its_deadline_and_not_past_it() -> None:
    table = Table()
    table.submit()
    finish_ns = COSTS.finish_ns(1)
    assert table.submit(budget_ns=finish_ns).slot == 1
    with pytest.raises(Overloaded, match=r"The answer would come after \d+ ms, past the budget of 8 ms\.") as refused:
        table.submit(budget_ns=8 * MS)
    assert refused.value.retry_after_s == pytest.approx(COSTS.finish_ns(2) / 1e9)
    assert f"after {COSTS.finish_ns(2) / 1e6:.0f} ms" in str(refused.value)
    # What has passed of the budget is gone.
    after_ms = (COSTS.finish_ns(2) / 1e6) + 40
    with pytest.raises(Overloaded, match=f"after {after_ms:.0f} ms, 40 of them gone already, past the budget of"):
        table.submit(budget_ns=finish_ns + MS, now_ns=NOW_NS + 40 * MS)
    with pytest.raises(DeadlineImpossible, match=r"A budget of 2\.5 ms is shorter .* own time of 3\.00 ms"):
        table.submit(budget_ns=2_500_000)
    assert table.columns.counts[0, OFFERED] == 5


def test_an_idle_server_tries_whatever_it_predicts() -> None:
    table = Table()
    assert table.submit(budget_ns=3 * MS).slot == 0


def test_a_rejection_of_a_short_row_does_not_stand_for_a_long_one_that_is_admitted() -> None:
    table = SlotTable.private(TableLayout(slots=32, chunks=1, input=WORDS, output=SUMS))
    linear_costs(10.0 * MS, 10.0).publish(table)
    writer = TableWriter(table, budget_ns=24 * MS, wake=lambda: None)
    options: dict[str, Any] = {"done": lambda *_: None, "arrival_ns": NOW_NS}
    for _ in range(15):
        writer.submit(words(64), **options)
    # A long row completes the second batch of long ones; a short one runs after both.
    with pytest.raises(Overloaded):
        writer.submit(words(1), **options)
    assert writer.cached_rejection(NOW_NS, 24 * MS) is None
    balancer = RequestBalancer([writer], 24 * MS)
    assert balancer.cached_rejection(NOW_NS, 24 * MS) is None
    assert balancer._rejects(writer, 19 * MS)  # pyright: ignore[reportPrivateUsage]
    assert not balancer._rejects(writer, 24 * MS)  # pyright: ignore[reportPrivateUsage]
    assert writer.cached_rejection(NOW_NS, 19 * MS) is not None
    writer.submit(words(64), **options)


def test_a_rejection_stands_for_a_moment_for_those_with_no_more_time_left() -> None:
    table = Table()
    (writer, _) = table.writers
    for _ in range(6):
        writer.open(table.done)
    assert writer.cached_rejection(NOW_NS) is None
    with pytest.raises(Overloaded):
        table.submit()
    # Without a free slot nobody can be admitted, however much time is left.
    assert writer.refusing
    assert isinstance(writer.cached_rejection(NOW_NS, NEVER_NS - 1), Overloaded)
    assert writer.cached_rejection(NOW_NS + REJECTION_NS - 1) is not None
    assert writer.cached_rejection(NOW_NS + REJECTION_NS) is None
    writer.collect()
    assert (writer.refusing, writer.cached_rejection(NOW_NS)) == (False, None)


@pytest.mark.parametrize("options", [{"low_priority": True}, {"whole_request": False}, {"budget_ns": BUDGET_NS - 1}])
def test_a_rejection_that_is_not_everybodys_does_not_stand(options: dict[str, int]) -> None:
    table = Table()
    for _ in range(6):
        table.writers[0].open(table.done)
    with pytest.raises(Overloaded):
        table.submit(**options)
    assert not table.writers[0].refusing


def test_a_lasting_overload_leaves_time_for_the_sockets() -> None:
    table = Table(frontends=1)
    (writer,) = table.writers
    table.submit()

    def submit_late(now_ns: int) -> SlotHandle:
        """Submit a request of the default budget of which so much is left that it ends 5 ms before its deadline."""
        left_ns = writer.predict(1, BUDGET_NS, low_priority=False)[0] + 5 * MS
        assert left_ns < BUDGET_NS
        return table.submit(arrival_ns=now_ns + left_ns - BUDGET_NS, now_ns=now_ns)

    def reject(now_ns: int) -> None:
        with pytest.raises(Overloaded, match="would come after"):
            table.submit(arrival_ns=now_ns - BUDGET_NS, now_ns=now_ns)

    # A burst may fill the budget.
    reject(NOW_NS)
    writer.refresh(0.2, NOW_NS)
    submit_late(NOW_NS)
    for later_ms in range(0, 26, 5):
        reject(NOW_NS + later_ms * MS)
    now_ns = NOW_NS + 25 * MS
    writer.refresh(0.2, now_ns)
    with pytest.raises(Overloaded, match=r"Requests come faster than they are answered within the budget of 50 ms;"):
        submit_late(now_ns)
    # Not where sockets take no time of the engine, nor once a budget has passed without a rejection.
    writer.refresh(0.0, now_ns)
    submit_late(now_ns)
    later_ns = now_ns + BUDGET_NS + MS
    writer.refresh(0.2, later_ns)
    submit_late(later_ns)


@pytest.mark.parametrize(
    ("budget_ns", "low_priority"), [(BUDGET_NS, False), (BUDGET_NS, True), (BUDGET_NS // 2, False), (1, False)]
)
def test_a_try_gives_what_a_submission_raises(budget_ns: int, low_priority: bool) -> None:
    table, other = Table(frontends=1), Table(frontends=1)
    chunk = np.zeros(3, np.float32)
    terms: dict[str, Any] = {"budget_ns": budget_ns, "low_priority": low_priority}
    for left_ms in (50, 50, 50, 20, 50, 3, 50, 50, 50, 50):
        arrival_ns = NOW_NS - BUDGET_NS + left_ms * MS
        tried = table.writers[0].try_submit(chunk, table.done, arrival_ns, NOW_NS, **terms)
        if isinstance(tried, SlotHandle):
            assert tried.slot == other.submit(arrival_ns=arrival_ns, now_ns=NOW_NS, **terms).slot
            continue
        assert tried is not None
        with pytest.raises(type(tried)) as refused:
            other.submit(arrival_ns=arrival_ns, now_ns=NOW_NS, **terms)
        assert vars(tried) | {"text": str(tried)} == vars(refused.value) | {"text": str(refused.value)}
        other.columns.counts[0, REFUSED] += 1  # as whoever takes the exception does
    for name in ("counts", "submitted", "deadline_ns", "arrival_ns", "flags", "held"):
        assert (getattr(table.columns, name) == getattr(other.columns, name)).all(), name
    assert table.columns.counts[0, REFUSED] > 1
