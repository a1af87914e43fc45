"""Resampling of 8-bit pixels, compiled from picture_resample.c: each function is one pass of Pillow's (decision 083).

Up to 16,000 pixels may be averaged to one: with more, a sum of rounded weights may pass 255.
"""

from penstock.core.spec import Array

# The digest of picture_resample.c.
COMPILED_FROM: str

def resample_columns(
    pixels: Array,
    shape: tuple[int, int, int],
    resized: Array,
    width: int,
    box: bool,
    begin: float = ...,
    end: float = ...,
    /,
) -> None:
    """Resample the columns of a picture, with the numbers of Pillow's `Image.resize`.

    Args:
        pixels: uint8, contiguous.
        shape: Its height, width and number of channels, 1 to 4.
        resized: Where the result goes: uint8 `[H, width, channels]`, contiguous.
        width: The new width.
        box: Average by boxes; otherwise interpolate linearly.
        begin: Where the part begins that is resampled, in columns; 0 by default.
        end: Where it ends; the width by default.

    Raises:
        ValueError: The number of bytes is another, or there is no such part.
        MemoryError: There is no memory for the weights.
    """

def resample_rows(
    pixels: Array,
    rows: int,
    resized: Array,
    new_height: int,
    box: bool,
    begin: float = ...,
    end: float = ...,
    top: int = ...,
    height: int = ...,
    /,
) -> None:
    """Resample the rows of a picture, as `resample_columns` does the columns.

    Args:
        pixels: uint8, contiguous.
        rows: Its rows.
        resized: Where the result goes: uint8 `[new_height, ...]`, contiguous.
        new_height: The new height.
        box: See `resample_columns`.
        begin: Where the part begins, in rows of the whole picture; 0 by default.
        end: Where it ends; the height by default.
        top: The first of the given rows, where they are a part of the picture; 0 by default.
        height: Rows of the whole picture; those that are given by default.

    Raises:
        ValueError: See `resample_columns`; or other rows are needed than those that are given.
        MemoryError: See `resample_columns`.
    """
