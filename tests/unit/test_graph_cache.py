"""Shapes of CUDA graphs and the memory that they may take."""

import numpy as np
import pytest

from penstock.core.dim import Dim
from penstock.runtime.gpu.graph_cache import (
    CAPTURE_EVERY_S,
    GRAPH_BYTES,
    USES,
    GraphCache,
    GraphShapes,
    fine_row_sizes,
    room_sizes,
    row_sizes,
    size_of,
    smallest_holding,
)
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import LengthGrid
from tests.support.varying import WORDS

MB = 1 << 20


@pytest.mark.parametrize(
    ("dim", "rooms"),
    [
        (Dim("tokens", max=512, min=16), [16, 32, 64, 128, 256, 512]),
        (Dim("tokens", max=100), [2, 4, 8, 16, 32, 64, 100]),
        (Dim("frames", max=5000), [64, 128, 256, 512, 1024, 2048, 4096, 5000]),
        (Dim("one", max=1), [1]),
    ],
)
def test_rooms_are_the_edges_of_the_length_buckets(dim: Dim, rooms: list[int]) -> None:
    assert room_sizes(dim) == rooms


def test_a_batch_has_the_smallest_shape_that_holds_it() -> None:
    shapes = GraphShapes([Dim("tokens", max=512, min=16), Dim("boxes", max=10)], 100)
    assert row_sizes(100) == [1, 2, 4, 8, 16, 32, 64, 96, 100]
    assert shapes.holding(3, {"tokens": 17, "boxes": 3}) == (4, 32, 4)
    assert shapes.holding(97, {"tokens": 512, "boxes": 10}) == (100, 512, 10)
    assert shapes.rooms((4, 32, 4)) == {"tokens": 32, "boxes": 4}
    with pytest.raises(StopIteration):
        shapes.holding(101, {"tokens": 1, "boxes": 1})


def test_the_grid_has_every_number_of_rows_at_equally_long_rooms() -> None:
    shapes = GraphShapes([Dim("tokens", max=512, min=16), Dim("boxes", max=10)], 4)
    columns = shapes.columns()
    assert columns[0] == [(1, 512, 10), (2, 512, 10), (4, 512, 10)]
    assert [column[0][1:] for column in columns] == [(512, 10), (256, 8), (128, 4), (64, 2), (32, 2), (16, 2)]
    assert GraphShapes([], 2).columns() == [[(1,), (2,)]]
    assert max((shape for column in columns for shape in column), key=size_of) == (4, 512, 10)


def test_the_least_recently_used_graphs_make_room() -> None:
    # Own memory adds up; the pool is as large as the largest needs.
    cache: GraphCache[str] = GraphCache(100 * MB + 3 * GRAPH_BYTES)
    for shape, own, peak in (((4,), 20, 40), ((2,), 20, 20)):
        assert cache.make_room(own * MB, peak * MB) == []
        cache.put(shape, f"graph {shape}", own * MB, peak * MB)
    assert cache.nbytes == 80 * MB + 2 * GRAPH_BYTES
    assert cache.get((4,)) == "graph (4,)"
    # 20 + 20 + 30 and a pool of 40: the one that was used least recently goes, though it is the smaller one.
    assert cache.make_room(30 * MB, 10 * MB) == ["graph (2,)"]
    cache.put((1,), "graph (1,)", 30 * MB, 10 * MB)
    assert (cache.get((2,)), len(cache), cache.dropped) == (None, 2, 1)
    # The pool shrinks only with the last graph.
    assert cache.pool_bytes == 40 * MB
    assert cache.make_room(10 * MB, 90 * MB) == ["graph (4,)", "graph (1,)"]
    assert (cache.nbytes, cache.pool_bytes) == (0, 0)


def test_a_graph_beyond_the_limit_drops_none() -> None:
    cache: GraphCache[str] = GraphCache(10 * MB + GRAPH_BYTES)
    cache.put((1,), "small", MB, MB)
    assert cache.make_room(5 * MB, 6 * MB) is None
    assert not cache.fits(5 * MB, 6 * MB)
    assert cache.get((1,)) == "small"
    assert cache.dropped == 0


def test_a_shape_is_captured_when_it_is_used_again_and_one_shape_at_a_time() -> None:
    cache: GraphCache[str] = GraphCache(MB)
    assert [cache.due((1,), 0.0) for _ in range(USES)] == [False] * (USES - 1) + [True]
    # Another one waits until requests had time to run.
    assert [cache.due((2,), 0.1) for _ in range(USES + 1)] == [False] * (USES + 1)
    assert cache.due((2,), CAPTURE_EVERY_S)


def test_costs_of_batches_that_are_padded_to_the_edge() -> None:
    grid = LengthGrid.of(WORDS)
    assert grid is not None
    costs = LengthCosts(grid, [1, 2], [[100.0 * edge, 150.0 * edge] for edge in grid.edges])
    assert costs.of(1, 33) == 3300
    costs.padded = True
    lengths, edges = np.array([33, 32, 64, 1]), np.array([64, 32, 64, 1])
    assert [costs.of(1, length) for length in lengths.tolist()] == (100 * edges).tolist()
    assert costs.of_each(np.ones(4, np.int64), lengths).tolist() == (100 * edges).tolist()
    assert costs.alone_of(lengths).tolist() == (100 * edges).tolist()
    assert costs.shares_of(lengths).tolist() == (75 * edges).tolist()
    costs.observe(1, 33, 12_800)
    # Only its own edge moves.
    assert costs.of(1, 33) == costs.of(1, 64) > 6400
    assert costs.of(1, 32) == 3200


def test_a_shape_that_was_given_up_is_never_due_again_and_the_others_are() -> None:
    cache: GraphCache[str] = GraphCache(GRAPH_BYTES)
    cache.give_up((1, 8))
    uses = [(cache.due((1, 8), now_s * 2 * CAPTURE_EVERY_S), cache.due((2, 8), now_s)) for now_s in range(USES)]
    assert uses[-1] == (False, True)


def test_fine_sizes_lie_between_the_others() -> None:
    assert fine_row_sizes(150) == [1, 2, 4, 8, 16, 32, 64, 80, 96, 112, 128, 150]
    shapes = GraphShapes([Dim("past", max=200)], 64, 32, fine=True)
    assert {shape[1] for shape in shapes.all()} == {32, 64, 96, 128, 192, 200}
    assert shapes.all()[0] == (64, 200)


def test_the_smallest_shape_that_holds_another_is_found() -> None:
    shapes = [(8, 64), (4, 256), (16, 16)]
    assert smallest_holding(shapes, (3, 60)) == (8, 64)
    assert smallest_holding(shapes, (9, 2)) == (16, 16)
    assert smallest_holding(shapes, (9, 17)) is None
