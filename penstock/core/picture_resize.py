"""Resize pictures by a compiled module, or by Pillow, which takes three to five times as long for the same numbers."""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from penstock.core.spec import Array

# Ratio of two sizes up to which no sum of rounded weights passes 255, where Pillow clips.
MAX_RATIO = 4_096


@cache
def compiled_resampling() -> ModuleType | None:
    """Return the module `picture_resample`; None where it is not compiled."""
    try:
        return import_module("penstock.core.picture_resample")
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
    # The order of the passes is that of Pillow 13: each rounds to 8 bits.
    by_rows = (True, False) if height - size[0] > max(0, 2 * (width - size[1])) else (False, True)
    for rows in by_rows:
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


def resize_image(image: Any, size: tuple[int, int] | None) -> Array:
    """Resize a Pillow image of mode L, RGB, or RGBA without transparency, as `resize_pixels` does."""
    if size is not None and compiled_resampling() is None:
        image = _by_pillow(image, size)
    return resize_pixels(np.asarray(image, np.uint8), size)


def _by_pillow(image: Any, size: tuple[int, int]) -> Any:
    from PIL import Image

    box = _is_smaller((image.height, image.width), size)
    return image.resize((size[1], size[0]), Image.Resampling.BOX if box else Image.Resampling.BILINEAR)


def _is_smaller(old: tuple[int, int], new: tuple[int, int]) -> bool:
    return new[0] <= old[0] and new[1] <= old[1]
