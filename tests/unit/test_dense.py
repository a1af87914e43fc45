"""Dense networks: their geometry, the finds of their maps, and tiles that join without a seam."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ApplicationError, SourceError
from penstock.core.pictures.dense import Cells, Dense
from penstock.core.spec import Array
from penstock.device.dense_run import DenseRun, tile_runs
from penstock.device.slides import ArraySlide, Slide
from tests.support.dense import DENSE, MAP_SPEC, TILE_SPEC, darkness, spotted


def run(**changes: Any) -> DenseRun:
    return replace(DenseRun(dense=DENSE, tile=TILE_SPEC, predict=darkness), **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"labels": ("a", "a")}, "a tuple of different names"),
        ({"labels": ()}, "a tuple of different names"),
        ({"stride": 0}, "stride=0; it must be a whole number of pixels, 1 at least"),
        ({"margin": -1}, "margin=-1"),
        ({"threshold": 0.0}, "above 0, and 1 at most"),
        ({"threshold": float("nan")}, "above 0, and 1 at most"),
        ({"distance": True}, "distance=True"),
        ({"pixel_um": 0.0}, "pixel_um=0.0"),
        ({"empty_above": 0}, "empty_above=0"),
    ],
)
def test_a_field_out_of_range_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        replace(DENSE, **changes)


def test_tiles_and_maps_must_fit_the_geometry() -> None:
    DENSE.check(TILE_SPEC, MAP_SPEC)
    with pytest.raises(ApplicationError, match=r"a tile of \[17, 16\] .* a margin of 2 on each side; \[16, 16\] is\."):
        DENSE.check(replace(TILE_SPEC, shape=(17, 16, 3)), MAP_SPEC)
    with pytest.raises(ApplicationError, match=r"takes one tile, uint8 \[H, W, 3\], not .*float32"):
        DENSE.check(replace(TILE_SPEC, dtype="float32"), MAP_SPEC)
    with pytest.raises(ApplicationError, match=r"the map of a tile is float \[3, 3, 1\], not .*3, 4, 1"):
        DENSE.check(TILE_SPEC, replace(MAP_SPEC, shape=(3, 4, 1)))
    assert Dense.from_json(DENSE.to_json()) == DENSE


def test_cells_near_one_another_are_one_find_at_their_weighted_mean() -> None:
    map_hwK = np.zeros((3, 3, 1), np.float32)
    map_hwK[1, 1], map_hwK[1, 2] = 0.9, 0.6
    (find,) = DENSE.finds([DENSE.cells_above(map_hwK, left=100, top=40)])
    assert (find.label, find.score, find.x, find.y) == ("dark", *map(pytest.approx, (0.9, 107.6, 46.0)))
    far = replace(DENSE, distance=3.0)
    assert [round(one.x) for one in far.finds([far.cells_above(map_hwK)])] == [6, 10]


def test_kinds_are_apart_and_the_best_comes_first() -> None:
    dense = replace(DENSE, labels=("a", "b"))
    map_hwK = np.zeros((3, 3, 2), np.float32)
    map_hwK[0, 0] = 0.6, 0.8
    assert [(find.label, round(find.score, 1)) for find in dense.finds([dense.cells_above(map_hwK)])] == [
        ("b", 0.8),
        ("a", 0.6),
    ]
    assert dense.finds([]) == []


def test_the_order_of_the_parts_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    parts = [
        DENSE.cells_above(rng.random((3, 3, 1)), left, top) for left in range(0, 60, 12) for top in range(0, 60, 12)
    ]
    forward = DENSE.finds(parts)
    assert len(forward) > 20
    assert DENSE.finds(parts[::-1]) == forward
    assert DENSE.finds([Cells.joined(parts)]) == forward


def test_finds_of_a_slide_are_where_its_spots_are() -> None:
    spots = [(30, 20), (50, 61), (4, 4)]
    found = run(threads=2).over(ArraySlide(spotted(70, 90, *spots)))
    assert sorted((round(find.x), round(find.y)) for find in found.finds) == [(4, 4), (30, 20), (50, 61)]
    assert found.tiles == 6 * 8
    assert 30 < found.empty < found.tiles
    assert found.overview.shape == (70, 90, 3)
    assert np.array_equal(found.overview, spotted(70, 90, *spots))


def test_a_tile_without_dark_pixels_is_not_run() -> None:
    counts: list[int] = []

    def predict(tiles_BTT3: Array) -> Array:
        counts.append(len(tiles_BTT3))
        return darkness(tiles_BTT3)

    found = run(predict=predict).over(ArraySlide(spotted(24, 48, (6, 6))))
    assert (sum(counts), found.empty, found.tiles) == (1, 7, 8)
    assert run(dense=replace(DENSE, empty_above=None)).over(ArraySlide(spotted(24, 48))).empty == 0


def test_runs_cover_every_pixel_once() -> None:
    seen = np.zeros((50, 70), int)
    for tiles in tile_runs(70, 50, (12, 12), 4):
        seen[tiles.top : tiles.top + 12, tiles.left : tiles.left + 12 * tiles.tiles] += 1
        assert 1 <= tiles.tiles <= 4
    assert (seen == 1).all()


def test_a_damaged_region_ends_the_run() -> None:
    class Damaged(Slide):
        name, width, height = "damaged", 200, 200

        def _read(self, left: int, top: int, width: int, height: int) -> Array:
            if top > 100:
                raise SourceError("damaged")
            return np.zeros((height, width, 3), np.uint8)

    with pytest.raises(SourceError, match="damaged"):
        run(threads=2).over(Damaged())


def test_a_large_slide_has_a_reduced_overview(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.device.dense_run.OVERVIEW_SIDE", 30)
    pixels_HW3 = np.random.default_rng(0).integers(0, 255, (61, 89, 3)).astype(np.uint8)
    found = run(threads=2, run_tiles=3).over(ArraySlide(pixels_HW3))
    assert found.reduction == 3
    assert np.array_equal(found.overview, pixels_HW3[::3, ::3])
    assert found.marked().size == (30, 21)
