"""JPEG by libjpeg-turbo alone and by Pillow: the same pixels, the same refusals, at any fraction of the size."""

import io
import itertools
import struct
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.core import decode
from penstock.core.decode import MAX_SCANS, decode_image, decode_scaled, decoded_pixels, jpeg_decoder, slow_jpeg
from penstock.core.errors import InvalidInput, RequestError, TooLarge
from penstock.serve.frontend.decode_pool import is_small_picture
from tests.support.pictures import smooth

MODES: tuple[decode.Mode, ...] = ("L", "RGB", "RGBA")
ORIENTATIONS = range(10)


def jpeg(height: int, width: int, mode: str = "RGB", orientation: int = 0, **options: Any) -> bytes:
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    sink = io.BytesIO()
    Image.fromarray(smooth(height * width, height, width)).convert(mode).save(sink, "JPEG", exif=exif, **options)
    return sink.getvalue()


def plain(height: int, width: int, mode: str = "RGB") -> bytes:
    """A file without metadata, which is opened without Pillow."""
    sink = io.BytesIO()
    Image.fromarray(smooth(height * width, height, width)).convert(mode).save(sink, "JPEG")
    return sink.getvalue()


def both(monkeypatch: pytest.MonkeyPatch, body: bytes, **how: Any) -> list[Any]:
    """The pixels, or the error, without and with Pillow alone."""
    given: dict[str, Any] = {"mode": "RGB", "size": None, "max_pixels": 1 << 22, "at_least": None} | how
    found: list[Any] = []
    for alone in (False, True):
        with monkeypatch.context() as patch:
            if alone:
                patch.setattr(decode, "jpeg_decoder", lambda: None)
            try:
                found.append(decode_scaled(body, **given))
            except RequestError as error:
                found.append((type(error), str(error)))
    return found


def assert_alike(monkeypatch: pytest.MonkeyPatch, body: bytes, **how: Any) -> Any:
    fast, slow = both(monkeypatch, body, **how)
    if isinstance(slow, np.ndarray):
        assert isinstance(fast, np.ndarray), fast
        assert fast.dtype == np.uint8
        assert fast.shape == slow.shape
        assert np.array_equal(fast, slow)
    else:
        assert fast == slow
    return fast


