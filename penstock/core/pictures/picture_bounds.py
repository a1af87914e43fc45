"""Bounds of what a picture file holds beside its pixels: Pillow reads it piece by piece in Python.

Thousands of empty chunks, or of tags, take as long as a million pixels. They are counted here before Pillow sees them.
"""

import struct

from penstock.core.errors import InvalidInput, TooLarge

PNG, JPEG, GIF, BMP = b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"GIF8", b"BM"
# A file may have so many chunks, segments or blocks, and one more for so many of its bytes. Encoders write a dozen, and
# chunks of pixels of 8 KiB and more; blocks of a GIF have 255 bytes at most.
MAX_PIECES, BYTES_A_PIECE, BYTES_A_BLOCK = 256, 256, 64
# Tags of a picture; cameras write about twenty.
MAX_TAGS = 256
# Colours of a palette. Pillow reads 65,536 from a BMP.
MAX_COLORS = 256
# Size of the header, bits of a pixel, and colours of the palette.
_BMP_HEADER, _BMP_BITS, _BMP_COLORS = 14, 28, 46
# Pillow takes nothing else for a JPEG.
_JPEG_START = JPEG + b"\xff"
_PNG_CHUNK = struct.Struct(">I4s")
# Of markers of JPEG: the one that pixels follow, and those without a length, for Pillow.
_SCAN, _ALONE = 0xDA, frozenset((0x00, 0x01, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE), 0xFF))
# Markers of segments with tags, and how these begin.
_TAGS = {0xE1: b"Exif\0\0", 0xE2: b"MPF\0"}


def check_pieces(body: bytes) -> None:
    """Check that a picture has not too many pieces beside its pixels; other files and damaged ones pass.

    Raises:
        TooLarge: Too many chunks, segments, blocks or tags.
        InvalidInput: Too many bytes between segments or blocks, or a BMP with too many colours.
    """
    if body.startswith(PNG):
        _check_png(body)
    elif body.startswith(_JPEG_START):
        _check_jpeg(body)
    elif body.startswith(GIF):
        _check_gif(body)
    elif body.startswith(BMP):
        _check_bmp(body)


def _check_png(body: bytes) -> None:
    at, size = len(PNG), len(body)
    most = MAX_PIECES + size // BYTES_A_PIECE
    for _ in range(most):
        if at + _PNG_CHUNK.size > size:
            return
        length, kind = _PNG_CHUNK.unpack_from(body, at)
        if kind == b"IEND":
            return
        if kind == b"eXIf":
            _check_tags(body, at + _PNG_CHUNK.size)
        at += 12 + length
    raise _too_many("chunks", most)


def _check_jpeg(body: bytes) -> None:
    at, size = len(JPEG), len(body)
    most, between = MAX_PIECES + size // BYTES_A_PIECE, 0
    for _ in range(most):
        if at + 4 > size:
            return
        marker = body[at + 1]
        if body[at] != 0xFF or marker == 0xFF:
            between += 1
            at += 1
        elif marker in _ALONE:
            between += not marker
            at += 2
        elif marker == _SCAN:
            return
        else:
            begin = _TAGS.get(marker)
            if begin is not None and body.startswith(begin, at + 4):
                _check_tags(body, at + 4 + len(begin))
            at += 2 + max(2, body[at + 2] << 8 | body[at + 3])
    raise _damaged("segments") if between > most // 2 else _too_many("segments", most)


def _check_gif(body: bytes) -> None:
    size = len(body)
    if size < 13:
        return
    palette = 3 << (body[10] & 7) + 1 if body[10] & 0x80 else 0
    at, most, between, is_block = 13 + palette, MAX_PIECES + size // BYTES_A_BLOCK, 0, False
    for _ in range(most):
        if at >= size:
            return
        first = body[at]
        if is_block:
            at += 1 + first
            is_block = first > 0
        elif first in b",;":
            return
        elif first == ord("!"):
            at += 2
            is_block = True
        else:
            between += 1
            at += 1
    raise _damaged("blocks") if between > most // 2 else _too_many("blocks", most)


def _check_bmp(body: bytes) -> None:
    if len(body) < _BMP_COLORS + 4:
        return
    (header,), (bits,) = struct.unpack_from("<I", body, _BMP_HEADER), struct.unpack_from("<H", body, _BMP_BITS)
    (colors,) = struct.unpack_from("<I", body, _BMP_COLORS)
    if header >= 40 and bits <= 8 and colors > MAX_COLORS:
        raise InvalidInput(f"The BMP has a palette of {colors:,} colours; at most {MAX_COLORS} are taken.")


def _check_tags(body: bytes, at: int) -> None:
    """Check the number of tags in the directory of a TIFF header, which may go on in another segment."""
    order = "<" if body.startswith(b"II", at) else ">"
    if at + 8 > len(body):
        return
    (offset,) = struct.unpack_from(f"{order}I", body, at + 4)
    if at + offset + 2 > len(body):
        return
    (tags,) = struct.unpack_from(f"{order}H", body, at + offset)
    if tags > MAX_TAGS:
        raise TooLarge(f"The picture has {tags:,} tags; at most {MAX_TAGS} are taken. Save it without them.")


def _damaged(pieces: str) -> InvalidInput:
    return InvalidInput(f"The picture is damaged: other bytes are between its {pieces}; send the whole file.")


def _too_many(pieces: str, most: int) -> TooLarge:
    return TooLarge(f"The picture has more than {most:,} {pieces}, the most that are taken of its size. Save it again.")
