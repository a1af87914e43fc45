"""Pictures from strangers: every kind that is taken, every kind of damage, in bounded memory and time."""

import contextlib
import io
import random
import resource
import struct
import subprocess
import sys
import threading
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.core.decode import decode_image, plain_pixels, text_fault
from penstock.core.errors import ApplicationError, InvalidInput, TooLarge

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (6, 4), np.uint8)
COLOUR = RNG.integers(0, 256, (6, 4, 3), np.uint8)


def file_of(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    sink = io.BytesIO()
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    picture.save(sink, kind, **options)
    return sink.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def hand_made_png(width: int, height: int, rows: int, *, depth: int = 8, colour: int = 0, before: bytes = b"") -> bytes:
    """A PNG of zeros without ever holding its pixels; `rows` of them are really there."""
    packer = zlib.compressobj(9)
    row = b"\0" * (1 + width * depth // 8)
    data = b"".join(packer.compress(row) for _ in range(rows)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + before + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF"])
def test_grey_pixels_are_as_they_were(kind: str) -> None:
    decoded = decode_image(file_of(GREY, kind), mode="L")
    assert decoded.dtype == np.uint8
    assert (decoded == GREY).all()


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True})])
def test_coloured_pixels_are_as_they_were(kind: str, options: dict[str, Any]) -> None:
    assert (decode_image(file_of(COLOUR, kind, **options), mode="RGB") == COLOUR).all()


def test_a_jpeg_is_near_what_it_was() -> None:
    smooth = np.tile(np.linspace(0, 255, 16, dtype=np.uint8), (16, 1))
    assert np.abs(decode_image(file_of(smooth, "JPEG", quality=95), mode="L").astype(int) - smooth).max() < 8


def test_sixteen_bits_become_their_upper_eight() -> None:
    deep = RNG.integers(0, 1 << 16, (6, 4), np.uint16)
    assert (decode_image(file_of(deep), mode="L") == deep >> 8).all()
    assert (decode_image(file_of(deep), mode="RGB") == (deep >> 8)[..., None]).all()


@pytest.mark.parametrize("before", [b"", chunk(b"tRNS", b"\0\0")])
def test_sixteen_bit_files_with_a_transparent_grey_are_read(before: bytes) -> None:
    assert (decode_image(hand_made_png(3, 2, 2, depth=16, before=before), mode="L") == np.zeros((2, 3))).all()


def test_one_bit_becomes_black_and_white() -> None:
    bits = RNG.random((6, 9)) < 0.5
    assert (decode_image(file_of(Image.fromarray(bits)), mode="L") == np.where(bits, 255, 0)).all()


def test_a_palette_is_looked_up() -> None:
    picture = Image.fromarray(COLOUR).quantize(24)
    assert (decode_image(file_of(picture), mode="RGB") == np.asarray(picture.convert("RGB"))).all()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_parts_are_black(mode: str) -> None:
    alpha = np.tile(np.array([0, 255], np.uint8), (6, 2))
    picture = Image.fromarray(GREY).convert(mode)
    picture.putalpha(Image.fromarray(alpha))
    assert (decode_image(file_of(picture), mode="L") == np.where(alpha, GREY, 0)).all()


@pytest.mark.parametrize("transparency", [0, bytes(range(0, 240, 10))])
def test_a_palette_with_transparent_colours_is_read(transparency: Any) -> None:
    picture = Image.fromarray(COLOUR).quantize(24)
    body = file_of(picture, transparency=transparency)
    hidden = np.asarray(picture) == 0
    assert (decode_image(body, mode="RGB")[hidden] == 0).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_a_fourth_number_is_added_as_an_opaque_canvas_has_it(mode: str) -> None:
    body = file_of(Image.fromarray(COLOUR).convert(mode))
    pixels = decode_image(body, mode="RGBA")
    assert (pixels[..., :3] == decode_image(body, mode="RGB")).all()
    assert (pixels[..., 3] == 255).all()


def test_transparent_parts_are_black_and_opaque_with_a_fourth_number() -> None:
    half = np.dstack([COLOUR, np.full(COLOUR.shape[:2], 128, np.uint8)])
    body = file_of(Image.fromarray(half))
    pixels = decode_image(body, mode="RGBA")
    assert (pixels[..., :3] == decode_image(body, mode="RGB")).all()
    assert (pixels[..., 3] == 255).all()


