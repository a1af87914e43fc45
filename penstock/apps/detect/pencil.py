"""Drawing with an account of what can be seen: every object has a silhouette, and later ones hide earlier ones."""

from typing import final

import numpy as np
from PIL import Image, ImageDraw

from penstock.core.spec import Array

# H height, W width, n objects

Point = tuple[float, float]
Colour = tuple[float, float, float]

# Shapes are drawn larger and scaled down, so that their edges are smooth.
OVERSAMPLING = 2


@final
class Pencil:
    """A picture, and the number of the object that is seen in each pixel.

    Args:
        height: In pixels of the finished picture, as all coordinates are.
        width: As `height`.
    """

    def __init__(self, height: int, width: int) -> None:
        self.height, self.width = height, width
        size = (width * OVERSAMPLING, height * OVERSAMPLING)
        self._picture = Image.new("RGB", size)
        self._owner = Image.new("I", size, 0)
        self._draw, self._mark = ImageDraw.Draw(self._picture), ImageDraw.Draw(self._owner)
        self._number = 0
        self._extents: list[list[float]] = []
        self.haze: Colour = (0, 0, 0)
        self.haze_share = 0.0

    def begin_object(self) -> None:
        """Begin an object; everything drawn until `end_object` adds to its silhouette."""
        self._extents.append([np.inf, np.inf, -np.inf, -np.inf])
        self._number = len(self._extents)

    def end_object(self) -> None:
        """End the object; later drawing covers it."""
        self._number = 0

    def polygon(self, points: list[Point], colour: Colour) -> None:
        """Draw a filled polygon."""
        self._seen(points)
        large = [(x * OVERSAMPLING, y * OVERSAMPLING) for x, y in points]
        self._draw.polygon(large, fill=self._mixed(colour))
        self._mark.polygon(large, fill=self._number)

    def box(self, x0: float, y0: float, x1: float, y1: float, colour: Colour, round_px: float = 0.0) -> None:
        """Draw a filled rectangle."""
        if x1 - x0 < 0.3 or y1 - y0 < 0.3:
            return
        self._seen([(x0, y0), (x1, y1)])
        large = (x0 * OVERSAMPLING, y0 * OVERSAMPLING, x1 * OVERSAMPLING - 1, y1 * OVERSAMPLING - 1)
        if large[2] <= large[0] or large[3] <= large[1]:
            return
        self._draw.rounded_rectangle(large, radius=round_px * OVERSAMPLING, fill=self._mixed(colour))
        self._mark.rectangle(large, fill=self._number)

    def disc(self, x: float, y: float, wide: float, high: float, colour: Colour) -> None:
        """Draw a filled ellipse about a centre, of these radii."""
        self._seen([(x - wide, y - high), (x + wide, y + high)])
        large = tuple(at * OVERSAMPLING for at in (x - wide, y - high, x + wide, y + high))
        if large[2] - large[0] < 1 or large[3] - large[1] < 1:
            return
        self._draw.ellipse(large, fill=self._mixed(colour))
        self._mark.ellipse(large, fill=self._number)

    def line(self, start: Point, end: Point, width: float, colour: Colour) -> None:
        """Draw a line."""
        half = width / 2
        self._seen([(x + side, y) for x, y in (start, end) for side in (-half, half)])
        large = [(x * OVERSAMPLING, y * OVERSAMPLING) for x, y in (start, end)]
        thick = max(1, round(width * OVERSAMPLING))
        self._draw.line(large, fill=self._mixed(colour), width=thick)
        self._mark.line(large, fill=self._number, width=thick)

    def boxes(self) -> tuple[Array, Array]:
        """The extent of each object within the picture, float32 `[n, 4]`, and the visible share of it, `[n]`."""
        count = len(self._extents)
        owner = np.asarray(self._owner)
        seen = np.bincount(owner.ravel(), minlength=count + 1)[1:] / OVERSAMPLING**2
        boxes = np.array(self._extents, np.float64).reshape(-1, 4)
        boxes[:, 0::2] = boxes[:, 0::2].clip(0, self.width)
        boxes[:, 1::2] = boxes[:, 1::2].clip(0, self.height)
        area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        return boxes.astype(np.float32), seen / np.maximum(area, 1e-6)

    def pixels(self) -> Array:
        """The picture, float32 `[H, W, 3]`, 0 to 255."""
        small = self._picture.resize((self.width, self.height), Image.Resampling.BOX)
        return np.asarray(small, np.float32)

    def _seen(self, points: list[Point]) -> None:
        if self._number:
            extent = self._extents[self._number - 1]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            extent[:] = [min(extent[0], *xs), min(extent[1], *ys), max(extent[2], *xs), max(extent[3], *ys)]

    def _mixed(self, colour: Colour) -> tuple[int, int, int]:
        share = self.haze_share
        red, green, blue = (
            round(min(255.0, max(0.0, own * (1 - share) + haze * share)))
            for own, haze in zip(colour, self.haze, strict=True)
        )
        return red, green, blue
