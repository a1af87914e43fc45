"""The choice between beginning rows and stepping those in progress, and the costs that it reads."""

import numpy as np
import pytest

from penstock.core.errors import ServeError
from penstock.core.record import RecordSpec
from penstock.runtime.generation.generation_executor import GenerationExecutor
from penstock.serve.engine.generation_measurement import measuring_generation
from penstock.serve.engine.generation_scheduler import InProgress, not_busy, schedule_generation
from penstock.serve.engine.scheduler import Columns
from penstock.serve.table.costs import Costs
from penstock.serve.table.generation_costs import GenerationCosts
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import LengthGrid
from penstock.serve.table.slots import LOW_PRIORITY, SlotTable, TableLayout
from tests.support.generating import COUNTER, Counter, digits, tensor

MS = 1_000_000
# A beginning of 10 ms, and 1 ms more a row; a step of 20 ms, of at most 8 rows.
COSTS = GenerationCosts(Costs([1, 8], [11 * MS, 18 * MS]), Costs([1, 8], [20 * MS, 20 * MS]), mean_steps=10)
FAR_NS = 1000 * MS


def waiting(*slack_ms: float) -> Columns:
    """Columns of some waiting rows, at time 0."""
    layout = TableLayout(slots=16, chunks=1, input=tensor("int64", 3), output=tensor("int64"), results=50)
    table = SlotTable.private(layout)
    rows = len(slack_ms)
    table.submitted[:rows] = 1
    table.deadline_ns[:rows, 0] = (np.array(slack_ms) * MS).astype(np.int64)
    return not_busy(Columns.of(table))


def chosen(columns: Columns, rows: int, due_ms: float) -> tuple[list[int], list[int], bool]:
    found = schedule_generation(columns, np.ones((16, 1), np.int64), 0, InProgress(rows, int(due_ms * MS)), COSTS)
    assert found.waiting + found.begin.size + found.expire.size == int((columns.submitted > 0).sum())
    return sorted(found.begin.tolist()), found.expire.tolist(), found.step


def test_nothing_waits_and_nothing_is_in_progress() -> None:
    assert chosen(waiting(), 0, 0) == ([], [], False)


def test_rows_in_progress_are_stepped_where_none_waits() -> None:
    assert chosen(waiting(), 3, 50) == ([], [], True)


def test_waiting_rows_begin_at_once_where_none_is_in_progress() -> None:
    assert chosen(waiting(500, 500, 500), 0, 0) == ([0, 1, 2], [], False)


def test_rows_begin_where_the_next_step_is_in_time_all_the_same() -> None:
    assert chosen(waiting(500, 500), 3, 33) == ([0, 1], [], False)


def test_fewer_begin_where_the_next_step_would_be_late_otherwise_the_most_urgent() -> None:
    assert chosen(waiting(500, 400), 3, 31.5) == ([1], [], False)


def test_rows_wait_for_a_step_where_beginning_would_make_it_late() -> None:
    assert chosen(waiting(500, 500), 3, 25) == ([], [], True)


def test_a_row_that_cannot_wait_for_one_more_step_begins_alone() -> None:
    assert chosen(waiting(500, 45), 3, 25) == ([1], [], False)


def test_a_row_that_can_no_longer_be_in_time_expires() -> None:
    assert chosen(waiting(500, 15), 3, 33) == ([0], [1], False)


def test_slow_steps_do_not_shut_an_idle_server_for_ever() -> None:
    costs = GenerationCosts(Costs([1], [MS]), Costs([1, 2], [10 * MS, 10 * MS]), mean_steps=4)
    while costs.step_ns(1) <= 50 * MS:
        costs.step.observe(1, 80 * MS)
    lengths = np.zeros((16, 1), np.int64)
    # The step is predicted to take longer than the whole budget, and took 10 ms at the start.
    found = schedule_generation(waiting(50), lengths, 0, InProgress(0, 0), costs)
    assert (found.begin.tolist(), found.expire.tolist()) == ([0], [])
    late = schedule_generation(waiting(10.5), lengths, 0, InProgress(0, 0), costs)
    assert (late.begin.tolist(), late.expire.tolist()) == ([], [0])


def test_no_more_rows_begin_than_there_are_places() -> None:
    assert chosen(waiting(500, 400, 300), 6, 500)[0] == [1, 2]
    assert chosen(waiting(500), 8, 500) == ([], [], True)


def test_the_prediction_of_a_first_output_grows_with_the_rows_that_wait_for_a_place() -> None:
    free = COSTS.finish_ns(0)
    assert free == 2 * 20 * MS + 11 * MS
    assert COSTS.finish_ns(7) == free
    # A place is free each 10 x 20 / 8 ms, and then a row begins, which takes 11 ms.
    # One and four places, and a standard deviation of those.
    assert COSTS.finish_ns(8) == free + (1 + 1) * 36 * MS
    assert COSTS.finish_ns(11) == free + (4 + 2) * 36 * MS