def test_cmyk_is_converted() -> None:
    picture = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red, green, blue = decode_image(file_of(picture, "JPEG", quality=95), mode="RGB")[4, 4]
    assert tuple(decode_image(file_of(picture, "JPEG", quality=95), mode="RGBA")[4, 4]) == (red, green, blue, 255)
    assert red > 230
    assert max(green, blue) < 30
    assert decode_image(file_of(picture, "JPEG"), mode="L").shape == (8, 8)


def test_of_an_animation_the_first_frame_is_taken() -> None:
    frames = [Image.fromarray(np.full((6, 4), value, np.uint8)) for value in (10, 200, 90)]
    body = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (decode_image(body, mode="L") == 10).all()


def test_a_photo_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert (decode_image(file_of(GREY, exif=exif), mode="L") == np.rot90(GREY, -1)).all()


@pytest.mark.parametrize(("height", "width"), [(12, 8), (3, 2), (3, 8), (12, 2), (1, 1), (6, 4)])
def test_another_size_becomes_the_sensors(height: int, width: int) -> None:
    decoded = decode_image(file_of(np.full((6, 4), 77, np.uint8)), mode="L", size=(height, width))
    assert decoded.shape == (height, width)
    assert (decoded == 77).all()


def test_a_smaller_sensor_averages() -> None:
    means = GREY.reshape(3, 2, 2, 2).mean((1, 3))
    # Rounded twice: once a direction.
    assert np.abs(decode_image(file_of(GREY), mode="L", size=(3, 2)) - means).max() <= 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"a text file, not a picture\n" * 100,
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff",
        b"GIF89a",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n",
        b"II*\0",
        bytes(4096),
        hand_made_png(0, 0, 0),
        hand_made_png(5, 0, 0),
    ],
)
def test_what_is_not_a_picture_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"^The (file is (not a picture|empty)|picture is cut short)"):
        decode_image(body, mode="L", size=(8, 8))


def test_a_picture_that_ends_in_its_head_is_called_cut_short_and_an_empty_body_empty() -> None:
    for kind in ("PNG", "JPEG"):
        for end in (9, 20, 30):
            with pytest.raises(InvalidInput, match=r"^The picture is cut short or damaged; send the whole file"):
                decode_image(file_of(GREY, kind)[:end], mode="L")
    with pytest.raises(InvalidInput, match=r"^The file is empty; send a PNG or JPEG file"):
        decode_image(b"", mode="L")


def test_postscript_is_not_run() -> None:
    # Pillow would hand it to Ghostscript, if that is installed.
    body = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EndProlog\nshowpage\n"
    with pytest.raises(InvalidInput, match="not a picture that can be read"):
        decode_image(body, mode="L")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_a_picture_that_is_cut_anywhere_is_refused_or_whole(kind: str) -> None:
    whole = file_of(RNG.integers(0, 256, (40, 30), np.uint8), kind)
    pixels = decode_image(whole, mode="L")
    refused = 0
    for end in range(0, len(whole), max(1, len(whole) // 60)):
        try:
            decoded = decode_image(whole[:end], mode="L")
        except InvalidInput:
            refused += 1
        else:
            assert (decoded == pixels).all()
    assert refused > 30


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_a_picture_with_noise_in_it_is_read_or_refused_and_nothing_else(kind: str) -> None:
    whole = file_of(COLOUR.repeat(4, 0), kind)
    chance = random.Random(0)
    for _ in range(150):
        noisy = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            noisy[chance.randrange(len(noisy))] = chance.randrange(256)
        with contextlib.suppress(InvalidInput, TooLarge):
            assert decode_image(bytes(noisy), mode="RGB", size=(8, 8), max_pixels=1 << 16).shape == (8, 8, 3)


def test_an_image_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = hand_made_png(30_000, 30_000, 0)
    start_s, most_kib = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TooLarge, match=r"too many pixels; at most 4,194,304 are taken"):
        decode_image(bomb, mode="L")
    assert time.process_time() - start_s < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most_kib < 20_000


def test_the_largest_picture_that_is_taken_costs_bounded_memory() -> None:
    body = hand_made_png(2048, 2048, 2048)
    most_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert decode_image(body, mode="RGB", size=(8, 8)).shape == (8, 8, 3)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most_kib < 100_000
    with pytest.raises(TooLarge, match="2,049 x 2,048 pixels"):
        decode_image(hand_made_png(2049, 2048, 0), mode="RGB")


@pytest.mark.parametrize(("width", "height", "taken"), [(100, 100, True), (101, 100, False), (10_001, 1, False)])
def test_the_limit_is_on_pixels(width: int, height: int, taken: bool) -> None:
    body = hand_made_png(width, height, height)
    if taken:
        assert decode_image(body, mode="L", max_pixels=10_000).shape == (height, width)
    else:
        with pytest.raises(TooLarge, match=f"{width:,} x {height:,} pixels; at most 10,000 are taken. Scale it down"):
            decode_image(body, mode="L", max_pixels=10_000)


def test_much_packed_text_in_a_small_picture_is_refused() -> None:
    text = chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(50_000_000), 9))
    body = hand_made_png(2, 2, 2, before=text)
    assert len(body) < 100_000
    start_s = time.process_time()
    with pytest.raises(InvalidInput):
        decode_image(body, mode="L")
    assert time.process_time() - start_s < 1


