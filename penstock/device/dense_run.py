"""Run a dense network over a large picture: runs of neighbouring tiles, read and computed by several threads."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from penstock.core.pictures.dense import Cells, Dense, Find
from penstock.core.spec import Array, TensorSpec
from penstock.device.slides import Slide

# H, W height and width in pixels; B tiles, T side of a tile, h, w, K a map

# Gives the maps `[B, h, w, K]` of tiles `[B, T, T, 3]`; several threads call it at once.
Predict = Callable[[Array], Array]

OVERVIEW_SIDE = 2_048
# Runs that are submitted to the threads and not yet merged.
RUNS_AHEAD_PER_THREAD = 2
_COLOURS = ((0, 200, 60), (30, 110, 255), (255, 140, 0), (220, 30, 200), (0, 190, 200))


class TileRun(NamedTuple):
    """Neighbouring tiles of one row, read as one region.

    Args:
        left: Left edge of the first tile's cells in pixels.
        top: Their upper edge.
        tiles: Number of tiles.
    """

    left: int
    top: int
    tiles: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SlideFinds:
    """Finds on a slide, and the slide reduced.

    Args:
        finds: From the highest score to the lowest.
        overview: The slide, reduced, uint8 `[H, W, 3]`.
        reduction: Pixels of the slide on a pixel of the overview, in each direction.
        tiles: Tiles of the slide.
        empty: Those that were not run, because they are empty.
        seconds: Wall time, reading included.
    """

    finds: list[Find]
    overview: Array = field(repr=False)
    reduction: int
    tiles: int
    empty: int
    seconds: float

    def marked(self) -> Image.Image:
        """The overview with a circle around each find, in another colour for each kind."""
        picture = Image.fromarray(self.overview)
        pen = ImageDraw.Draw(picture)
        radius = max(6, round(40 / self.reduction))
        labels = sorted({find.label for find in self.finds})
        for find in self.finds:
            x, y = find.x / self.reduction, find.y / self.reduction
            colour = _COLOURS[labels.index(find.label) % len(_COLOURS)]
            pen.ellipse([x - radius, y - radius, x + radius, y + radius], outline=colour, width=2)
        return picture


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseRun:
    """A dense network with its tiles.

    Args:
        dense: Its geometry.
        tile: Its input.
        predict: Runs it.
        run_tiles: Tiles that are read as one region and given to `predict` at once.
        threads: Threads that read and call `predict`.
    """

    dense: Dense
    tile: TensorSpec
    predict: Predict
    run_tiles: int = 4
    threads: int = 1

    def over(self, slide: Slide, progress: Callable[[int, int], None] = lambda done, total: None) -> SlideFinds:
        """Find everything on a slide. Memory does not grow with its size.

        Args:
            slide: The slide.
            progress: Called with the number of tiles done, and of all.

        Raises:
            SourceError: The slide is damaged.
        """
        started = time.perf_counter()
        reduction = max(1, -(-max(slide.width, slide.height) // OVERVIEW_SIDE))
        core = self._core
        # Whole pixels of the overview, so that tiles are reduced one by one.
        overview = _Overview(slide.width, slide.height, reduction)
        runs = list(tile_runs(slide.width, slide.height, core, self.run_tiles))
        total, done, empty = sum(run.tiles for run in runs), 0, 0
        parts: list[Cells] = []
        with ThreadPoolExecutor(self.threads, thread_name_prefix="tiles") as pool:
            for run, (cells, skipped) in self._results(pool, slide, overview, runs):
                parts.append(cells)
                empty += skipped
                done += run.tiles
                progress(done, total)
        return SlideFinds(
            finds=self.dense.finds(parts),
            overview=overview.pixels_HW3,
            reduction=reduction,
            tiles=total,
            empty=empty,
            seconds=time.perf_counter() - started,
        )

    @property
    def _core(self) -> tuple[int, int]:
        """Height and width of a tile's cells in pixels."""
        height, width, _ = self.tile.shape
        return height - 2 * self.dense.margin, width - 2 * self.dense.margin

    def _results(
        self, pool: ThreadPoolExecutor, slide: Slide, overview: "_Overview", runs: list[TileRun]
    ) -> Generator[tuple[TileRun, tuple[Cells, int]]]:
        waiting: deque[tuple[TileRun, Future[tuple[Cells, int]]]] = deque()
        try:
            for run in runs:
                if len(waiting) >= RUNS_AHEAD_PER_THREAD * self.threads:
                    first, future = waiting.popleft()
                    yield first, future.result()
                waiting.append((run, pool.submit(self._run, slide, overview, run)))
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            # After an error, what was not begun is not run.
            for _, future in waiting:
                future.cancel()

    def _run(self, slide: Slide, overview: "_Overview", run: TileRun) -> tuple[Cells, int]:
        margin, (down, across) = self.dense.margin, self._core
        region_HW3 = slide.read(run.left - margin, run.top - margin, run.tiles * across + 2 * margin, down + 2 * margin)
        overview.add(region_HW3[margin : margin + down, margin : -margin or None], run.left, run.top)
        width = self.tile.shape[1]
        tiles = [region_HW3[:, left : left + width] for left in range(0, run.tiles * across, across)]
        kept = [index for index, tile_TT3 in enumerate(tiles) if not self.dense.is_empty(tile_TT3)]
        if not kept:
            return Cells.joined([]), run.tiles
        maps_BhwK = self.predict(np.stack([tiles[index] for index in kept]))
        parts = [
            self.dense.cells_above(map_hwK, run.left + index * across, run.top)
            for index, map_hwK in zip(kept, maps_BhwK, strict=True)
        ]
        # The last tiles reach beyond the slide.
        return Cells.joined(parts).within(slide.width, slide.height), run.tiles - len(kept)


def tile_runs(width: int, height: int, core: tuple[int, int], count: int) -> Iterator[TileRun]:
    """The runs of tiles that cover a picture, row by row; those of a row are of nearly equal length.

    Args:
        width: Of the picture in pixels.
        height: Of the picture.
        core: Height and width of a tile's cells in pixels.
        count: Most tiles of a run.
    """
    columns = -(-width // core[1])
    runs = -(-columns // count)
    edges = [columns * run // runs for run in range(runs + 1)]
    for top in range(0, height, core[0]):
        for first, end in pairwise(edges):
            yield TileRun(first * core[1], top, end - first)


class _Overview:
    """A reduced picture, filled region by region: the pixel at the corner of each square."""

    def __init__(self, width: int, height: int, reduction: int) -> None:
        self._reduction = reduction
        self.pixels_HW3 = np.full((-(-height // reduction), -(-width // reduction), 3), 255, np.uint8)

    def add(self, region_HW3: Array, left: int, top: int) -> None:
        """Add a region whose upper left corner is at a place of the slide."""
        step = self._reduction
        # The first pixel of the region that is the corner of a square.
        skip_y, skip_x = -top % step, -left % step
        part = region_HW3[skip_y::step, skip_x::step]
        y, x = (top + skip_y) // step, (left + skip_x) // step
        into = self.pixels_HW3[y : y + part.shape[0], x : x + part.shape[1]]
        into[...] = part[: into.shape[0], : into.shape[1]]
