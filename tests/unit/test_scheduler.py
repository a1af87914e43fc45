"""The scheduler's decisions at their borders, in numbers."""

import numpy as np
import pytest

from penstock.core.spec import TensorSpec
from penstock.serve.engine.scheduler import BatchSchedule, Columns, ready_slots, schedule, urgency
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import CANCELLED_NS, LOW_PRIORITY, SOFT_DEADLINE, SlotTable, TableLayout

NOW_NS = 10_000_000_000
CURVE = Costs([1, 4, 8], [100.0, 200.0, 400.0], min_compute_ns=80.0)


def table_of(slack_ns: list[int], flags: list[int] | None = None) -> Columns:
    count = len(slack_ns)
    zeros = np.zeros(count, np.int64)
    deadlines = NOW_NS + np.array(slack_ns, np.int64).reshape(count, 1)
    flagged = np.array(flags or [0] * count, np.int64).reshape(count, 1)
    return Columns(zeros + 1, zeros, zeros, zeros, zeros, deadlines, flagged)


def decide(
    slack_ns: list[int], flags: list[int] | None = None, costs: Costs = CURVE
) -> tuple[list[int], list[int], int]:
    chosen = schedule(table_of(slack_ns, flags), NOW_NS, costs)
    return sorted(chosen.run.tolist()), sorted(chosen.expire.tolist()), chosen.waiting


def test_nothing_is_ready() -> None:
    zeros = np.zeros(3, np.int64)
    columns = Columns(zeros, zeros, zeros, zeros, zeros, zeros.reshape(3, 1), zeros.reshape(3, 1))
    chosen = schedule(columns, NOW_NS, CURVE)
    assert (chosen.run.size, chosen.expire.size, chosen.waiting) == (0, 0, 0)
    assert urgency(columns, NOW_NS, CURVE) == (0, 0)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_slot_with_a_full_ring_of_results_is_not_ready(chunks: int) -> None:
    outstanding = np.arange(chunks + 1)
    taken, busy = outstanding * 0 + 5, outstanding * 0
    produced = taken + outstanding
    zeros = np.zeros((chunks + 1, chunks), np.int64)
    columns = Columns(produced + 1, taken, produced, produced, busy, deadline_ns=zeros, flags=zeros)
    assert ready_slots(columns).tolist() == list(range(chunks))


def test_the_columns_are_views_of_the_table() -> None:
    point = TensorSpec(dtype="float32", shape=(2,), meaning="a point")
    table = SlotTable.private(TableLayout(slots=4, chunks=2, input=point, output=point))
    columns = Columns.of(table)
    table.submitted[1] = 1
    assert ready_slots(columns).tolist() == [1]


def test_a_row_exactly_in_time_runs() -> None:
    assert decide([200] * 4) == ([0, 1, 2, 3], [], 0)
    assert decide([400] * 8) == (list(range(8)), [], 0)


def test_urgency_is_the_time_after_which_the_tightest_row_is_late() -> None:
    assert urgency(table_of([900, 500, 700, 800]), NOW_NS, CURVE) == (4, 300)
    # The next batch holds the largest size at most.
    assert urgency(table_of([1000] * 20), NOW_NS, CURVE) == (20, 600)


def test_the_entry_of_a_busy_row_is_the_chunk_before_the_next() -> None:
    deadlines = NOW_NS + np.array([[1000, 50, 1000]])
    consumed, one = np.array([2]), np.array([1])
    columns = Columns(consumed + 1, one * 0, consumed, one * 0, one, deadlines, np.zeros((1, 3), np.int64))
    assert urgency(columns, NOW_NS, CURVE) == (1, -50)
    assert schedule(columns, NOW_NS, CURVE).expire.tolist() == [0]
    idle = columns._replace(busy=one * 0)
    assert urgency(idle, NOW_NS, CURVE) == (1, 900)
    assert schedule(idle, NOW_NS, CURVE).run.tolist() == [0]


def test_more_rows_than_the_largest_batch_run_by_deadline() -> None:
    run, expire, waiting = decide([5000 - row for row in range(12)])
    assert (run, expire, waiting) == (list(range(4, 12)), [], 4)


def test_a_row_below_the_shortest_time_expires() -> None:
    assert decide([79, 10_000]) == ([1], [0], 0)
    # Just above it, and alone: it runs, although the prediction says that it is late.
    assert decide([80]) == ([0], [], 0)


def test_a_soft_deadline_runs_late_and_first() -> None:
    soft = SOFT_DEADLINE
    assert decide([-5000], [soft]) == ([0], [], 0)
    assert decide([-5000, 1000, -5000], [soft, 0, 0]) == ([0, 1], [2], 0)


