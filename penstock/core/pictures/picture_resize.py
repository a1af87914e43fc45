"""Resize pictures by a compiled module, or by Pillow, which takes three to ten times as long for the same numbers."""

import math
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from penstock.core.spec import Array

# Ratio of two sizes up to which no sum of rounded weights passes 255, where Pillow clips.
MAX_RATIO = 4_096
# Ratio of two sizes from which Pillow's `reducing_gap=2.0` reduces a picture before it is interpolated.
_REDUCED = 4.0


@cache
def compiled_resampling() -> ModuleType | None:
    """Return the module `picture_resample`; None where it is not compiled."""
    try:
        return import_module("penstock.core.pictures.picture_resample")
    except ModuleNotFoundError:
        return None


def resize_pixels(pixels: Array, size: tuple[int, int] | None) -> Array:
    """Resize pixels as Pillow does, by averaging, or by interpolation where a side is to be longer.

    Args:
        pixels: uint8 `[H, W]`, `[H, W, 3]`, or `[H, W, 4]` with 255 as the fourth channel; contiguous.
        size: Height and width of the result; None for those that they have.
    """
    height, width, *channels = pixels.shape
    if size is None or (height, width) == size:
        return pixels
    resampling = compiled_resampling()
    if resampling is None or height > MAX_RATIO * size[0] or width > MAX_RATIO * size[1]:
        from PIL import Image

        return np.asarray(_by_pillow(Image.fromarray(pixels), size))
    box = _is_smaller((height, width), size)
    for rows in (True, False) if _rows_first((height, width), size) else (False, True):
        shape = pixels.shape
        if rows and shape[0] != size[0]:
            resized = np.empty((size[0], *shape[1:]), np.uint8)
            resampling.resample_rows(pixels, shape[0], resized, size[0], box)
            pixels = resized
        elif not rows and shape[1] != size[1]:
            resized = np.empty((shape[0], size[1], *channels), np.uint8)
            resampling.resample_columns(pixels, (*shape[:2], *channels, 1)[:3], resized, size[1], box)
            pixels = resized
    return pixels


def resize_part(picture: Any, size: tuple[int, int], part: tuple[float, float, float, float]) -> Array:
    """Resize a part of a picture by interpolation, as Pillow does with `reducing_gap=2.0`.

    Args:
        picture: uint8 `[H, W]` or `[H, W, 3]`, contiguous; or a Pillow image of mode L or RGB.
        size: Height and width of the result.
        part: Left, top, right and bottom of the part in pixels.
    """
    left, top, right, bottom = part
    down, across = (bottom - top) / size[0], (right - left) / size[1]
    resampling = compiled_resampling()
    # Before a part of four times the size is interpolated, Pillow takes the averages of whole pixels.
    if resampling is None or max(down, across) >= _REDUCED:
        from PIL import Image

        whole = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
        return np.asarray(whole.resize((size[1], size[0]), Image.Resampling.BILINEAR, part, reducing_gap=2.0))
    pixels = np.asarray(picture, np.uint8)
    height, width, *channels = pixels.shape
    if _rows_first((height, width), size):
        high = np.empty((size[0], width, *channels), np.uint8)
        resampling.resample_rows(pixels, height, high, size[0], False, top, bottom)
        return _columns_of(high, size[1], left, right)
    # The rows that an output of the part takes in, and one more on each side for rounding.
    reach = max(1.0, down) + 1
    first = max(0, math.floor(top - reach))
    wide = _columns_of(pixels[first : math.ceil(bottom + reach)], size[1], left, right)
    resized = np.empty((*size, *channels), np.uint8)
    resampling.resample_rows(wide, len(wide), resized, size[0], False, top, bottom, first, height)
    return resized


def _columns_of(pixels: Array, new_width: int, left: float, right: float) -> Array:
    height, width, *channels = pixels.shape
    resampling = compiled_resampling()
    assert resampling is not None
    resized = np.empty((height, new_width, *channels), np.uint8)
    resampling.resample_columns(pixels, (height, width, *channels, 1)[:3], resized, new_width, False, left, right)
    return resized


def resize_image(image: Any, size: tuple[int, int] | None) -> Array:
    """Resize a Pillow image of mode L, RGB, or RGBA without transparency, as `resize_pixels` does."""
    if size is not None and compiled_resampling() is None:
        image = _by_pillow(image, size)
    return resize_pixels(np.asarray(image, np.uint8), size)


def _by_pillow(image: Any, size: tuple[int, int]) -> Any:
    from PIL import Image

    box = _is_smaller((image.height, image.width), size)
    return image.resize((size[1], size[0]), Image.Resampling.BOX if box else Image.Resampling.BILINEAR)


def _rows_first(old: tuple[int, int], new: tuple[int, int]) -> bool:
    # The order of the passes is that of Pillow 13: each rounds to 8 bits.
    return old[0] - new[0] > max(0, 2 * (old[1] - new[1]))


def _is_smaller(old: tuple[int, int], new: tuple[int, int]) -> bool:
    return new[0] <= old[0] and new[1] <= old[1]