def test_costs_are_the_same_on_the_other_side_of_the_table() -> None:
    layout = TableLayout(slots=2, chunks=1, input=tensor("int64", 3), output=tensor("int64"))
    table = SlotTable.private(layout)
    assert GenerationCosts.published(table, None) is None, "answers of one step have none"
    COSTS.publish(table)
    read = GenerationCosts.published(table, None)
    assert read is not None
    assert [read.finish_ns(ahead) for ahead in range(20)] == [COSTS.finish_ns(ahead) for ahead in range(20)]


def test_the_mean_of_the_steps_follows_the_answers() -> None:
    costs = GenerationCosts(COSTS.begin, COSTS.step, 100)
    for _ in range(200):
        costs.observe_answer(20, 1)
    assert costs.mean_steps == pytest.approx(20, abs=0.1)


class Slow:
    """A clock on which each measured run takes a time."""

    def __init__(self, run_ns: int) -> None:
        self.ns, self.run_ns = 0, run_ns

    def __call__(self) -> int:
        self.ns += self.run_ns
        return self.ns


def measured(run_ms: float, first_ms: float, step_ms: float) -> GenerationCosts:
    executor = GenerationExecutor(Counter(), COUNTER, max_rows=8)
    assert isinstance(COUNTER.input, RecordSpec)
    measuring = measuring_generation(
        executor,
        COUNTER.input.check(digits(9)),
        max_rows=8,
        first_budget_ns=int(first_ms * MS),
        step_budget_ns=int(step_ms * MS),
        clock_ns=Slow(int(run_ms * MS)),
    )
    while True:
        try:
            next(measuring)
        except StopIteration as ended:
            return ended.value


def test_the_measurement_finds_the_most_rows_in_progress() -> None:
    costs = measured(0.1, 100, 100)
    assert (costs.max_rows, costs.mean_steps) == (8, 32)
    assert costs.step_ns(3) == costs.begin_ns(2, 40) == 100_000


@pytest.mark.parametrize(("first_ms", "step_ms", "named"), [(100, 9, "step_ms"), (15, 100, "first_ms")])
def test_a_network_slower_than_a_budget_is_refused_with_the_name_of_the_budget(
    first_ms: float, step_ms: float, named: str
) -> None:
    with pytest.raises(ServeError, match=f"raise {named} of"):
        measured(10, first_ms, step_ms)


# Rows begin beside steps of 20 ms: 11 ms for one, 18 ms for eight. Of 24 places two must be free where rows queue.
BESIDE = GenerationCosts(
    Costs([1, 8, 24], [11 * MS, 18 * MS, 30 * MS]), Costs([1, 24], [20 * MS, 20 * MS]), mean_steps=10, beside=True
)


def beside(rows: int, *slack_ms: float, beginning: int = 0) -> tuple[int, bool, int]:
    """Return how many rows begin, whether the others take a step, and how many stay behind."""
    progress = InProgress(rows, 0, beginning)
    found = schedule_generation(waiting(*slack_ms), np.ones((16, 1), np.int64), 0, progress, BESIDE)
    return found.begin.size, found.step, found.waiting


@pytest.mark.parametrize(
    ("rows", "waits", "beginning", "expected"),
    [
        (0, 10, 0, (10, False, 0)),
        (3, 1, 0, (1, True, 0)),
        (3, 16, 0, (8, True, 8)),
        (23, 1, 0, (1, True, 0)),
        (23, 5, 0, (0, True, 5)),
        (22, 5, 0, (2, True, 3)),
        (3, 5, 2, (0, True, 5)),
        (24, 5, 0, (0, True, 5)),
        (3, 0, 0, (0, True, 0)),
    ],
)
def test_rows_begin_beside_a_step(rows: int, waits: int, beginning: int, expected: tuple[int, bool, int]) -> None:
    assert beside(rows, *[900.0] * waits, beginning=beginning) == expected


def test_an_urgent_row_takes_the_one_free_place_and_a_late_one_expires() -> None:
    assert beside(23, 60, 900, 900)[0] == 1
    found = schedule_generation(waiting(5, 900), np.ones((16, 1), np.int64), 0, InProgress(24, 0), BESIDE)
    assert (found.begin.size, found.expire.tolist()) == (0, [0])


def test_rows_of_about_the_length_of_the_most_urgent_begin_together() -> None:
    length = np.ones((16, 1), np.int64)
    length[:4, 0] = 3, 40, 38, 4
    grid = LengthGrid.of(COUNTER.input)
    assert grid is not None
    begin = LengthCosts(grid, [1, 8], np.full((len(grid.edges), 2), 10.0 * MS))
    costs = GenerationCosts(begin, Costs([1, 24], [20 * MS, 20 * MS]), mean_steps=10, beside=True)
    found = schedule_generation(waiting(900, 800, 950, 960), length, 0, InProgress(22, 0), costs)
    assert (found.begin.tolist(), found.waiting) == ([1, 2], 2)


def test_rows_of_low_priority_begin_beside_a_step_after_the_others() -> None:
    columns = waiting(900, 900, 900)
    columns.flags[:2, 0] = LOW_PRIORITY
    found = schedule_generation(columns, np.ones((16, 1), np.int64), 0, InProgress(23, 0), BESIDE)
    assert found.begin.tolist() == [2]
