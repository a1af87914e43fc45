"""Slides: read region by region, whole pictures, and files that are neither."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from penstock.apps.mitosis.slide_file import write_slide
from penstock.core.errors import SourceError
from penstock.core.spec import Array
from penstock.device.slides import ArraySlide, open_slide


def smooth(height: int, width: int) -> Array:
    """A picture that JPEG keeps within a few grey levels."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 200 // width, y * 200 // height, (x + y) * 100 // (height + width)], 2).astype(np.uint8)


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("slide") / "slide.tif"
    write_slide(file, smooth(700, 1100), threads=2)
    return file


def test_a_tiled_pyramid_is_read_region_by_region(slide: Path) -> None:
    import openslide

    pixels = smooth(700, 1100)
    with openslide.OpenSlide(slide) as raw:
        assert raw.level_dimensions == ((1100, 700), (550, 350))
    with open_slide(slide) as opened:
        assert (opened.width, opened.height, opened.pixel_um) == (1100, 700, 0.25)
        region = opened.read(200, 130, 300, 400)
        assert region.flags.c_contiguous
        assert np.abs(region.astype(int) - pixels[130:530, 200:500]).max() <= 6
        corner = opened.read(-10, 690, 30, 20)
        assert (corner[:, :10] == 255).all()
        assert (corner[10:] == 255).all()
        assert np.abs(corner[:10, 10:].astype(int) - pixels[690:, :20]).max() <= 6
        assert (opened.read(5000, 5000, 4, 4) == 255).all()


def test_a_picture_that_is_not_tiled_is_read_whole(tmp_path: Path) -> None:
    pixels = smooth(40, 60)
    for name in ("picture.png", "strips.tif"):
        Image.fromarray(pixels).save(tmp_path / name)
        with open_slide(tmp_path / name) as opened:
            assert np.array_equal(opened.read(3, 4, 20, 10), pixels[4:14, 3:23])
            assert opened.pixel_um is None
    assert np.array_equal(ArraySlide(pixels).read(0, 0, 60, 40), pixels)


def test_a_truncated_slide_is_one_sentence(slide: Path, tmp_path: Path) -> None:
    data = slide.read_bytes()
    for share in (0.001, 0.3, 0.6):
        cut = tmp_path / "cut.tif"
        cut.write_bytes(data[: int(len(data) * share)])
        with (
            pytest.raises(
                SourceError, match=r"cut\.tif is (damaged or truncated|no picture, or is truncated)"
            ) as caught,
            open_slide(cut) as opened,
        ):
            opened.read(0, 0, 1100, 700)
        assert "\n" not in str(caught.value)
    # Tiles in the middle are overwritten.
    damaged = tmp_path / "damaged.tif"
    damaged.write_bytes(data[:3000] + bytes(3000) + data[6000:])
    with pytest.raises(SourceError, match=r"damaged\.tif is damaged or truncated"), open_slide(damaged) as opened:
        opened.read(0, 0, 1100, 700)


@pytest.mark.parametrize("has_openslide", [True, False])
def test_a_pyramid_that_lacks_a_level_is_truncated(
    slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_openslide: bool
) -> None:
    if not has_openslide:
        monkeypatch.setattr("penstock.device.slides._openslide", lambda: None)
    data = slide.read_bytes()
    cut = tmp_path / "cut.tif"
    # The largest level is complete; the directory of the next one is missing.
    for share in (0.8, 0.9):
        cut.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(SourceError, match=r"cut\.tif is damaged or truncated \(.*directory"):
            open_slide(cut)


def test_the_largest_level_alone_is_read(slide: Path, tmp_path: Path) -> None:
    import openslide

    data = bytearray(slide.read_bytes())
    # Within the tiles of the smaller level.
    start, end = int(len(data) * 0.8), int(len(data) * 0.9)
    data[start:end] = bytes(end - start)
    damaged = tmp_path / "damaged.tif"
    damaged.write_bytes(data)
    with openslide.OpenSlide(damaged) as raw, pytest.raises(openslide.OpenSlideError):
        raw.read_region((0, 0), 1, (550, 350))
    with open_slide(slide) as whole, open_slide(damaged) as opened:
        assert np.array_equal(opened.read(0, 0, 1100, 700), whole.read(0, 0, 1100, 700))


def test_what_is_no_slide_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="is not a file; name a slide"):
        open_slide(tmp_path)
    text = tmp_path / "text.tif"
    text.write_text("no picture")
    with pytest.raises(SourceError, match=r"text\.tif is no picture"):
        open_slide(text)
    monkeypatch.setattr("penstock.device.slides._openslide", lambda: None)
    with pytest.raises(SourceError, match=r"pip install 'penstock-nn\[slides\]'"):
        open_slide(text)
    picture = tmp_path / "cut.png"
    Image.fromarray(smooth(200, 200)).save(picture)
    picture.write_bytes(picture.read_bytes()[:300])
    with pytest.raises(SourceError, match=r"cut\.png is damaged or truncated"):
        open_slide(picture)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    Image.fromarray(smooth(40, 40)).save(picture)
    with pytest.raises(SourceError, match=r"too large to be decoded whole, and is not tiled"):
        open_slide(picture)


@pytest.mark.parametrize(("dtype", "name", "bits"), [("u2", "a.png", 16), ("i4", "a.tif", 32), ("f4", "a.tif", 32)])
def test_pixels_that_are_not_8_bits_are_refused(tmp_path: Path, dtype: str, name: str, bits: int) -> None:
    Image.fromarray(np.full((8, 8), 300, dtype)).save(tmp_path / name)
    with pytest.raises(SourceError, match=f"has {bits}-bit pixels; convert it to 8 bits"):
        open_slide(tmp_path / name)


def test_what_is_transparent_is_white(tmp_path: Path) -> None:
    pixels = np.zeros((4, 6, 4), np.uint8)
    pixels[:, 3:] = (10, 20, 30, 255)
    palette = Image.new("P", (6, 4))
    palette.info["transparency"] = 0
    for picture in (Image.fromarray(pixels), palette):
        picture.save(tmp_path / "clear.png")
        with open_slide(tmp_path / "clear.png") as opened:
            region = opened.read(0, 0, 6, 4)
        assert (region[:, :3] == 255).all()
        assert (region[:, 3:] == (255 if picture is palette else (10, 20, 30))).all()
