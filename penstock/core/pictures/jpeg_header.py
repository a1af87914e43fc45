"""Headers of JPEG files as most encoders write them, read without Pillow, which takes 20 times as long."""

from typing import NamedTuple

from penstock.core.pictures.picture_bounds import JPEG

# Markers of segments: JFIF's, quantization tables, the frame of a baseline picture, and the scan, which pixels follow.
_JFIF, _TABLES, _FRAME, _SCAN = 0xE0, 0xDB, 0xC0, 0xDA
# Those that Pillow does not interpret: Huffman tables, restart interval, comment.
_OTHERS = frozenset((0xC4, 0xDD, 0xFE))
# Segments of a file; encoders write about eight.
MOST_SEGMENTS = 32
# A quantization table of 8 bits has a byte for its number, below 4, and 64 values.
_TABLE_BYTES, _TABLE_COUNT = 65, 4
# Length of JFIF's segment without a thumbnail, and how it begins.
_JFIF_BYTES, _JFIF_BEGIN = 16, b"JFIF\0"


class PlainJpeg(NamedTuple):
    """Size and channels of a plain JPEG.

    Args:
        height: In pixels.
        width: In pixels.
        channels: 1 for grey, 3 for colour.
    """

    height: int
    width: int
    channels: int


def plain_jpeg(body: bytes) -> PlainJpeg | None:
    """Read the header of a plain JPEG: baseline, of 8 bits, grey or colour in one scan, without metadata.

    It has no orientation, no profile and no other colours than JFIF's, so that Pillow knows no more about it.

    Args:
        body: The file's bytes.

    Returns:
        None for every other file, damaged ones included; only of what follows the header nothing is known.
    """
    if not body.startswith(JPEG):
        return None
    at, size, found = len(JPEG), len(body), None
    for _ in range(MOST_SEGMENTS):
        if at + 4 > size or body[at] != 0xFF:
            return None
        marker, length = body[at + 1], body[at + 2] << 8 | body[at + 3]
        end = at + 2 + length
        if end > size:
            return None
        if marker == _SCAN:
            # All channels in this scan, from the first coefficient to the last.
            whole = found is not None and length == 6 + 2 * found.channels and body[at + 4] == found.channels
            return found if whole and body[end - 3 : end] == b"\x00\x3f\x00" else None
        if marker == _FRAME:
            channels = body[at + 9] if length > 8 else 0
            if found is not None or channels not in (1, 3) or length != 8 + 3 * channels or body[at + 4] != 8:
                return None
            found = PlainJpeg(body[at + 5] << 8 | body[at + 6], body[at + 7] << 8 | body[at + 8], channels)
            if not (found.height and found.width):
                return None
        elif marker == _TABLES:
            if not _has_whole_tables(body, at + 4, end):
                return None
        elif marker == _JFIF:
            if length != _JFIF_BYTES or not body.startswith(_JFIF_BEGIN, at + 4):
                return None
        elif marker not in _OTHERS or length < 2:
            return None
        at = end
    return None


def _has_whole_tables(body: bytes, begin: int, end: int) -> bool:
    if begin >= end or (end - begin) % _TABLE_BYTES:
        return False
    return all(body[at] < _TABLE_COUNT for at in range(begin, end, _TABLE_BYTES))
