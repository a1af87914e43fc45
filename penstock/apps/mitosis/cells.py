"""Drawings of single cells: nuclei, mitotic figures in several phases, and objects that resemble them.

A drawing has three planes: the nuclear stain that it adds, the share of the tissue below that stays visible,
and the counterstain that it adds. Units are optical density and pixels of 0.25 um.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from penstock.apps.mitosis.style import Range, Style
from penstock.core.spec import Array

# N cells, P side of a drawing, K waves of an outline

SIDE = 96
NOISE_SIDE = 1024
OUTLINE_WAVES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """Drawings of cells of one kind.

    Args:
        stain: Nuclear stain that is added, `[N, P, P]` float32.
        keep: Share of the tissue below that stays visible, `[N, P, P]` float32.
        plasma: Counterstain that is added, `[N, P, P]` float32.
    """

    stain: Array
    keep: Array
    plasma: Array


class Brush:
    """Draws cells of one slide.

    Args:
        style: Ranges of sizes and shapes.
        rng: All its numbers come from it.
        size: Size of this slide's nuclei, relative to the usual one.

    Attributes:
        x: Pixels from the middle of a drawing, `[P, P]`.
        y: Likewise, downwards.
    """

    x: Array
    y: Array

    def __init__(self, style: Style, rng: np.random.Generator, size: float) -> None:
        self.style, self.rng, self.size = style, rng, size
        axis = np.arange(SIDE, dtype=np.float32) - (SIDE - 1) / 2
        self.y, self.x = np.meshgrid(axis, axis, indexing="ij")
        white = rng.standard_normal((NOISE_SIDE, NOISE_SIDE), np.float32)
        self._noise: dict[str, Array] = {}
        for name, sigma in (("fine", 1.0), ("grain", style.grain_px), ("clump", 2 * style.grain_px)):
            smooth = _smoothed(white, sigma)
            self._noise[name] = smooth / smooth.std()

    def between(self, limits: Range, count: int) -> Array:
        """Uniform numbers, `[N, 1, 1]`."""
        return self.rng.uniform(*limits, (count, 1, 1)).astype(np.float32)

    def texture(self, name: str, count: int) -> Array:
        """Windows of a random field of mean 0 and variance 1, `[N, P, P]`."""
        corners = self.rng.integers(0, NOISE_SIDE - SIDE, (count, 2))
        return np.stack([self._noise[name][y : y + SIDE, x : x + SIDE] for y, x in corners.tolist()])

    def inside(
        self,
        long: Array,
        short: Array,
        angle: Array,
        *,
        waviness: Range = (0.0, 0.02),
        centre: tuple[Array, Array] | None = None,
        bend: Array | float = 0.0,
    ) -> Array:
        """Distance to the outline of a superellipse with waves along its radius: positive inside, `[N, P, P]`, pixels.

        Args:
            long: Half of its longer axis, `[N, 1, 1]`.
            short: Half of its shorter axis.
            angle: Direction of the longer axis.
            waviness: Amplitude of the waves, as a share of the radius.
            centre: `x` and `y` from the middle of the drawing.
            bend: Sagitta of the longer axis, as a share of its length.
        """
        count = len(long)
        x, y = (self.x, self.y) if centre is None else (self.x - centre[0], self.y - centre[1])
        along = (x * np.cos(angle) + y * np.sin(angle)) / long
        across = (y * np.cos(angle) - x * np.sin(angle)) / short
        across = across - bend * 2 * long / short * (np.minimum(along * along, 2) - 0.33)
        power = self.between(self.style.exponent, count)
        radius = (np.abs(along) ** power + np.abs(across) ** power) ** (1 / power)
        turn = np.arctan2(across, along)
        edge = np.ones_like(radius)
        for wave in range(2, 2 + OUTLINE_WAVES):
            amplitude = self.between(waviness, count) * self.rng.choice([-1, 1], (count, 1, 1)) / wave**0.5
            edge += amplitude * np.cos(wave * turn + self.between((0, 2 * np.pi), count))
        # The gradient of the radius is steepest across; towards the tips it is a bound of the distance.
        steep = np.sqrt((along / long) ** 2 + (across / short) ** 2) / np.maximum(radius, 0.05)
        return (edge - radius) / np.maximum(steep, 1 / long)


def _smoothed(field: Array, sigma: float) -> Array:
    """A square field convolved with a Gaussian, continued at its edges from the opposite ones."""
    side = len(field)
    down, across = np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)
    weights = np.exp(-2 * (np.pi * sigma) ** 2 * (down**2 + across**2))
    return np.fft.irfft2(np.fft.rfft2(field) * weights, field.shape).astype(np.float32)


def step(distance: Array, soft: Array | float = 0.8) -> Array:
    """From 0 outside to 1 inside, over about four times `soft` pixels."""
    return 1 / (1 + np.exp(-np.clip(distance / soft, -30, 30)))


def nucleus(brush: Brush, count: int) -> Cells:
    """Interphase nuclei: a membrane, loose chromatin, nucleoli."""
    long = brush.between((11, 20), count) * brush.size
    inside = brush.inside(
        long, long * brush.between((0.55, 1), count), brush.between((0, np.pi), count), waviness=brush.style.waviness
    )
    cover = step(inside)
    chromatin = 0.30 + 0.13 * brush.texture("grain", count) + 0.1 * brush.texture("clump", count)
    stain = np.maximum(chromatin, 0.05) + 0.25 * np.exp(-((inside / 1.6) ** 2))
    for _ in range(2):
        reach, turn = brush.between((0, 0.5), count) * long, brush.between((0, 2 * np.pi), count)
        spot = brush.between((1.5, 3.2), count)
        squared = (brush.x - reach * np.cos(turn)) ** 2 + (brush.y - reach * np.sin(turn)) ** 2
        stain = stain + (brush.between((0, 1), count) < 0.6) * 0.45 * np.exp(-squared / (2 * spot * spot))
    strength = brush.between((0.6, 1.35), count)
    return Cells(stain=cover * stain * strength, keep=1 - 0.6 * cover, plasma=0 * cover)


def lymphocyte(brush: Brush, count: int) -> Cells:
    """Small, round, dark, clumped."""
    radius = brush.between((10, 13), count) * brush.size
    cover = step(brush.inside(radius, radius * brush.between((0.85, 1), count), brush.between((0, np.pi), count)), 0.7)
    stain = brush.between((0.75, 1.2), count) * (1 + 0.22 * brush.texture("clump", count))
    return Cells(stain=cover * stain, keep=1 - 0.8 * cover, plasma=0 * cover)


def spindle(brush: Brush, count: int) -> Cells:
    """Dark elongated nuclei of fibroblasts, endothelium and crushed cells; some as dark as a metaphase plate."""
    long = brush.between((13, 26), count) * brush.size
    inside = brush.inside(
        long,
        brush.between((3.2, 6.2), count),
        brush.between((0, np.pi), count),
        bend=brush.between((-0.1, 0.1), count),
    )
    cover = step(inside, 0.8)
    stain = brush.between((0.6, 1.5), count) * (1 + 0.12 * brush.texture("clump", count))
    return Cells(stain=cover * stain, keep=1 - 0.8 * cover, plasma=0 * cover)


def pyknotic(brush: Brush, count: int) -> Cells:
    """Shrunken nuclei: dark, smooth, without texture, in dense cytoplasm."""
    long = brush.between((5, 11), count) * brush.size
    turn = brush.between((0, np.pi), count)
    short = long * brush.between((0.6, 1), count)
    cover = step(brush.inside(long, short, turn, waviness=(0.0, 0.09)), 0.8)
    cell = step(brush.inside(long * 1.8, short * 1.9, turn, waviness=(0.0, 0.05)), 1.5)
    plasma = cell * brush.between((0.0, 0.45), count)
    stain = brush.between((1.0, 1.7), count) * (1 + 0.04 * brush.texture("clump", count))
    return Cells(stain=cover * stain, keep=1 - 0.9 * cover, plasma=plasma)


def apoptotic(brush: Brush, count: int) -> Cells:
    """Globules of condensed chromatin in a shrunken, strongly stained cell with a clear halo."""
    radius = brush.between((11, 17), count) * brush.size
    turn = brush.between((0, np.pi), count)
    outline = brush.inside(radius, radius * brush.between((0.75, 1), count), turn)
    cell, halo = step(outline, 1.2), step(outline + brush.between((2, 6), count), 1.2)
    globules = np.zeros_like(cell)
    for index in range(5):
        here = (brush.between((0, 1), count) < (0.95 if index < 2 else 0.5)).astype(np.float32)
        size = brush.between((2.0, 6.5), count) * brush.size * (1.0 if index < 2 else 0.6)
        reach, direction = brush.between((0.1, 0.75), count) * radius, brush.between((0, 2 * np.pi), count)
        centre = (reach * np.cos(direction), reach * np.sin(direction))
        ball = step(brush.inside(size, size * brush.between((0.8, 1), count), direction, centre=centre), 0.7)
        globules = np.maximum(globules, here * ball)
    stain = globules * brush.between((1.0, 1.7), count)
    return Cells(
        stain=stain, keep=(1 - 0.85 * (halo - cell)) * (1 - 0.7 * cell), plasma=cell * brush.between((0.3, 0.8), count)
    )


def hyperchromatic(brush: Brush, count: int) -> Cells:
    """Large dark nuclei with coarse chromatin and a membrane, early prophase among them: not counted."""
    long = brush.between((13, 22), count) * brush.size
    inside = brush.inside(
        long, long * brush.between((0.55, 0.95), count), brush.between((0, np.pi), count), waviness=(0.03, 0.1)
    )
    cover = step(inside, 0.8)
    coarse = brush.between((0.1, 0.32), count)
    stain = 1 + coarse * brush.texture("clump", count) + 0.15 * brush.texture("grain", count)
    stain = stain * brush.between((0.7, 1.25), count) + 0.3 * np.exp(-((inside / 1.8) ** 2))
    return Cells(stain=cover * np.maximum(stain, 0.1), keep=1 - 0.8 * cover, plasma=0 * cover)


def _dividing(brush: Brush, distance: Array, cell: Array, turn: Array, squeeze: Array | float = 1.0) -> Cells:
    """Chromosomes of a given outline, hairy and without a membrane, in a rounded clear cell."""
    count = len(distance)
    hair = brush.between(brush.style.hair, count)
    ragged = distance + hair * (0.7 * brush.texture("fine", count) + 0.7 * brush.texture("grain", count))
    cover = step(ragged, 0.8)
    stain = brush.between((0.9, 1.6), count) * (1 + 0.12 * brush.texture("grain", count))
    clear = step(brush.inside(cell, cell * squeeze, turn), 2.5) * brush.between((0.15, 0.75), count)
    return Cells(stain=cover * stain, keep=(1 - clear) * (1 - 0.8 * cover), plasma=0 * cover)


def prometaphase(brush: Brush, count: int) -> Cells:
    """An irregular tangle of condensed chromosomes."""
    long, turn = brush.between((9, 15), count) * brush.size, brush.between((0, np.pi), count)
    distance = brush.inside(long, long * brush.between((0.6, 0.95), count), turn, waviness=(0.05, 0.14))
    distance = np.minimum(distance, 4) + 2.0 * brush.texture("clump", count)
    return _dividing(brush, distance, long * brush.between((1.7, 2.2), count), turn)


def metaphase(brush: Brush, count: int) -> Cells:
    """A plate from the side: a band."""
    long, turn = brush.between((12, 20), count) * brush.size, brush.between((0, np.pi), count)
    bend = brush.between(brush.style.bend, count)
    distance = brush.inside(long, brush.between((3.5, 6.5), count) * brush.size, turn, bend=bend)
    return _dividing(brush, distance, long * brush.between((1.2, 1.7), count), turn, brush.between((0.8, 1.1), count))


def polar_metaphase(brush: Brush, count: int) -> Cells:
    """A plate from its pole: a ring or a disc."""
    radius, turn = brush.between((11, 16), count) * brush.size, brush.between((0, np.pi), count)
    distance = brush.inside(radius, radius * brush.between((0.8, 1), count), turn, waviness=(0.03, 0.1))
    hole = distance - radius * brush.between((0.45, 1.1), count)
    return _dividing(brush, np.minimum(distance, -hole), radius * brush.between((1.5, 2.0), count), turn)


def _pair(brush: Brush, count: int, apart: Range, cell: float) -> Cells:
    long, turn = brush.between((9, 17), count) * brush.size, brush.between((0, np.pi), count)
    half = brush.between(apart, count) * brush.size / 2
    distance = np.full((count, SIDE, SIDE), -99, np.float32)
    for side in (-1, 1):
        centre = (-np.sin(turn) * half * side, np.cos(turn) * half * side)
        tilt, bend = brush.between((-0.25, 0.25), count), side * brush.between((0.0, 0.2), count)
        width = brush.between((2.8, 5), count) * brush.size
        band = brush.inside(long * brush.between((0.85, 1.1), count), width, turn + tilt, centre=centre, bend=bend)
        distance = np.maximum(distance, band)
    return _dividing(brush, distance, half + 8 + 0 * long, turn + np.pi / 2, brush.between((cell, 1.0), count))


def anaphase(brush: Brush, count: int) -> Cells:
    """Two parallel bands that move apart."""
    return _pair(brush, count, (11, 24), 0.8)


def telophase(brush: Brush, count: int) -> Cells:
    """Two distant bands, one figure."""
    return _pair(brush, count, (26, 44), 0.6)


Draw: TypeAlias = Callable[[Brush, int], Cells]

# With the share of each among its group.
COMMON: dict[Draw, float] = {nucleus: 0.86, lymphocyte: 0.14}
LOOK_ALIKES: dict[Draw, float] = {spindle: 0.34, pyknotic: 0.22, apoptotic: 0.22, hyperchromatic: 0.22}
FIGURES: dict[Draw, float] = {
    metaphase: 0.36,
    prometaphase: 0.24,
    polar_metaphase: 0.12,
    anaphase: 0.16,
    telophase: 0.12,
}