def test_threads_side_by_side_leave_warnings_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def slowly(image: Any, mode: str) -> Any:
        if threading.current_thread().name.startswith("first"):
            first_is_in.set()
            assert second_is_in.wait(30)
        else:
            second_is_in.set()
            assert first_is_out.wait(30)
        warnings.warn("something odd in a picture", stacklevel=1)
        return plain_pixels(image, mode)

    monkeypatch.setattr("penstock.core.decode.plain_pixels", slowly)
    before = list(warnings.filters)
    with ThreadPoolExecutor(1, "first") as first, ThreadPoolExecutor(1, "second") as second:
        one = first.submit(decode_image, file_of(GREY), mode="L")
        assert first_is_in.wait(30)
        other = second.submit(decode_image, file_of(GREY), mode="L")
        assert one.result(30).shape == GREY.shape
        first_is_out.set()
        assert other.result(30).shape == GREY.shape
    assert warnings.filters == before


def test_another_mode_is_the_applications_mistake() -> None:
    with pytest.raises(ApplicationError, match="mode 'rgb'; choose 'L', 'RGB' or 'RGBA'"):
        decode_image(file_of(COLOUR), mode="rgb")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_a_bmp_with_a_palette_is_read(mode: str) -> None:
    image = Image.linear_gradient("L").resize((12, 8)).convert(mode)
    sink = io.BytesIO()
    image.save(sink, "BMP")
    found = decode_image(sink.getvalue(), mode="L")
    assert np.array_equal(found, np.asarray(image.convert("L")))


@pytest.mark.parametrize("colors", [257, 23_296, 65_536, 0xFFFFFFFF])
def test_a_bmp_with_more_colours_than_its_pixels_can_name_is_refused_unread(colors: int) -> None:
    sink = io.BytesIO()
    Image.new("P", (3, 2)).save(sink, "BMP")
    body = bytearray(sink.getvalue())
    body[46:50] = struct.pack("<I", colors)
    taken_s: list[float] = []
    for _ in range(20):
        begin_s = time.thread_time()
        with pytest.raises(InvalidInput, match=rf"palette of {colors:,} colours"):
            decode_image(bytes(body), mode="L")
        taken_s.append(time.thread_time() - begin_s)
    # The fastest: garbage is collected in some of them.
    assert min(taken_s) < 0.001


FIRST_PICTURES = """
import sys
from penstock.core.decode import decode_image, import_decoders
from penstock.core.errors import InvalidInput

import_decoders()
before = set(sys.modules)
for body in sys.argv[1:]:
    try:
        decode_image(bytes.fromhex(body), mode="RGB")
    except InvalidInput:
        pass
print(sorted(name for name in set(sys.modules) - before if name.startswith(("PIL.", "simplejpeg"))))
"""


def test_the_first_pictures_of_a_process_import_nothing_more() -> None:
    files = [file_of(COLOUR, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    bodies = [body.hex() for body in (*files, b"no picture")]
    command = [f"{sys.prefix}/bin/python", "-c", FIRST_PICTURES, *bodies]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_a_body_that_is_no_text_is_a_fault_of_its_client_alone() -> None:
    def fault(text: bytes, body: bytes) -> InvalidInput | None:
        with pytest.raises(UnicodeDecodeError) as raised:
            text.decode("utf-8")
        return text_fault(raised.value, body)

    assert str(fault(b"a\xff", b"a\xff")) == "The body is not text in utf-8, from byte 1: invalid start byte."
    # A part of a body, as that after a header.
    assert "from byte 3" in str(fault(b"a\xff", b"::a\xff"))
    # A file of the application.
    assert fault(b"\xfe", b"a\xff") is None
    assert text_fault(ValueError("a number"), b"a") is None