def test_a_cancelled_row_expires_even_with_a_soft_deadline() -> None:
    cancelled = CANCELLED_NS - NOW_NS
    assert decide([cancelled, 1000], [SOFT_DEADLINE, 0]) == ([1], [0], 0)
    # In the company of normal rows, low priority is no different.
    low = LOW_PRIORITY | SOFT_DEADLINE
    assert decide([1000, cancelled, -1000], [0, low, low]) == ([0, 2], [1], 0)
    assert decide([cancelled, -1000], [low, low]) == ([1], [0], 0)


def test_the_last_row_is_tried_when_none_is_feasible() -> None:
    assert decide([85, 95, 90]) == ([1], [0, 2], 0)
    # Not beside a soft deadline, which runs anyhow and is no guess.
    assert decide([85, 95, -1000], [0, 0, SOFT_DEADLINE])[0][-1] == 2


def test_a_tie_between_batch_sizes_goes_to_the_larger_one() -> None:
    flat = Costs([1, 2, 4], [100.0, 100.0, 100.0])
    assert decide([100, 100, 5000, 5000], costs=flat) == ([0, 1, 2, 3], [], 0)
    assert decide([150, 5000, 5000, 5000, 5000], costs=flat) == ([0, 1, 2, 3], [], 1)


def test_rows_behind_a_batch_count_whole_batches() -> None:
    # Three rows in batches of one: the third is met at 300, exactly.
    single = Costs([1], [100.0])
    assert decide([100, 200, 300], costs=single) == ([0], [], 2)
    # At 299 it is late in any case, but is not refused before its turn.
    assert decide([100, 200, 299], costs=single) == ([0], [], 2)


def test_low_priority_fills_the_room_up_to_the_tightest_row() -> None:
    low = LOW_PRIORITY
    # 5 rows cost 250: exactly the slack of the normal rows.
    assert decide([250] * 4 + [9000] * 3, [0] * 4 + [low] * 3) == ([0, 1, 2, 3, 4], [], 2)
    assert decide([249] * 4 + [9000] * 3, [0] * 4 + [low] * 3) == ([0, 1, 2, 3], [], 3)


def test_low_priority_is_in_time_itself() -> None:
    low = LOW_PRIORITY
    # Rows due in 249 cannot join as a fifth; a later one can, in the place of an earlier one.
    assert decide([9000] * 4 + [249, 9000], [0] * 4 + [low] * 2)[0] == [0, 1, 2, 3, 5]
    assert decide([9000] * 4 + [79, 9000], [0] * 4 + [low] * 2) == ([0, 1, 2, 3, 5], [4], 0)
    # 80 is the shortest time: not expired, and not in time.
    assert decide([9000] * 4 + [80, 9000], [0] * 4 + [low] * 2) == ([0, 1, 2, 3, 5], [], 1)
    assert decide([9000] * 4 + [250], [0] * 4 + [low]) == ([0, 1, 2, 3, 4], [], 0)


def test_low_priority_waits_while_a_normal_row_stays_behind() -> None:
    assert decide([9000] * 9 + [9000], [0] * 9 + [LOW_PRIORITY]) == (list(range(8)), [], 2)
    # Room in a smaller batch is none, as long as normal rows wait for it.
    curve = Costs([1, 8], [100.0, 800.0])
    run, expire, waiting = decide([150, 5000, 9000], [0, 0, LOW_PRIORITY], curve)
    assert (run, expire, waiting) == ([0], [], 2)


def test_low_priority_alone_is_scheduled_like_normal_rows() -> None:
    low = LOW_PRIORITY
    assert decide([5000 - row for row in range(12)], [low] * 12) == (list(range(4, 12)), [], 4)
    assert decide([10, 5000], [0, low]) == ([1], [0], 0)
    assert decide([10, 20, 5000], [0, low, low]) == ([2], [0, 1], 0)


def test_every_ready_row_is_run_expired_or_waiting() -> None:
    chosen: BatchSchedule = schedule(table_of([50, 150, 9000] * 6, [0, 0, LOW_PRIORITY] * 6), NOW_NS, CURVE)
    assert chosen.run.size + chosen.expire.size + chosen.waiting == 18


def test_low_priority_fills_a_batch_up_to_the_largest() -> None:
    assert decide([9000] * 10, [0] * 6 + [LOW_PRIORITY] * 4) == (list(range(8)), [], 2)


def test_low_priority_exactly_in_time_joins() -> None:
    assert decide([9000] * 4 + [250, 10], [0] * 4 + [LOW_PRIORITY, 0]) == ([0, 1, 2, 3, 4], [5], 0)


def test_a_size_is_judged_by_all_rows_that_wait_for_it() -> None:
    # One by one, three rows are in time; four together are, without the first.
    costs = Costs([1, 4], [100.0, 200.0])
    assert decide([150, 350, 350, 350, 350], costs=costs) == ([1, 2, 3, 4], [0], 0)
