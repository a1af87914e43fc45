"""What a picture file holds beside its pixels is counted before it is read."""

import io
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from penstock.core.decode import decode_image
from penstock.core.errors import RequestError
from penstock.core.pictures.picture_bounds import check_pieces


def file_of(kind: str, size: tuple[int, int] = (8, 8), **options: object) -> bytes:
    sink = io.BytesIO()
    Image.new("L", size).save(sink, kind, **options)
    return sink.getvalue()


PNG, JPEG, GIF = map(file_of, ("PNG", "JPEG", "GIF"))
AFTER_HEADER = 33
BLOCKS = GIF.index(b",", 13)


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def segment(marker: int, data: bytes = b"") -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def png(*chunks: bytes) -> bytes:
    return PNG[:AFTER_HEADER] + b"".join(chunks) + PNG[AFTER_HEADER:]


def jpeg(*segments: bytes) -> bytes:
    return JPEG[:2] + b"".join(segments) + JPEG[2:]


def gif(*blocks: bytes) -> bytes:
    return GIF[:BLOCKS] + b"".join(blocks) + GIF[BLOCKS:]


def tags(count: int, order: str = "<") -> bytes:
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    entries = (struct.pack(f"{order}HHII", 1_000 + each, 3, 10_000, 20) for each in range(count))
    return head + struct.pack(f"{order}H", count) + b"".join(entries) + bytes(4)


MANY = {
    "empty texts": png(chunk(b"tEXt", b"a\0b") * 3_000),
    "unknown chunks": png(chunk(b"abCd") * 3_000),
    "chunks of one byte of pixels": png(*[chunk(b"IDAT", b"x")] * 3_000),
    "comments of JPEG": jpeg(segment(0xFE) * 11_000),
    "tables": jpeg(segment(0xDB, bytes(65)) * 600),
    "markers that stand alone": jpeg(b"\xff\xd0" * 20_000),
    "fill bytes": jpeg(b"\xff" * 40_000),
    "bytes between segments": jpeg(segment(0xFE), b"\0" * 40_000),
    "a comment of GIF in blocks of one byte": gif(b"!\xfe", b"\1a" * 22_000, b"\0"),
    "comments of GIF": gif(b"!\xfe\1a\0" * 9_000),
    "bytes between blocks": gif(b"x" * 40_000),
    "tags of JPEG": jpeg(segment(0xE1, b"Exif\0\0" + tags(3_000))),
    "tags of the other byte order": jpeg(segment(0xE1, b"Exif\0\0" + tags(3_000, ">"))),
    "tags of several pictures": jpeg(segment(0xE2, b"MPF\0" + tags(3_000))),
    "tags of PNG": png(chunk(b"eXIf", tags(60_000))),
}


@pytest.mark.parametrize("body", MANY.values(), ids=MANY)
def test_many_pieces_are_refused_before_they_are_read(body: bytes) -> None:
    begin_s = time.process_time()
    with pytest.raises(RequestError, match=r"more than \d+ (chunks|segments|blocks)|tags; at most 256|damaged: other"):
        decode_image(body, mode="L")
    # Pillow takes 3 to 30 ms.
    assert time.process_time() - begin_s < 0.1


@pytest.mark.parametrize(
    "body",
    [
        png(chunk(b"tEXt", b"a\0b") * 200, chunk(b"eXIf", tags(40))),
        jpeg(segment(0xE1, b"Exif\0\0" + tags(40)), segment(0xFE, b"a comment") * 200),
        gif(b"!\xfe", b"\7comment" * 200, b"\0"),
    ],
    ids=["PNG", "JPEG", "GIF"],
)
def test_a_few_hundred_pieces_are_read(body: bytes) -> None:
    assert decode_image(body, mode="L").shape == (8, 8)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_large_pictures_pass(kind: str) -> None:
    sink = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (900, 900, 3), np.uint8)
    Image.fromarray(noise).save(sink, kind)
    check_pieces(sink.getvalue())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP"])
def test_beginnings_and_damaged_files_end_as_refusals_or_pass(kind: str) -> None:
    whole, rng = file_of(kind), np.random.default_rng(0)
    for end in range(len(whole)):
        check_pieces(whole[:end])
    for _ in range(2_000):
        damaged = bytearray(whole)
        for at in rng.integers(2, len(whole), 3):
            damaged[at] = rng.integers(256)
        try:
            check_pieces(bytes(damaged))
        except RequestError:
            continue
