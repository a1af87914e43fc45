"""The cost curve: interpolation, the predicted finish, and updates, in numbers."""

import pytest

from penstock.core.spec import TensorSpec
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import MAX_COSTS, SlotTable, TableLayout

POINT = TensorSpec(dtype="float32", shape=(2,), meaning="a point")


def curve(handling_ns: float = 0.0) -> Costs:
    return Costs([1, 4, 8], [1000.0, 4000.0, 6000.0], handling_ns=handling_ns)


@pytest.mark.parametrize(("rows", "ns"), [(1, 1000), (2, 2000), (3, 3000), (4, 4000), (5, 4500), (7, 5500), (8, 6000)])
def test_a_batch_between_two_measured_sizes_costs_between_their_times(rows: int, ns: int) -> None:
    assert curve().of(rows) == ns
    assert curve(handling_ns=10.0).of(rows) == ns + 10 * rows


def test_the_largest_batch_and_the_shortest_time() -> None:
    assert curve().largest == 8
    assert curve().min_compute_ns == 1000
    assert Costs([1], [1000.0], min_compute_ns=700.9).min_compute_ns == 700


def test_the_predicted_finish_grows_by_whole_batches() -> None:
    costs = curve(handling_ns=10.0)
    expected = [(0, 1010), (3, 4040), (7, 6080), (8, 2 * 6080), (15, 2 * 6080), (16, 3 * 6080)]
    assert [(waiting, costs.finish_ns(waiting)) for waiting, _ in expected] == expected


def test_the_predicted_finish_follows_the_curve() -> None:
    costs = curve()
    assert costs.finish_ns(8) == 12_000
    costs.observe(8, 7000)
    assert costs.finish_ns(8) == 2 * 6100
    costs.observe_handling(1000.0)
    assert costs.finish_ns(8) == 2 * (6100 + 8 * 50)


def test_a_run_moves_the_sizes_beside_it_by_their_nearness() -> None:
    costs = curve()
    costs.observe(7, 6500)  # predicted 5,500; a quarter of the way from 8 to 4
    assert [costs.of(rows) for rows in (1, 4, 8)] == [1000, 4025, 6075]


def test_a_run_of_a_measured_size_moves_that_size_alone() -> None:
    costs = curve()
    costs.observe(4, 3000)
    assert [costs.of(rows) for rows in (1, 4, 8)] == [1000, 3900, 6000]


def test_an_outlier_moves_a_size_by_a_tenth_of_it() -> None:
    costs = curve()
    costs.observe(4, 10_000_000)
    assert costs.of(4) == 4400


def test_handling_is_averaged_and_an_outlier_is_bounded() -> None:
    costs = curve(handling_ns=1000.0)
    costs.observe_handling(3000.0)
    assert costs.handling_ns == pytest.approx(1100.0)
    costs.observe_handling(1e9)
    assert costs.handling_ns == pytest.approx(1100.0 + 0.05 * (2 * 1100.0 + 10_000 - 1100.0))


def test_a_published_curve_is_read_back() -> None:
    table = SlotTable.private(TableLayout(slots=4, chunks=1, input=POINT, output=POINT))
    Costs(list(range(1, 6)), [10.0, 20.0, 30.0, 40.0, 50.0]).publish(table)
    Costs([1, 4], [1000.0, 4000.0], handling_ns=12.7, min_compute_ns=900.0).publish(table)
    read = Costs.published(table)
    assert (read.rows, read.handling_ns, read.min_compute_ns) == ([1, 4], 12.0, 900)
    assert [read.of(rows) for rows in (1, 2, 4)] == [1012, 2024, 4048]


@pytest.mark.parametrize(
    ("rows", "ns"),
    [([2], [1.0]), ([], []), ([1, 2], [1.0]), (list(range(1, MAX_COSTS + 2)), [1.0] * (MAX_COSTS + 1))],
)
def test_a_curve_begins_with_one_row_and_fits_into_the_header(rows: list[int], ns: list[float]) -> None:
    with pytest.raises(AssertionError):
        Costs(rows, ns)


def test_a_curve_may_fill_the_header() -> None:
    assert Costs(list(range(1, MAX_COSTS + 1)), [1.0] * MAX_COSTS).largest == MAX_COSTS


def test_handling_takes_no_time_until_it_is_measured() -> None:
    assert Costs([1], [1000.0]).handling_ns == 0
