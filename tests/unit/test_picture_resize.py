"""Resizing by the compiled module and by Pillow: the same pixels."""

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.core.decode import Mode, decode_image
from penstock.core.pictures import picture_resize
from penstock.core.pictures.picture_resize import (
    MAX_RATIO,
    compiled_resampling,
    resize_image,
    resize_part,
    resize_pixels,
)
from tests.support.pictures import smooth

MODES: dict[Mode, tuple[int, ...]] = {"L": (), "RGB": (3,), "RGBA": (4,)}
SIDES = st.one_of(st.integers(1, 12), st.integers(1, 120))
# Pillow 11 and 12 resize the columns first, always.
needs_pillow_13 = pytest.mark.skipif(int(Image.__version__.split(".")[0]) < 13, reason="Pillow resizes otherwise")
needs_compiled = pytest.mark.skipif(compiled_resampling() is None, reason="not compiled")


def pixels_of(seed: int, height: int, width: int, mode: Mode) -> Any:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, *MODES[mode]), np.uint8)
    if seed % 4 == 0:
        # The largest sums.
        pixels[:] = 255
    if mode == "RGBA":
        pixels[..., 3] = 255
    return pixels


def part_by_pillow(pixels: Any, size: tuple[int, int], part: tuple[float, float, float, float]) -> Any:
    whole = Image.fromarray(pixels)
    return np.asarray(whole.resize((size[1], size[0]), Image.Resampling.BILINEAR, part, reducing_gap=2.0))


def by_pillow(pixels: Any, size: tuple[int, int]) -> Any:
    height, width = pixels.shape[:2]
    smaller = size[0] <= height and size[1] <= width
    kind = Image.Resampling.BOX if smaller else Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(pixels).resize((size[1], size[0]), kind))


@needs_pillow_13
@settings(max_examples=600, deadline=None)
@given(
    seed=st.integers(0, 1000),
    old=st.tuples(SIDES, SIDES),
    new=st.tuples(SIDES, SIDES),
    mode=st.sampled_from(sorted(MODES)),
)
@example(seed=1, old=(375, 500), new=(224, 224), mode="RGB")
@example(seed=1, old=(500, 375), new=(224, 224), mode="RGB")
# Twice as much is taken off the height as off the width, and one row more.
@example(seed=1, old=(40, 30), new=(20, 20), mode="RGB")
@example(seed=1, old=(41, 30), new=(20, 20), mode="RGB")
@example(seed=1, old=(41, 30), new=(40, 30), mode="L")
@example(seed=1, old=(30, 20), new=(29, 40), mode="RGBA")
@example(seed=1, old=(20, 30), new=(40, 31), mode="RGBA")
# Means of two to six columns and rows, more than a window holds, and of one and two.
@example(seed=1, old=(100, 90), new=(40, 25), mode="RGB")
@example(seed=1, old=(90, 100), new=(18, 20), mode="RGB")
@example(seed=1, old=(90, 100), new=(18, 20), mode="RGBA")
@example(seed=1, old=(90, 100), new=(16, 17), mode="L")
@example(seed=1, old=(99, 100), new=(60, 70), mode="L")
@example(seed=1, old=(4, 16), new=(3, 9), mode="RGBA")
# Rows of fewer than four bytes.
@example(seed=1, old=(5, 1), new=(5, 3), mode="L")
@example(seed=1, old=(9, 2), new=(9, 5), mode="L")
@example(seed=0, old=(2, 60_000), new=(1, 15), mode="RGB")
@example(seed=0, old=(2, 60_000), new=(1, 3), mode="RGBA")
@example(seed=0, old=(60_000, 2), new=(2, 3), mode="L")
def test_pixels_are_those_of_pillow(seed: int, old: tuple[int, int], new: tuple[int, int], mode: Mode) -> None:
    pixels = pixels_of(seed, *old, mode)
    before, found = pixels.copy(), resize_pixels(pixels, new)
    assert found.dtype == np.uint8
    assert np.array_equal(found, by_pillow(pixels, new))
    assert np.array_equal(pixels, before)


@pytest.mark.parametrize("count", range(1, 7))
@pytest.mark.parametrize("mode", MODES)
def test_means_of_all_sums_are_those_of_pillow(count: int, mode: Mode) -> None:
    sums = np.arange(255 * count + 1)
    parts = np.stack([np.clip(sums - 255 * at, 0, 255) for at in range(count)], 1)
    pixels = np.full((*parts.shape, *MODES[mode]), 255, np.uint8)
    pixels.reshape(*parts.shape, -1)[..., :3] = parts[..., None]
    for each, size in ((pixels, (len(sums), 1)), (pixels.swapaxes(0, 1).copy(), (1, len(sums)))):
        assert np.array_equal(resize_pixels(each, size), by_pillow(each, size))


