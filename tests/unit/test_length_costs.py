"""Costs by rows and length: the grid, interpolation, the predicted finish, and updates, in numbers."""

import numpy as np
import pytest

from penstock.core.dim import Dim
from penstock.core.record import RecordSpec
from penstock.core.spec import TensorSpec
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import LengthGrid, resized
from penstock.serve.table.slots import SlotTable, TableLayout
from tests.support.varying import SUMS, TOKENS, WORDS, words

EDGES = (8, 16, 32)


def grid_of(*dims: Dim) -> LengthGrid:
    spec = RecordSpec(tuple(TensorSpec(dtype="int64", shape=(dim,), meaning="a", name=f"a{dim.name}") for dim in dims))
    grid = LengthGrid.of(spec)
    assert grid is not None
    return grid


def costs(handling_ns: float = 0.0) -> LengthCosts:
    ns = [[100.0, 200.0], [200.0, 400.0], [400.0, 800.0]]
    return LengthCosts(LengthGrid((Dim("t", 32),), EDGES), [1, 4], ns, largest=[4, 4, 1], handling_ns=handling_ns)


@pytest.mark.parametrize(
    ("dims", "edges"),
    [
        ((Dim("t", 512),), (4, 8, 16, 32, 64, 128, 256, 512)),
        ((Dim("t", 100),), (1, 2, 4, 8, 16, 32, 64, 100)),
        ((Dim("t", 100, 20),), (32, 64, 100)),
        ((Dim("t", 1),), (1,)),
        ((Dim("t", 7, 7),), (7,)),
        ((Dim("t", 64, 30), Dim("u", 16)), (32, 64)),
    ],
)
def test_edges_are_powers_of_two_up_to_the_largest_length(dims: tuple[Dim, ...], edges: tuple[int, ...]) -> None:
    assert grid_of(*dims).edges == edges


def test_each_bucket_has_a_shortest_length() -> None:
    grid = grid_of(Dim("t", 100, 20))
    assert grid.shortest == (1, 33, 65)
    assert [grid.bucket(length) for length in grid.shortest] == [0, 1, 2]


def test_fixed_sizes_have_no_grid() -> None:
    point = TensorSpec(dtype="float32", shape=(2,), meaning="a point", name="p")
    assert LengthGrid.of(point) is None
    assert LengthGrid.of(RecordSpec((point,))) is None


def test_a_row_is_as_long_as_its_relatively_longest_dimension() -> None:
    grid = grid_of(Dim("t", 64), Dim("u", 16))
    spec = RecordSpec(
        (
            TensorSpec(dtype="int64", shape=(Dim("t", 64),), meaning="a", name="a"),
            TensorSpec(dtype="int64", shape=(Dim("u", 16),), meaning="b", name="b"),
        )
    )
    records = spec.of_many([{"a": np.zeros(t, int), "b": np.zeros(u, int)} for t, u in ((5, 1), (3, 9), (64, 1))])
    assert grid.lengths_of(records).tolist() == [5, 36, 64]
    assert [grid.length_of(record.tobytes()) for record in records] == [5, 36, 64]
    assert [grid.length_of(record) for record in records] == [5, 36, 64]
    assert grid.length_of(records[1:2].reshape(())) == 36
    assert [grid.edges[grid.bucket(length)] for length in (5, 36, 64, 4)] == [8, 64, 64, 4]
    assert grid.sizes_at(32) == {"t": 32, "u": 8}


def test_an_example_of_another_length_repeats_its_entries() -> None:
    longer = resized(WORDS, words(3), {"tokens": 7})
    first = words(3)["words"][:3]
    assert longer["tokens"].tolist() == [7]
    assert longer["words"][0, :7].tolist() == first[[0, 1, 2, 0, 1, 2, 0]].tolist()
    assert not longer["words"][0, 7:].any()


