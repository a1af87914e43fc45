"""Resampling of 8-bit pixels, compiled from picture_resample.c: each function is one pass of Pillow's (decision 083).

Up to 16,000 pixels may be averaged to one: with more, a sum of rounded weights may pass 255.
"""

from penstock.core.spec import Array

# The digest of picture_resample.c.
COMPILED_FROM: str

def resample_columns(pixels: Array, shape: tuple[int, int, int], resized: Array, width: int, box: bool, /) -> None:
    """Resample the columns of a picture, with the numbers of Pillow's `Image.resize`.

    Args:
        pixels: uint8, contiguous.
        shape: Its height, width and number of channels, 1 to 4.
        resized: Where the result goes: uint8 `[H, width, channels]`, contiguous.
        width: The new width.
        box: Average by boxes; otherwise interpolate linearly.

    Raises:
        ValueError: The number of bytes is another.
        MemoryError: There is no memory for the weights.
    """

def resample_rows(pixels: Array, height: int, resized: Array, new_height: int, box: bool, /) -> None:
    """Resample the rows of a picture, as `resample_columns` does the columns.

    Args:
        pixels: uint8, contiguous.
        height: Its height.
        resized: Where the result goes: uint8 `[new_height, ...]`, contiguous.
        new_height: The new height.
        box: See `resample_columns`.

    Raises:
        ValueError: See `resample_columns`.
        MemoryError: See `resample_columns`.
    """
