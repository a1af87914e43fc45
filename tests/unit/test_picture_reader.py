"""Pictures as training examples: the pixels are Pillow's, whoever decodes and resizes them."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.core import decode as decoding
from penstock.core.decode import plain_pixels
from penstock.core.pictures import picture_resize
from penstock.core.spec import TensorSpec
from penstock.train.data.picture_reader import PictureReader, centre_box, random_box
from tests.support.pictures import smooth
from tests.support.thorough import thorough

LARGE = (1200, 1600)
SIZES = [(375, 500), (500, 375), LARGE, (60, 1000), (1000, 60), (224, 224), (40, 30), (7, 5), (1, 1)]
needs_pillow_13 = pytest.mark.skipif(int(Image.__version__.split(".")[0]) < 13, reason="Pillow resizes otherwise")


def file_of(kind: str, height: int, width: int, mode: str = "RGB", **options: Any) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(smooth(height + width, height, width)).convert(mode).save(sink, kind, **options)
    return sink.getvalue()


def by_pillow(body: bytes, spec: TensorSpec, draws: list[float]) -> Any:
    """The same by Pillow alone."""
    height, width = spec.shape[-2:] if spec.shape[0] == 3 else spec.shape[:2]
    with Image.open(io.BytesIO(body)) as image:
        turned = image.getexif().get(0x0112, 1) >= 5
        wide, high = (image.height, image.width) if turned else image.size
        ratio = width / height
        box = random_box(wide, high, ratio, draws[1:]) if draws else centre_box(wide, high, ratio, 0.875)
        smaller = min((box[2] - box[0]) / width, (box[3] - box[1]) / height)
        if smaller > 1:
            image.draft(None, (int(image.width / smaller), int(image.height / smaller)))
        whole = plain_pixels(image, "RGB" if 3 in (spec.shape[0], spec.shape[-1]) else "L")
    across, down = whole.width / wide, whole.height / high
    part = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
    small = whole.resize((width, height), Image.Resampling.BILINEAR, part, reducing_gap=2.0)
    if draws and draws[0] < 0.5:
        small = small.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = np.asarray(small)
    return pixels.transpose(2, 0, 1) if spec.shape[0] == 3 else pixels


def spec_of(*shape: int) -> TensorSpec:
    return TensorSpec(dtype="uint8", shape=shape, meaning="picture")


def assert_same(body: bytes, spec: TensorSpec) -> None:
    for random in (False, True):
        reader = PictureReader(spec, random=random, user="a test")
        for draws in reader.draws(np.arange(6, dtype=np.uint64)):
            found = reader.read(body, "image/jpeg", draws)
            assert found.shape == spec.shape
            assert np.array_equal(found, by_pillow(body, spec, draws))


@needs_pillow_13
@pytest.mark.parametrize(("height", "width"), [thorough(*size) if size == LARGE else size for size in SIZES])
def test_jpeg_of_any_size_has_the_pixels_of_pillow(height: int, width: int) -> None:
    for shape in ((224, 224, 3), (3, 32, 48), (20, 64)):
        assert_same(file_of("JPEG", height, width), spec_of(*shape))
        assert_same(file_of("JPEG", height, width, "L"), spec_of(*shape))


@needs_pillow_13
@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_any_kind_of_jpeg_has_the_pixels_of_pillow(*, subsampling: int, progressive: bool) -> None:
    body = file_of("JPEG", 375, 501, subsampling=subsampling, progressive=progressive, quality=90)
    assert_same(body, spec_of(97, 120, 3))


@needs_pillow_13
def test_other_formats_modes_and_orientations_have_the_pixels_of_pillow() -> None:
    for kind, mode in (("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "L"), ("WEBP", "RGB"), ("JPEG", "CMYK")):
        assert_same(file_of(kind, 150, 210, mode), spec_of(97, 64, 3))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        assert_same(file_of("JPEG", 150, 210, exif=exif), spec_of(97, 64, 3))


@needs_pillow_13
def test_pixels_do_not_depend_on_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.train.data.picture_reader.jpeg_decoder", lambda: None)
    monkeypatch.setattr(picture_resize, "compiled_resampling", lambda: None)
    assert_same(file_of("JPEG", 375, 500), spec_of(224, 224, 3))


@pytest.mark.skipif(
    decoding.jpeg_decoder() is None or picture_resize.compiled_resampling() is None, reason="not installed"
)
def test_pillow_neither_decodes_nor_resizes_a_jpeg_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(file_of("JPEG", 375, 500))
    for name in ("load", "resize"):
        monkeypatch.setattr(f"PIL.Image.Image.{name}", lambda *_, **__: pytest.fail("by Pillow"))
    reader = PictureReader(spec_of(224, 224, 3), random=True, user="a test")
    assert reader.read(file, "image/jpeg", reader.draws(np.zeros(1, np.uint64))[0]).shape == (224, 224, 3)


def test_a_file_that_is_cut_short_is_an_error_of_the_picture() -> None:
    reader = PictureReader(spec_of(32, 32, 3), user="a test")
    with pytest.raises(OSError, match="truncated"):
        reader.read(file_of("JPEG", 375, 500)[:5000], "image/jpeg", [])
