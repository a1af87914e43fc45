"""A network that is applied to every place of a large picture, and the finds that its maps contain."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import floor, hypot
from typing import Any, final

import numpy as np

from penstock.core.errors import ApplicationError
from penstock.core.json_record import JsonRecord
from penstock.core.record import ChunkSpec
from penstock.core.spec import Array, TensorSpec

# H, W height and width in pixels; h, w in cells of a map; K kinds of finds; n finds


@dataclass(frozen=True, kw_only=True, slots=True)
class Find:
    """One thing that was found.

    Args:
        label: Its kind.
        score: Largest score of its cells, 0 to 1.
        x: Its centre, in pixels from the left edge of the picture.
        y: From the upper edge.
    """

    label: str
    score: float
    x: float
    y: float

    def to_json(self) -> dict[str, Any]:
        """The find as JSON values, in tenths of a pixel."""
        return {"label": self.label, "score": round(self.score, 4), "x": round(self.x, 1), "y": round(self.y, 1)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Dense(JsonRecord):
    """The geometry of a network that gives one score per cell of a picture, tile by tile.

    Its input is one tile, uint8 `[H, W, 3]`; its output a map, `[h, w, K]`: the score of each kind in each cell of
    `stride` pixels, where `H = h * stride + 2 * margin`. If no cell depends on pixels outside the tile, as with
    convolutions without padding, the maps of neighbouring tiles join without a seam.

    Args:
        labels: The kinds of finds, in the order of the map's last dimension.
        stride: Side of a cell in pixels.
        margin: Pixels around the cells of a tile that are context only.
        threshold: Least score of a find.
        distance: Cells of one kind that are nearer than this, in pixels, are one find.
        pixel_um: Size of a pixel that the network expects, in micrometres; None if it does not matter.
        empty_above: A tile whose every pixel is at least as bright as this, in each colour, has no finds and is not
            run; every fourth pixel is checked, in both directions. None to run all.

    Raises:
        ApplicationError: A field is out of range.
    """

    unreadable = "the dense geometry is not readable ({}); write it again."
    labels: tuple[str, ...]
    stride: int
    margin: int
    threshold: float = 0.5
    distance: float
    pixel_um: float | None = None
    empty_above: int | None = None

    def __post_init__(self) -> None:
        named = isinstance(self.labels, tuple) and all(isinstance(label, str) and label for label in self.labels)
        for name, good, fix in (
            (
                "labels",
                named and self.labels and len(set(self.labels)) == len(self.labels),
                "a tuple of different names",
            ),
            ("stride", _is_whole(self.stride, 1), "a whole number of pixels, 1 at least"),
            ("margin", _is_whole(self.margin, 0), "a whole number of pixels, 0 at least"),
            ("threshold", _is_between(self.threshold, 0, 1) and self.threshold > 0, "above 0, and 1 at most"),
            ("distance", _is_between(self.distance, 0, 1e6), "a number of pixels, 0 to 1,000,000"),
            (
                "pixel_um",
                self.pixel_um is None or (_is_between(self.pixel_um, 0, 1e3) and self.pixel_um > 0),
                "None, or above 0 and 1,000 at most",
            ),
            ("empty_above", self.empty_above is None or _is_whole(self.empty_above, 1), "None, or 1 at least"),
        ):
            if not good:
                raise ApplicationError(f"Dense has {name}={getattr(self, name)!r:.80}; it must be {fix}.")

    def check(self, given: ChunkSpec, made: ChunkSpec) -> None:
        """Check that tiles and maps have this geometry.

        Args:
            given: The network's input.
            made: Its output.

        Raises:
            ApplicationError: They do not fit together.
        """
        if not isinstance(given, TensorSpec) or given.dtype != "uint8" or len(given.shape) != 3 or given.shape[2] != 3:
            raise ApplicationError(f"a dense network takes one tile, uint8 [H, W, 3], not {given.describe()}.")
        cells = tuple((size - 2 * self.margin) // self.stride for size in given.shape[:2])
        sizes = tuple(cell * self.stride + 2 * self.margin for cell in cells)
        if min(cells) < 1 or sizes != given.shape[:2]:
            raise ApplicationError(
                f"a tile of {list(given.shape[:2])} pixels is not a number of cells of {self.stride} pixels and a "
                f"margin of {self.margin} on each side; {[max(size, 1 + 2 * self.margin) for size in sizes]} is."
            )
        shape = (*cells, len(self.labels))
        if not isinstance(made, TensorSpec) or made.shape != shape or not made.dtype.startswith("float"):
            raise ApplicationError(f"the map of a tile is float {list(shape)}, not {made.describe()}.")

    def cells_above(self, map_hwK: Array, left: float = 0, top: float = 0) -> "Cells":
        """The cells of a map with at least the threshold.

        Args:
            map_hwK: Scores.
            left: Left edge of the map's first cell in the picture, in pixels.
            top: Its upper edge.
        """
        row_n, column_n, kind_n = np.nonzero(map_hwK >= self.threshold)
        half = self.stride / 2
        return Cells(
            kind=kind_n,
            score=map_hwK[row_n, column_n, kind_n].astype(np.float64),
            x=column_n * float(self.stride) + (left + half),
            y=row_n * float(self.stride) + (top + half),
        )

    def finds(self, parts: Iterable["Cells"]) -> list[Find]:
        """Merge cells into finds, from the highest score to the lowest; the order of the parts does not matter.

        A cell belongs to the nearest find within `distance` whose score is higher; without one it is a find of its own.
        The centre of a find is the mean of its cells, weighted by their scores.

        Args:
            parts: Cells from `cells_above`, of all maps of a picture.
        """
        cells = Cells.joined(list(parts))
        order = np.lexsort((cells.x, cells.y, cells.kind, -cells.score))
        merger = _Merger(self.distance)
        for kind, score, x, y in zip(
            *(each[order].tolist() for each in (cells.kind, cells.score, cells.x, cells.y)), strict=True
        ):
            merger.add(kind, score, x, y)
        return [
            Find(label=self.labels[peak.kind], score=peak.score, x=peak.sum_x / peak.sum, y=peak.sum_y / peak.sum)
            for peak in merger.peaks
        ]

    def is_empty(self, tile_HW3: Array) -> bool:
        """Check that a tile needs no run, by `empty_above`."""
        return self.empty_above is not None and bool(tile_HW3[::4, ::4].min() >= self.empty_above)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """Cells of maps, in parallel arrays `[n]`.

    Args:
        kind: Index of the label.
        score: 0 to 1.
        x: Centre in pixels.
        y: Centre in pixels.
    """

    kind: Array
    score: Array
    x: Array
    y: Array

    def within(self, width: int, height: int) -> "Cells":
        """Those whose centres are on a picture of this size in pixels."""
        inside = (self.x < width) & (self.y < height)
        return Cells(kind=self.kind[inside], score=self.score[inside], x=self.x[inside], y=self.y[inside])

    @classmethod
    def joined(cls, parts: "list[Cells]") -> "Cells":
        """All cells of several parts."""
        if not parts:
            return cls(kind=np.empty(0, np.int64), score=np.empty(0), x=np.empty(0), y=np.empty(0))
        return cls(
            kind=np.concatenate([part.kind for part in parts]),
            score=np.concatenate([part.score for part in parts]),
            x=np.concatenate([part.x for part in parts]),
            y=np.concatenate([part.y for part in parts]),
        )


@dataclass(kw_only=True, slots=True)
class _Peak:
    kind: int
    score: float
    x: float
    y: float
    sum: float = 0.0
    sum_x: float = 0.0
    sum_y: float = 0.0


@final
class _Merger:
    """Peaks by squares as wide as the distance, so that only nine squares are searched for each cell."""

    def __init__(self, distance: float) -> None:
        self._distance = distance
        self._side = max(distance, 1.0)
        self._squares: dict[tuple[int, int, int], list[_Peak]] = {}
        self.peaks: list[_Peak] = []

    def add(self, kind: int, score: float, x: float, y: float) -> None:
        column, row = floor(x / self._side), floor(y / self._side)
        near = [
            (hypot(peak.x - x, peak.y - y), number, peak)
            for i in (-1, 0, 1)
            for j in (-1, 0, 1)
            for number, peak in enumerate(self._squares.get((kind, column + i, row + j), ()))
        ]
        distance, _, peak = min(near, default=(np.inf, 0, None), key=lambda one: one[0])
        if peak is None or distance > self._distance:
            peak = _Peak(kind=kind, score=score, x=x, y=y)
            self._squares.setdefault((kind, column, row), []).append(peak)
            self.peaks.append(peak)
        peak.sum += score
        peak.sum_x += score * x
        peak.sum_y += score * y


def _is_whole(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _is_between(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
