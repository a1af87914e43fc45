"""Generated slides of stained tissue, with the places of their mitotic figures."""

from dataclasses import dataclass
from math import ceil

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from penstock.apps.mitosis.cells import COMMON, FIGURES, LOOK_ALIKES, SIDE, Brush, Cells, Draw
from penstock.apps.mitosis.style import Style
from penstock.core.spec import Array

# H height, W width, n cells

LN10 = 2.302585
# On a million pixels (0.0625 mm2).
FIGURES_PER_MPX = 12.0
LOOK_ALIKES_PER_MPX = 90.0
# Drawings that the common cells of a slide are chosen from, each in eight orientations.
BANK = 128
BATCH = 128
# Figures keep away from the margin of a slide, from one another and from look-alikes.
EDGE = SIDE // 2
APART = 56
STRIP = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Slide:
    """A picture of tissue and its annotations.

    Args:
        pixels: uint8 `[H, W, 3]`, 0.25 um a pixel.
        figures: Centres of the mitotic figures, `[n, 2]` float32, x and y in pixels.
        look_alikes: Centres of what resembles them, `[m, 2]`.
    """

    pixels: Array
    figures: Array
    look_alikes: Array


def make_slide(
    seed: int,
    height: int,
    width: int,
    style: Style,
    *,
    figures: float = FIGURES_PER_MPX,
    look_alikes: float = LOOK_ALIKES_PER_MPX,
) -> Slide:
    """Generate a slide.

    Args:
        seed: The same numbers give the same slide.
        height: In pixels.
        width: In pixels.
        style: Palette, sizes and shapes.
        figures: Mitotic figures on a million pixels.
        look_alikes: Look-alikes on a million pixels.
    """
    rng = np.random.default_rng(seed)
    canvas = _Canvas(rng, height, width, style)
    canvas.scatter(COMMON, _common_places(rng, canvas, style))
    canvas.fold()
    free = _Spacing(APART)
    mpx = height * width / 1e6
    places = [free.take(canvas.places(count * mpx)) for count in (figures, look_alikes)]
    for group, centres in zip((LOOK_ALIKES, FIGURES), reversed(places), strict=True):
        canvas.scatter(group, centres, bank=False)
    pixels = _photograph(rng, canvas, style)
    pixels = _dirt(rng, pixels, places[0])
    return Slide(pixels=pixels, figures=places[0], look_alikes=places[1])


