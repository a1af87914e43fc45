"""Headers of plain JPEG files, beside what Pillow reads of them."""

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.core.pictures.jpeg_header import PlainJpeg, plain_jpeg
from tests.support.pictures import smooth


def jpeg(mode: str = "RGB", **options: Any) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(smooth(1, 30, 50)).convert(mode).save(sink, "JPEG", **options)
    return sink.getvalue()


PLAIN = jpeg()


@pytest.mark.parametrize(
    "options", [{}, {"subsampling": 0}, {"quality": 95}, {"comment": b"words"}, {"optimize": True}]
)
def test_files_as_most_encoders_write_them_are_plain(options: dict[str, Any]) -> None:
    assert plain_jpeg(jpeg(**options)) == PlainJpeg(30, 50, 3)
    assert plain_jpeg(jpeg("L", **options)) == PlainJpeg(30, 50, 1)


def test_files_of_which_pillow_knows_more_are_not() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for body in (
        jpeg(exif=exif),
        jpeg(progressive=True),
        jpeg("CMYK"),
        jpeg(icc_profile=bytes(200)),
        jpeg().replace(b"JFIF\0", b"JFXX\0"),
        b"",
        b"\xff\xd8",
        b"\x89PNG\r\n\x1a\n" + bytes(100),
    ):
        assert plain_jpeg(body) is None


@given(st.integers(0, len(PLAIN)))
def test_a_header_that_is_cut_is_not_plain(end: int) -> None:
    found = plain_jpeg(PLAIN[:end])
    assert found is None or found == PlainJpeg(30, 50, 3)
    assert found is None or end > PLAIN.index(b"\xff\xda")


@given(st.lists(st.tuples(st.integers(0, PLAIN.index(b"\xff\xda") + 13), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=300)
def test_what_pillow_does_not_open_or_reads_otherwise_is_not_plain(changes: list[tuple[int, int]]) -> None:
    body = bytearray(PLAIN)
    for at, value in changes:
        body[at] = value
    found = plain_jpeg(bytes(body))
    if found is None:
        return
    with Image.open(io.BytesIO(bytes(body)), formats=["JPEG"]) as image:
        assert (image.height, image.width) == found[:2]
        assert len(image.getbands()) == found.channels
        assert image.getexif().get(0x0112, 1) == 1