def test_the_fast_decoder_is_installed_here() -> None:
    assert jpeg_decoder() is not None
    assert slow_jpeg() == ""


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"subsampling": 1}, {"progressive": True}])
@pytest.mark.parametrize("kind", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("mode", MODES)
def test_pixels_are_those_of_pillow(
    monkeypatch: pytest.MonkeyPatch, mode: str, kind: str, options: dict[str, Any]
) -> None:
    for height, width in ((1, 1), (7, 9), (8, 16), (61, 90)):
        assert_alike(monkeypatch, jpeg(height, width, kind, **options), mode=mode)
        assert_alike(monkeypatch, jpeg(height, width, kind, **options), mode=mode, size=(5, 6))


def test_most_jpegs_are_not_decoded_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.JpegImagePlugin.JpegImageFile.load", lambda self: pytest.fail("decoded by Pillow"))
    for kind, mode in itertools.product(("L", "RGB"), MODES):
        assert decode_image(jpeg(20, 30, kind), mode=mode).shape[:2] == (20, 30)
    assert decode_image(jpeg(20, 30, orientation=6), mode="RGB").shape == (30, 20, 3)


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("at_least", [None, (10, 20), (20, 10)])
def test_pictures_are_upright(monkeypatch: pytest.MonkeyPatch, orientation: int, at_least: Any) -> None:
    body = jpeg(40, 90, orientation=orientation)
    for mode in MODES:
        assert_alike(monkeypatch, body, mode=mode, at_least=at_least)
    pixels = assert_alike(monkeypatch, body, at_least=at_least)
    assert (pixels.shape[0] > pixels.shape[1]) == (orientation in (5, 6, 7, 8))


def test_of_several_pictures_in_a_file_the_first_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.BytesIO()
    first, second = (Image.fromarray(smooth(seed, 30, 40)) for seed in (1, 2))
    first.save(sink, "MPO", save_all=True, append_images=[second])
    pixels = assert_alike(monkeypatch, sink.getvalue())
    assert np.abs(pixels.astype(int) - np.asarray(first)).mean() < 4


@pytest.mark.parametrize(
    ("size", "at_least", "decoded"),
    [
        ((400, 600), (50, 75), (50, 75)),
        ((400, 600), (51, 75), (100, 150)),
        ((400, 600), (100, 100), (100, 150)),
        ((400, 600), (200, 1), (200, 300)),
        ((400, 600), (201, 1), (400, 600)),
        ((401, 603), (50, 75), (51, 76)),
        ((401, 603), (401, 604), (401, 603)),
        ((16, 9), (1, 1), (2, 2)),
        ((7, 900), (1, 1), (7, 900)),
    ],
)
@pytest.mark.parametrize("kind", ["RGB", "L", "CMYK"])
def test_a_large_jpeg_is_decoded_at_the_smallest_fraction_that_is_enough(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], at_least: Any, decoded: tuple[int, int], kind: str
) -> None:
    pixels = assert_alike(monkeypatch, jpeg(*size, kind), at_least=at_least)
    assert pixels.shape[:2] == decoded


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"subsampling": 1}, {"progressive": True}])
def test_every_fraction_has_the_same_pixels_in_both_decoders(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    for height, width in itertools.product((8, 9, 15, 17, 33, 100), (8, 13, 24, 71)):
        for fraction in (2, 4, 8):
            at_least = -(-height // fraction), -(-width // fraction)
            pixels = assert_alike(monkeypatch, jpeg(height, width, **options), at_least=at_least)
            assert pixels.shape[:2] == at_least


def test_a_picture_at_a_fraction_of_its_size_is_near_the_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    body = jpeg(480, 640, quality=90)
    whole = decode_image(body, mode="RGB").astype(float)
    for fraction in (2, 4, 8):
        means = whole.reshape(480 // fraction, fraction, 640 // fraction, fraction, 3).mean((1, 3))
        pixels = assert_alike(monkeypatch, body, at_least=(480 // fraction, 640 // fraction))
        assert np.abs(pixels - means).mean() < 1.0


def test_other_formats_are_decoded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = io.BytesIO()
    Image.fromarray(smooth(3, 64, 64)).save(sink, "PNG")
    assert assert_alike(monkeypatch, sink.getvalue(), at_least=(8, 8)).shape == (64, 64, 3)


WHOLE = [
    jpeg(33, 47),
    jpeg(33, 47, progressive=True),
    jpeg(24, 24, "L", subsampling=0),
    jpeg(20, 40, "CMYK"),
    jpeg(40, 20, orientation=6),
    plain(33, 47),
    plain(24, 24, "L"),
]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    whole=st.sampled_from(WHOLE),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6),
    end=st.floats(0, 1),
    more=st.binary(max_size=8),
    at_least=st.sampled_from([None, (4, 4)]),
    mode=st.sampled_from(MODES),
)
@example(whole=WHOLE[0], changes=[], end=0.9, more=b"", at_least=None, mode="RGB")
@example(whole=WHOLE[1], changes=[], end=0.5, more=b"\xff\xd9", at_least=(4, 4), mode="L")
@example(whole=WHOLE[5], changes=[], end=1.0, more=b"\xff\xda", at_least=None, mode="RGB")
@example(whole=WHOLE[5], changes=[], end=0.9, more=b"\xff\xda", at_least=None, mode="RGB")
def test_damaged_files_are_read_or_refused_as_by_pillow_alone(
    monkeypatch: pytest.MonkeyPatch,
    whole: bytes,
    changes: list[tuple[float, int]],
    end: float,
    more: bytes,
    at_least: Any,
    mode: str,
) -> None:
    body = bytearray(whole)
    for place, value in changes:
        body[int(place * len(body))] = value
    assert_alike(monkeypatch, bytes(body[: int(end * len(body))]) + more, mode=mode, at_least=at_least)


def with_size(body: bytes, height: int, width: int) -> bytes:
    """The file with another size in its header."""
    at = next(body.index(bytes([0xFF, kind])) for kind in (0xC0, 0xC2) if bytes([0xFF, kind]) in body)
    return body[: at + 5] + struct.pack(">HH", height, width) + body[at + 9 :]


@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_a_bomb_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr("simplejpeg.decode_jpeg", lambda *_, **__: pytest.fail("decoded"))
    body = with_size(jpeg(8, 8, **options), 60_000, 60_000)
    start_s = time.process_time()
    for at_least in (None, (8, 8)):
        with pytest.raises(TooLarge, match=r"too many pixels|60,000 x 60,000 pixels"):
            decode_scaled(body, mode="RGB", size=(8, 8), max_pixels=1 << 22, at_least=at_least)
    assert time.process_time() - start_s < 0.5


def test_a_second_header_does_not_pass_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = jpeg(8, 8), with_size(jpeg(8, 8), 3000, 3000)
    start = small.index(b"\xff\xc0")
    end = start + 2 + struct.unpack(">H", small[start + 2 : start + 4])[0]
    for place in (start, end):
        fast, slow = both(monkeypatch, small[:place] + large[start:end] + small[place:], max_pixels=10_000)
        assert isinstance(fast, tuple), fast.shape
        assert fast == slow


def test_scans_are_bounded_by_what_they_cost() -> None:
    body = jpeg(64, 64, progressive=True)
    scan = body[body.rindex(b"\xff\xda") : -2]
    many = body[:-2] + scan * MAX_SCANS + body[-2:]
    with pytest.raises(TooLarge, match=f"scans; at most {MAX_SCANS} are taken"):
        decode_image(many, mode="RGB")
    some = body[:-2] + scan * 30 + body[-2:]
    # Of the largest picture, 16 passes.
    with pytest.raises(TooLarge, match=r"scans; at most 16 are taken of its size\. Save it again"):
        decode_image(some, mode="RGB", max_pixels=64 * 64)
    assert decode_image(body, mode="RGB", max_pixels=64 * 64).shape == (64, 64, 3)


def test_of_a_plain_file_one_scan_is_decoded_however_many_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    body = plain(64, 64)
    scans = body[body.rindex(b"\xff\xda") : -2] * (2 * MAX_SCANS)
    whole = decode_image(body, mode="RGB")
    assert np.array_equal(assert_alike(monkeypatch, body + scans), whole)
    # No decoder takes a second scan of all channels.
    refused = assert_alike(monkeypatch, body[:-2] + scans + body[-2:])
    assert refused[0] is InvalidInput
    for each in (body, body + scans, body[:-2] + scans + body[-2:]):
        assert decoded_pixels(each) == 64 * 64


def test_the_work_of_a_file_is_read_from_its_header() -> None:
    png = io.BytesIO()
    Image.fromarray(smooth(3, 30, 50)).save(png, "PNG")
    assert decoded_pixels(png.getvalue()) == 1500
    assert decoded_pixels(jpeg(30, 50)) == 1500
    progressive = jpeg(30, 50, progressive=True)
    assert decoded_pixels(progressive) == 1500 * progressive.count(b"\xff\xda") > 1500
    assert is_small_picture(jpeg(375, 500))
    for body in (b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a" + bytes(50)):
        assert decoded_pixels(body) is None
        assert not is_small_picture(body)
    assert not is_small_picture(jpeg(375, 500, progressive=True))
    assert not is_small_picture(with_size(jpeg(8, 8), 2000, 2000))
    assert not is_small_picture(jpeg(8, 8) + bytes(1 << 19))


def test_without_the_fast_decoder_pillow_decodes_and_a_log_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = jpeg(30, 40)
    pixels = decode_image(body, mode="RGB")
    jpeg_decoder.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "simplejpeg", None)
    try:
        assert np.array_equal(decode_image(body, mode="RGB"), pixels)
        assert np.array_equal(decode_image(body, mode="RGB"), pixels)
        assert "simplejpeg is not installed; pip install 'penstock-nn[cpu]'" in slow_jpeg()
        assert [record.getMessage() for record in caplog.records] == [slow_jpeg()]
    finally:
        jpeg_decoder.cache_clear()
