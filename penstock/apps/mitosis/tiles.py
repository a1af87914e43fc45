"""Tiles of annotated slides as training examples."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np

from penstock.apps.mitosis.app import CELLS, MARGIN, STRIDE, TILE
from penstock.apps.mitosis.style import Style
from penstock.apps.mitosis.tissue import make_slide
from penstock.core.errors import BadExample, SourceError, TrainError
from penstock.core.machine.cores import available_cores
from penstock.core.spec import Array
from penstock.device.slides import ArraySlide, Slide
from penstock.train.data.examples import Examples
from penstock.train.data.sampler import Indices, Seeds

# B examples, T side of a tile, h, w cells of a map, n figures, m look-alikes

# Standard deviation of the target around a figure's centre, in pixels.
SPREAD_PX = 8.0
# Share of the training tiles that are centred near a figure or a look-alike.
FOCUS = 0.5
# Largest change of the contrast of each colour and of its brightness, as a share.
GAMMA, GAIN = 0.25, 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnotatedSlide:
    """A slide with its figures.

    Args:
        slide: Its pixels.
        figures: Centres, `[n, 2]`, x and y in pixels.
        look_alikes: Centres of the objects annotated as other than figures, `[m, 2]`.
    """

    slide: Slide
    figures: Array
    look_alikes: Array


@final
class SlideTiles(Examples):
    """Tiles of slides, uint8 `[T, T, 3]`; the targets are maps `[h, w]`: 1 at a figure's centre, falling to 0.

    Args:
        slides: The slides.
        count: Tiles of each slide and epoch, at random places, turned, mirrored and stained anew; None for all tiles of
            each slide side by side, as they are.
        focus: Share of the random tiles that are near a figure or a look-alike.

    Raises:
        TrainError: There are no slides.
    """

    def __init__(self, slides: Sequence[AnnotatedSlide], count: int | None = None, *, focus: float = FOCUS) -> None:
        if not slides:
            raise TrainError("there are no slides to make tiles of; give one at least.")
        self.input_dtype, self.input_shape = np.dtype(np.uint8), (TILE, TILE, 3)
        self.varies = count is not None
        self._slides, self._focus = slides, focus
        core = TILE - 2 * MARGIN
        self._places = [
            (index, left, top)
            for index, one in enumerate(slides)
            for left, top in (
                [(0, 0)] * count
                if count is not None
                else [(x, y) for y in range(0, one.slide.height, core) for x in range(0, one.slide.width, core)]
            )
        ]

    def __len__(self) -> int:
        return len(self._places)

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Array:
        """See `Examples`."""
        targets_Bhw = np.empty((len(indices_B), CELLS, CELLS), np.float32)
        for row, (index, seed) in enumerate(zip(indices_B.tolist(), seeds_B.tolist(), strict=True)):
            which, left, top = self._places[index]
            one = self._slides[which]
            rng = np.random.default_rng(seed) if self.varies else None
            if rng is not None:
                left, top = self._random_place(one, rng)
            try:
                tile_TT3 = one.slide.read(left - MARGIN, top - MARGIN, TILE, TILE)
            except SourceError as error:
                raise BadExample(str(error), index=index, name=one.slide.name) from None
            target_hw = target_map(one.figures, left, top)
            if rng is not None:
                tile_TT3, target_hw = _turned(tile_TT3, target_hw, int(rng.integers(8)))
                tile_TT3 = _stained(tile_TT3, rng)
            inputs_B[row], targets_Bhw[row] = tile_TT3, target_hw
        return targets_Bhw

    def _random_place(self, one: AnnotatedSlide, rng: np.random.Generator) -> tuple[int, int]:
        """Left and upper edge of the cells of a tile."""
        core, slide = TILE - 2 * MARGIN, one.slide
        centres = np.concatenate([one.figures, one.look_alikes])
        limits = np.maximum([slide.width - core, slide.height - core], 0)
        if len(centres) and rng.random() < self._focus:
            corner = centres[rng.integers(len(centres))] - rng.uniform(0, core, 2)
            left, top = np.clip(corner, 0, limits)
        else:
            left, top = rng.uniform((0, 0), limits + 1e-9)
        return int(left), int(top)


def target_map(figures_n2: Array, left: int, top: int) -> Array:
    """The map that the network learns, `[h, w]`: a Gaussian around each figure, as in Zhou et al. 2019, section 3.

    "Objects as points", arXiv:1904.07850. The cell that holds a centre has the target 1.

    Args:
        figures_n2: Centres on the slide, x and y in pixels.
        left: Left edge of the map's first cell on the slide.
        top: Its upper edge.
    """
    places_2C = [start + STRIDE * (np.arange(CELLS) + 0.5) for start in (left, top)]
    target_hw = np.zeros((CELLS, CELLS), np.float32)
    reach = 4 * SPREAD_PX
    for x, y in np.asarray(figures_n2).tolist():
        if left - reach < x < places_2C[0][-1] + reach and top - reach < y < places_2C[1][-1] + reach:
            across_w, down_h = (
                np.exp(-((places_C - at) ** 2) / (2 * SPREAD_PX**2))
                for places_C, at in zip(places_2C, (x, y), strict=True)
            )
            np.maximum(target_hw, np.outer(down_h, across_w), out=target_hw)
            column, row = int((x - left) // STRIDE), int((y - top) // STRIDE)
            if 0 <= column < CELLS and 0 <= row < CELLS:
                target_hw[row, column] = 1
    return target_hw


def _turned(tile_TT3: Array, target_hw: Array, turn: int) -> tuple[Array, Array]:
    """One of the eight orientations."""
    tile_TT3, target_hw = np.rot90(tile_TT3, turn % 4), np.rot90(target_hw, turn % 4)
    return (tile_TT3.transpose(1, 0, 2), target_hw.T) if turn >= 4 else (tile_TT3, target_hw)


def _stained(tile_TT3: Array, rng: np.random.Generator) -> Array:
    """Another contrast, which is another amount of stain, and brightness of each colour."""
    levels = np.arange(256) / 255
    stained_TT3 = np.empty(tile_TT3.shape, np.uint8)
    overall = rng.uniform(1 - GAMMA, 1 + GAMMA)
    for colour in range(3):
        gamma = overall * rng.uniform(1 - GAMMA, 1 + GAMMA)
        table = 255 * rng.uniform(1 - GAIN, 1 + GAIN / 2) * levels**gamma
        stained_TT3[..., colour] = np.clip(table, 0, 255).astype(np.uint8)[tile_TT3[..., colour]]
    return stained_TT3


def generated_slides(
    count: int, side: int, style: Style, *, first_seed: int, threads: int | None = None
) -> list[AnnotatedSlide]:
    """Generate slides in memory.

    Args:
        count: Number of slides.
        side: Of each, in pixels.
        style: Palette, sizes and shapes.
        first_seed: Of the first slide; each next one has the next seed.
        threads: Threads; None for one per core.
    """
    threads = threads or available_cores()
    make = partial(make_slide, height=side, width=side, style=style)
    with ThreadPoolExecutor(threads) as pool:
        made = list(pool.map(make, range(first_seed, first_seed + count)))
    return [
        AnnotatedSlide(slide=ArraySlide(one.pixels), figures=one.figures, look_alikes=one.look_alikes) for one in made
    ]