@pytest.mark.parametrize(
    ("rows", "length", "ns"),
    [(1, 8, 100), (4, 8, 200), (2, 8, 133), (1, 12, 150), (4, 12, 300), (1, 24, 300), (1, 1, 100)],
)
def test_a_batch_between_the_points_of_the_grid_costs_between_their_times(rows: int, length: int, ns: int) -> None:
    assert costs().of(rows, length) == ns
    assert costs(10.0).of(rows, length) == ns + 10 * rows
    each = costs(10.0).of_each(np.array([rows]), np.array([length]))
    assert int(each[0]) == ns + 10 * rows


def test_the_largest_batch_and_the_share_of_a_row() -> None:
    made = costs()
    assert [made.largest(length) for length in (1, 8, 9, 16, 17, 32)] == [4, 4, 4, 4, 1, 1]
    assert made.shares_of(np.array([8, 16, 24, 32])).tolist() == [50, 100, 250, 400]
    assert made.at(24).largest == 1
    assert made.min_compute_of(np.array([1, 12, 32])).tolist() == [100, 150, 400]


def test_the_predicted_finish_counts_what_waits_in_each_bucket() -> None:
    made = costs()
    assert made.finish_ns([0, 0, 0], [0, 0, 0], 32) == 400
    # Alike: as a curve of one length predicts it.
    assert made.finish_ns([3, 0, 0], [24, 0, 0], 8) == 200
    assert made.finish_ns([4, 0, 0], [32, 0, 0], 8) == 400
    # Behind one of 32: 400 and its own 100; a row of 32 behind eight of 8: two batches of 200 and its own.
    assert made.finish_ns([0, 0, 1], [0, 0, 32], 8) == 500
    assert made.finish_ns([8, 0, 0], [64, 0, 0], 32) == 800
    # Two of 8 and one of 16 together take less than apart.
    assert made.finish_ns([2, 0, 0], [16, 0, 0], 16) == min(133 + 200, 333)


@pytest.mark.parametrize(("waiting", "total"), [(1, 70), (3, 0), (1, 10**9)])
def test_a_sum_that_does_not_match_its_count_is_of_the_bucket(waiting: int, total: int) -> None:
    # Another front-end has written one of both.
    made = costs()
    for bucket in range(3):
        counts, sums = [0, 0, 0], [0, 0, 0]
        counts[bucket], sums[bucket] = waiting, total
        for length in (1, 8, 9, 32):
            assert 0 < made.finish_ns(counts, sums, length) <= 400 * (waiting + 1)


def test_a_batch_moves_the_corners_beside_it_by_their_nearness() -> None:
    made = costs()
    made.observe(1, 12, 250)  # predicted 150
    assert [made.of(1, length) for length in EDGES] == [105, 205, 400]
    made = costs()
    made.observe(4, 8, 10_000)  # bounded by the prediction
    assert [made.of(rows, 8) for rows in (1, 4)] == [100, 220]
    assert made.of(4, 16) == 400


def test_a_published_grid_is_read_back() -> None:
    table = SlotTable.private(TableLayout(slots=4, chunks=1, input=WORDS, output=SUMS))
    grid = LengthGrid.of(WORDS)
    assert grid is not None
    count = len(grid.edges)
    ns = [[10.0 * length, 15.0 * length] for length in grid.edges]
    given = LengthCosts(grid, [1, 2], ns, largest=[2] * (count - 1) + [1], handling_ns=5.0)
    given.publish(table)
    read = LengthCosts.published(table, grid)
    assert (read.rows, read.largest_L, read.handling_ns) == ([1, 2], given.largest_L, 5.0)
    assert [read.of(1, length) for length in (1, 5, 64)] == [given.of(1, length) for length in (1, 5, 64)]
    assert int(TOKENS) == grid.longest


def test_handling_is_averaged() -> None:
    made = costs(1000.0)
    made.observe_handling(3000.0)
    assert made.handling_ns == pytest.approx(1100.0)
    assert made.of(1, 8) == 1200