class _Canvas:
    """Amounts of both stains, and which places are tissue."""

    def __init__(self, rng: np.random.Generator, height: int, width: int, style: Style) -> None:
        self.rng, self.height, self.width = rng, height, width
        self.brush = Brush(style, rng, float(rng.uniform(*style.size)))
        hole = _field(rng, height, width, 220) + 0.5 * _field(rng, height, width, 50)
        self.tissue = hole < rng.uniform(1.1, 2.6)
        stretched = (5.0, 5.0 * style.fibre) if rng.random() < 0.5 else (5.0 * style.fibre, 5.0)
        eosin = 0.27 + 0.07 * _field(rng, height, width, 70) + 0.06 * _field(rng, height, width, *stretched)
        eosin += 0.025 * _field(rng, height, width, 3)
        self.eosin = np.maximum(eosin, 0.03) * self.tissue
        self.hematoxylin = np.maximum(0.06 + 0.03 * _field(rng, height, width, 40), 0) * self.tissue

    def places(self, count: float, edge: int = EDGE) -> Array:
        """Random centres within the tissue, `[n, 2]`, not nearer to the slide's edge."""
        low, high = edge, (self.width - edge, self.height - edge)
        drawn = self.rng.uniform(low, high, (int(self.rng.poisson(count)), 2)).astype(np.float32)
        x, y = drawn.astype(int).T
        return drawn[self.tissue[y, x]]

    def scatter(self, group: dict[Draw, float], centres: Array, *, bank: bool = True) -> None:
        """Draw cells of a group at these centres, from a bank of few drawings or each of them anew."""
        shares = np.array(list(group.values()))
        kinds = self.rng.choice(len(group), len(centres), p=shares / shares.sum())
        for index, draw in enumerate(group):
            here = centres[kinds == index]
            if bank and len(here) > BANK:
                drawn = _joined(self.brush, draw, BANK)
                self._stamp(drawn, here, self.rng.integers(0, BANK, len(here)))
                continue
            for start in range(0, len(here), BATCH):
                some = here[start : start + BATCH]
                self._stamp(draw(self.brush, len(some)), some, np.arange(len(some)))

    def _stamp(self, cells: Cells, centres: Array, which: Array) -> None:
        turns = self.rng.integers(0, 8, len(centres)).tolist()
        for (x, y), index, turn in zip(np.rint(centres).astype(int).tolist(), which.tolist(), turns, strict=True):
            left, top = max(x - EDGE, 0), max(y - EDGE, 0)
            across = slice(left - x + EDGE, SIDE - max(x + EDGE - self.width, 0))
            down = slice(top - y + EDGE, SIDE - max(y + EDGE - self.height, 0))
            stain, keep, plasma = (
                _turned(plane[index], turn)[down, across] for plane in (cells.stain, cells.keep, cells.plasma)
            )
            place = np.s_[top : top + stain.shape[0], left : left + stain.shape[1]]
            self.hematoxylin[place] = self.hematoxylin[place] * keep + stain
            self.eosin[place] = self.eosin[place] * keep + plasma

    def fold(self) -> None:
        """Fold the tissue along a few curves: twice the stain."""
        mask = Image.new("L", (self.width // 4, self.height // 4))
        pen = ImageDraw.Draw(mask)
        for _ in range(int(self.rng.poisson(self.height * self.width / 6e6))):
            at, heading = self.rng.uniform((0, 0), mask.size), self.rng.uniform(0, 6.3)
            wide, points = int(self.rng.integers(3, 12)), []
            for _ in range(12):
                points.append(tuple(at))
                at = at + 25 * np.array([np.cos(heading), np.sin(heading)])
                heading += self.rng.normal(0, 0.25)
            pen.line(points, fill=int(self.rng.integers(120, 255)), width=wide)
        folded = np.asarray(mask.filter(ImageFilter.GaussianBlur(1)).resize((self.width, self.height)))
        if folded.any():
            self.tissue &= folded < 20
            gain = 1 + folded.astype(np.float32) / 255
            self.hematoxylin *= gain
            self.eosin *= gain


class _Spacing:
    """Keeps centres apart, those that came first."""

    def __init__(self, apart: int) -> None:
        self._apart = apart
        self._cells: dict[tuple[int, int], list[tuple[float, float]]] = {}

    def take(self, centres: Array) -> Array:
        taken = [(x, y) for x, y in centres.tolist() if self._add(x, y)]
        return np.array(taken, np.float32).reshape(-1, 2)

    def _add(self, x: float, y: float) -> bool:
        column, row = int(x // self._apart), int(y // self._apart)
        for i in (-1, 0, 1):
            for j in (-1, 0, 1):
                for u, v in self._cells.get((column + i, row + j), ()):
                    if (u - x) ** 2 + (v - y) ** 2 < self._apart**2:
                        return False
        self._cells.setdefault((column, row), []).append((x, y))
        return True


def _common_places(rng: np.random.Generator, canvas: _Canvas, style: Style) -> Array:
    """Centres of ordinary nuclei, crowded in some regions."""
    count = float(rng.uniform(*style.density)) * canvas.height * canvas.width / 1e6
    places = canvas.places(2 * count, edge=0)
    crowd = _field(rng, ceil(canvas.height / 8), ceil(canvas.width / 8), 16)
    x, y = (places / 8).astype(int).T
    return places[rng.uniform(-1.2, 1.2, len(places)) < crowd[y, x]]


def _photograph(rng: np.random.Generator, canvas: _Canvas, style: Style) -> Array:
    """Light through the stains, blurred here and there, with noise."""
    stains = [np.array(group[rng.integers(len(group))]) for group in (style.hematoxylin, style.eosin)]
    jitter = rng.uniform(1 - style.stain_jitter, 1 + style.stain_jitter, (2, 4))
    nuclear, plasma = (
        (stain * change[:3] * change[3]).astype(np.float32) for stain, change in zip(stains, jitter, strict=True)
    )
    glass = np.array(style.glass, np.float32) * rng.uniform(0.95, 1.02)
    gamma = rng.uniform(0.85, 1.15)
    pixels = np.empty((canvas.height, canvas.width, 3), np.uint8)
    for top in range(0, canvas.height, STRIP):
        rows = np.s_[top : top + STRIP]
        density = canvas.hematoxylin[rows, :, None] * nuclear + canvas.eosin[rows, :, None] * plasma
        light = (glass * np.exp(-LN10 * density)) ** gamma
        pixels[rows] = np.clip(light * 255, 0, 255).astype(np.uint8)
    sharp = Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(float(rng.uniform(*style.blur_px))))
    pixels = np.array(sharp)
    for _ in range(int(rng.poisson(canvas.height * canvas.width / 4e6))):
        _defocus(rng, pixels)
    sigma = np.float32(rng.uniform(*style.noise))
    for top in range(0, canvas.height, STRIP):
        rows = pixels[top : top + STRIP]
        noise = rng.standard_normal(rows.shape, np.float32) * sigma
        rows[...] = np.clip(rows + noise, 0, 255).astype(np.uint8)
    return pixels


def _defocus(rng: np.random.Generator, pixels: Array) -> None:
    """Blur one round region, in place."""
    height, width, _ = pixels.shape
    radius = int(rng.integers(80, 300))
    top, left = int(rng.integers(0, height)), int(rng.integers(0, width))
    part = pixels[max(top - radius, 0) : top + radius, max(left - radius, 0) : left + radius]
    picture = Image.fromarray(part)
    mask = Image.new("L", picture.size)
    ImageDraw.Draw(mask).ellipse([radius // 6, radius // 6, *(side - radius // 6 for side in picture.size)], fill=255)
    mask = mask.filter(ImageFilter.GaussianBlur(radius / 10))
    blurred = picture.filter(ImageFilter.GaussianBlur(float(rng.uniform(1.0, 2.2))))
    part[...] = np.asarray(Image.composite(blurred, picture, mask))


def _dirt(rng: np.random.Generator, pixels: Array, figures: Array) -> Array:
    """Pen marks and granules of pigment, away from the figures."""
    height, width, _ = pixels.shape
    picture = Image.fromarray(pixels)
    pen = ImageDraw.Draw(picture)
    near = _Spacing(APART)
    near.take(figures)
    for _ in range(int(rng.poisson(height * width / 4e5))):
        x, y = rng.uniform((EDGE, EDGE), (width - EDGE, height - EDGE)).tolist()
        if not len(near.take(np.array([[x, y]]))):
            continue
        brown = tuple(int(part) for part in rng.integers((60, 30, 10), (110, 70, 40)))
        for across, down in rng.normal(0, 7, (int(rng.integers(3, 25)), 2)).tolist():
            size = float(rng.uniform(1, 4))
            pen.ellipse([x + across - size, y + down - size, x + across + size, y + down + size], fill=brown)
    dots = int(rng.poisson(height * width / 2e6))
    for x, y in rng.uniform((0, 0), (width, height), (dots, 2)).tolist():
        if not len(near.take(np.array([[x, y]]))):
            continue
        ink = ((20, 30, 60), (10, 60, 40), (25, 20, 25), (20, 20, 120))[int(rng.integers(4))]
        size = float(rng.uniform(4, 22))
        pen.ellipse([x - size, y - size * rng.uniform(0.4, 1), x + size, y + size], fill=ink)
    return np.array(picture)


def _joined(brush: Brush, draw: Draw, count: int) -> Cells:
    parts = [draw(brush, BATCH) for _ in range(ceil(count / BATCH))]
    return Cells(
        stain=np.concatenate([part.stain for part in parts]),
        keep=np.concatenate([part.keep for part in parts]),
        plasma=np.concatenate([part.plasma for part in parts]),
    )


def _turned(plane: Array, turn: int) -> Array:
    plane = np.rot90(plane, turn % 4)
    return plane.T if turn >= 4 else plane


def _field(rng: np.random.Generator, height: int, width: int, down_px: float, across_px: float | None = None) -> Array:
    """A smooth random field of mean 0 and variance about 1, `[H, W]` float32.

    Args:
        rng: Where the numbers come from.
        height: In pixels.
        width: In pixels.
        down_px: Distance of its independent values down.
        across_px: Across; as down by default.
    """
    across_px = across_px or down_px
    grid = rng.standard_normal((ceil(height / down_px) + 3, ceil(width / across_px) + 3), np.float32)
    box = (1.0, 1.0, 1 + width / across_px, 1 + height / down_px)
    smooth = Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC, box=box)
    return np.array(smooth) / np.float32(0.78)
