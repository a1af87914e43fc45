"""Write a picture as a slide: a pyramid of JPEG tiles in one TIFF file, as scanners write and OpenSlide reads it.

TIFF 6.0, sections 2 (structure), 15 (tiles) and 22 (JPEG, as Technical Note 2 amends it).
"""

import io
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from penstock.core.spec import Array

# H height, W width

TILE = 256
# A level of the pyramid is half as large as the one before; the last one has no side above this.
SMALLEST = 1024
QUALITY = 90
PIXEL_UM = 0.25

_SHORT, _LONG, _RATIONAL = 3, 4, 5
_SIZES = {_SHORT: "H", _LONG: "I", _RATIONAL: "II"}
_JPEG, _YCBCR, _CENTIMETRE, _REDUCED = 7, 6, 3, 1


def write_slide(file: str | Path, pixels_HW3: Array, *, quality: int = QUALITY, threads: int = 1) -> None:
    """Write a slide.

    Args:
        file: Where to; it is overwritten.
        pixels_HW3: uint8, 0.25 um a pixel.
        quality: Of the JPEG tiles, 1 to 95.
        threads: Threads that encode tiles.
    """
    with Path(file).open("wb") as out, ThreadPoolExecutor(threads) as pool:
        out.write(b"II*\0" + bytes(4))
        link, level = 4, 0
        while True:
            offsets: list[int] = []
            counts: list[int] = []
            for data in pool.map(lambda part: _encoded(part, quality), _tiles(pixels_HW3)):
                offsets.append(out.tell())
                counts.append(len(data))
                out.write(data)
            if out.tell() % 2:
                out.write(b"\0")
            at = out.tell()
            directory, link_at = _directory(pixels_HW3.shape, level, offsets, counts, at)
            out.write(directory)
            out.seek(link)
            out.write(struct.pack("<I", at))
            out.seek(0, io.SEEK_END)
            link, level = at + link_at, level + 1
            if max(pixels_HW3.shape[:2]) <= SMALLEST:
                return
            pixels_HW3 = np.asarray(Image.fromarray(pixels_HW3).reduce(2))


def _tiles(pixels_HW3: Array) -> Iterator[Array]:
    """The tiles from left to right and down, those at the edges continued."""
    height, width, _ = pixels_HW3.shape
    for top in range(0, height, TILE):
        for left in range(0, width, TILE):
            part = pixels_HW3[top : top + TILE, left : left + TILE]
            missing = [(0, TILE - part.shape[0]), (0, TILE - part.shape[1]), (0, 0)]
            yield np.pad(part, missing, mode="edge") if part.shape[:2] != (TILE, TILE) else part


def _encoded(part: Array, quality: int) -> bytes:
    data = io.BytesIO()
    Image.fromarray(part).save(data, "JPEG", quality=quality, subsampling=2)
    return data.getvalue()


def _directory(shape: tuple[int, ...], level: int, offsets: list[int], counts: list[int], at: int) -> tuple[bytes, int]:
    """The directory of one level at a position of the file, and where within it the link to the next one is."""
    per_centimetre = round(10_000 / PIXEL_UM) >> level
    # Tag, type and values, in the order of the tags.
    entries: list[tuple[int, int, list[int]]] = [
        (254, _LONG, [_REDUCED if level else 0]),
        (256, _LONG, [shape[1]]),
        (257, _LONG, [shape[0]]),
        (258, _SHORT, [8, 8, 8]),
        (259, _SHORT, [_JPEG]),
        (262, _SHORT, [_YCBCR]),
        (277, _SHORT, [3]),
        (282, _RATIONAL, [per_centimetre, 1]),
        (283, _RATIONAL, [per_centimetre, 1]),
        (284, _SHORT, [1]),
        (296, _SHORT, [_CENTIMETRE]),
        (322, _SHORT, [TILE]),
        (323, _SHORT, [TILE]),
        (324, _LONG, offsets),
        (325, _LONG, counts),
        (530, _SHORT, [2, 2]),
    ]
    link_at = 2 + 12 * len(entries)
    head, body = struct.pack("<H", len(entries)), b""
    for tag, kind, values in entries:
        code = _SIZES[kind]
        packed = struct.pack(f"<{len(values)}{code[0]}", *values)
        if len(packed) > 4:
            place = struct.pack("<I", at + link_at + 4 + len(body))
            body += packed + bytes(len(packed) % 2)
        else:
            place = packed.ljust(4, b"\0")
        head += struct.pack("<HHI", tag, kind, len(values) // len(code)) + place
    return head + bytes(4) + body, link_at