@pytest.mark.thorough
@needs_pillow_13
@settings(max_examples=600, deadline=None)
@given(
    seed=st.integers(0, 1000),
    old=st.tuples(SIDES, SIDES),
    new=st.tuples(SIDES, SIDES),
    mode=st.sampled_from(["L", "RGB"]),
    corners=st.tuples(*[st.floats(0, 1)] * 4),
)
@example(seed=1, old=(375, 500), new=(224, 224), mode="RGB", corners=(0.13, 0.21, 0.83, 0.97))
@example(seed=1, old=(500, 375), new=(224, 224), mode="RGB", corners=(0.0, 0.0, 1.0, 1.0))
@example(seed=1, old=(224, 224), new=(224, 224), mode="L", corners=(0.0, 0.0, 1.0, 1.0))
@example(seed=1, old=(900, 100), new=(224, 224), mode="RGB", corners=(0.1, 0.5, 0.9, 0.9))
@example(seed=1, old=(900, 900), new=(20, 20), mode="RGB", corners=(0.1, 0.5, 0.9, 0.9))
def test_pixels_of_a_part_are_those_of_pillow(
    seed: int,
    old: tuple[int, int],
    new: tuple[int, int],
    mode: Mode,
    corners: tuple[float, float, float, float],
) -> None:
    left, right = sorted((corners[0] * old[1], corners[2] * old[1]))
    top, bottom = sorted((corners[1] * old[0], corners[3] * old[0]))
    # Pillow refuses a part without size.
    assume(right - left > 0.01 and bottom - top > 0.01)
    pixels = pixels_of(seed, *old, mode)
    part = left, top, right, bottom
    assert np.array_equal(resize_part(pixels, new, part), part_by_pillow(pixels, new, part))


@pytest.mark.parametrize("mode", MODES)
def test_where_nothing_is_compiled_pillow_resizes(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    pixels = pixels_of(1, 50, 70, mode)
    monkeypatch.setattr(picture_resize, "compiled_resampling", lambda: None)
    for size in ((20, 30), (60, 30), (50, 70)):
        assert np.array_equal(resize_pixels(pixels, size), by_pillow(pixels, size))
        assert np.array_equal(resize_image(Image.fromarray(pixels), size), by_pillow(pixels, size))
    part = 3.5, 2.25, 60.0, 41.0
    assert np.array_equal(resize_part(pixels, (20, 30), part), part_by_pillow(pixels, (20, 30), part))


@needs_compiled
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_pillow_resizes_no_file_where_the_module_is_compiled(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    sink = io.BytesIO()
    Image.fromarray(smooth(3, 60, 80)).save(sink, kind)
    monkeypatch.setattr("PIL.Image.Image.resize", lambda *_, **__: pytest.fail("resized by Pillow"))
    for mode, channels in MODES.items():
        assert decode_image(sink.getvalue(), mode=mode, size=(30, 20)).shape == (30, 20, *channels)


def test_no_size_and_the_same_one_leave_the_pixels_alone() -> None:
    pixels = pixels_of(1, 5, 7, "RGB")
    assert resize_pixels(pixels, None) is pixels
    assert resize_pixels(pixels, (5, 7)) is pixels


@needs_compiled
def test_sums_that_pass_255_are_left_to_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    resampling = compiled_resampling()
    assert resampling is not None
    called: list[str] = []
    for name in ("resample_rows", "resample_columns"):
        monkeypatch.setattr(resampling, name, lambda *_, name=name: called.append(name))
    pixels = np.full((1, MAX_RATIO + 1), 255, np.uint8)
    assert resize_pixels(pixels, (1, 1)).tolist() == [[255]]
    assert called == []
    resize_pixels(pixels[:, 1:].copy(), (1, 1))
    assert called == ["resample_columns"]


@needs_compiled
def test_arrays_of_other_sizes_are_refused() -> None:
    resampling = compiled_resampling()
    assert resampling is not None
    columns: list[Any] = [
        (b"abc", (1, 1, 3), bytearray(4), 1, True),
        (b"abc", (1, 2, 3), bytearray(3), 1, True),
        (b"abcde", (1, 1, 5), bytearray(5), 1, True),
        (b"abc", (-1, -1, 3), bytearray(3), 1, True),
        (b"", (0, 1, 3), bytearray(0), 1, True),
        (b"", (1, 0, 3), bytearray(3), 1, True),
        (b"abcdef", (1, 2, 3), bytearray(3), 1, False, -0.1, 2.0),
        (b"abcdef", (1, 2, 3), bytearray(3), 1, False, 0.0, 2.1),
        (b"abcdef", (1, 2, 3), bytearray(3), 1, False, 1.0, 1.0),
        (b"abcdef", (1, 2, 3), bytearray(3), 1, False, float("nan"), 2.0),
    ]
    rows: list[Any] = [
        (b"abc", 2, bytearray(3), 1, True),
        (b"abc", 1, bytearray(4), 1, True),
        (b"", 1, bytearray(0), 1, True),
        (b"abc", -3, bytearray(3), -3, True),
        (b"abc", 3, bytearray(1), 1, False, 0.0, 3.1),
        (b"abc", 3, bytearray(1), 1, False, 0.0, 3.0, -1, 3),
        (b"abc", 3, bytearray(1), 1, False, 0.0, 3.0, 1, 3),
        (b"abc", 3, bytearray(1), 1, False, 0.0, 3.0, 2**31 - 1, 2**31 - 1),
        # Rows 0 to 2 of six are given, and others are needed.
        (b"abc", 3, bytearray(1), 1, False, 0.0, 6.0, 0, 6),
        (b"abc", 3, bytearray(1), 1, False, 0.0, 2.0, 3, 6),
        (b"abc", 3, bytearray(1), 1, False, 0.0, 2.0, 0, -(2**31)),
    ]
    for call, refused in ((resampling.resample_columns, columns), (resampling.resample_rows, rows)):
        for arguments in refused:
            said = "have not as many bytes as the sizes say" if len(arguments) < 6 else "part is not within the picture"
            with pytest.raises(ValueError, match=said):
                call(*arguments)
    with pytest.raises(ValueError, match="not C-contiguous"):
        resampling.resample_rows(np.zeros((4, 4), np.uint8)[:, ::2], 4, bytearray(8), 4, True)
    with pytest.raises(TypeError):
        resampling.resample_rows(b"ab", 2, b"a", 1, True)
