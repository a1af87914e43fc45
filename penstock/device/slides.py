"""Large pictures, read region by region: whole slides by OpenSlide, other pictures whole by Pillow."""

import ctypes
import os
import struct
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import numpy as np
from PIL import Image, UnidentifiedImageError

from penstock.core.errors import SourceError, one_line
from penstock.core.spec import Array

# H height, W width

WHITE = 255
# TIFF 6.0, section 2, and BigTIFF: formats of the number of entries and of the link to the next directory, and the
# bytes of an entry.
CLASSIC_TIFF, BIG_TIFF = 42, 43
_TIFF = {CLASSIC_TIFF: ("H", 12, "I"), BIG_TIFF: ("Q", 20, "Q")}
_BYTE_ORDERS = {b"II": "<", b"MM": ">"}


class Slide(ABC):
    """A picture that is read region by region, by any number of threads; use it in a `with`.

    Attributes:
        name: Its name in messages.
        width: In pixels.
        height: In pixels.
        pixel_um: Size of a pixel in micrometres; None if the file does not say.
    """

    name: str
    width: int
    height: int
    pixel_um: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def read(self, left: int, top: int, width: int, height: int) -> Array:
        """Read a region, uint8 `[H, W, 3]`: red, green, blue; white outside of the slide.

        Args:
            left: Its left edge in pixels; it may be negative.
            top: Its upper edge.
            width: In pixels.
            height: In pixels.

        Raises:
            SourceError: The file is damaged there.
        """
        first_x, first_y = max(left, 0), max(top, 0)
        last_x, last_y = min(left + width, self.width), min(top + height, self.height)
        if last_x - first_x == width and last_y - first_y == height:
            return self._read(left, top, width, height)
        region_HW3 = np.full((height, width, 3), WHITE, np.uint8)
        if last_x > first_x and last_y > first_y:
            inside_HW3 = self._read(first_x, first_y, last_x - first_x, last_y - first_y)
            region_HW3[first_y - top : last_y - top, first_x - left : last_x - left] = inside_HW3
        return region_HW3

    @abstractmethod
    def _read(self, left: int, top: int, width: int, height: int) -> Array: ...

    def close(self) -> None:  # noqa: B027
        """Release the file."""


def open_slide(file: str | Path) -> Slide:
    """Open a whole slide in any format of OpenSlide, or another picture.

    Args:
        file: Tiled TIFF, SVS, NDPI, MIRAX and others; pictures that are not tiled, such as PNG and JPEG, are decoded
            whole.

    Raises:
        SourceError: The file is missing, is no picture of 8 bits, is a TIFF that is cut before its last directory, or
            OpenSlide is not installed and Pillow cannot read it.
    """
    file = Path(file)
    if not file.is_file():
        raise SourceError(f"{file} is not a file; name a slide or a picture.")
    openslide = _openslide()
    if openslide is not None:
        try:
            if openslide.OpenSlide.detect_format(file) is not None:
                return _TiledSlide(openslide, file)
        except openslide.OpenSlideError as error:
            raise _damaged(file, error) from None
    # OpenSlide does not know a pyramid that lacks a level, and Pillow would read the first one.
    _check_directories(file)
    return _WholePicture(file, has_openslide=openslide is not None)


@final
class ArraySlide(Slide):
    """A picture in memory.

    Args:
        pixels_HW3: uint8.
        name: Its name in messages.
    """

    def __init__(self, pixels_HW3: Array, name: str = "picture") -> None:
        self._pixels_HW3 = pixels_HW3
        self.name = name
        self.height, self.width = pixels_HW3.shape[:2]

    def _read(self, left: int, top: int, width: int, height: int) -> Array:
        return self._pixels_HW3[top : top + height, left : left + width]


@final
class _TiledSlide(Slide):
    def __init__(self, openslide: Any, file: Path) -> None:
        self._openslide = openslide
        self._slide = openslide.OpenSlide(file)
        self.name = str(file)
        self.width, self.height = self._slide.dimensions
        self.pixel_um = _number(self._slide.properties.get(openslide.PROPERTY_NAME_MPP_X))

    def _read(self, left: int, top: int, width: int, height: int) -> Array:
        pixels_HW4 = np.empty((height, width, 4), np.uint8)
        try:
            # Its `read_region` makes a Pillow image: two more copies, both under Python's lock.
            self._openslide.lowlevel._read_region(
                self._slide._osr,
                pixels_HW4.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32)),
                left,
                top,
                0,
                width,
                height,
            )
        except self._openslide.OpenSlideError as error:
            raise _damaged(Path(self.name), error) from None
        region_HW3 = pixels_HW4[..., 2::-1].copy()
        opacity_HW1 = pixels_HW4[..., 3:]
        if opacity_HW1.min() < WHITE:
            # Colours are multiplied by opacity; places that were not scanned are transparent.
            region_HW3 += WHITE - opacity_HW1
        return region_HW3

    def close(self) -> None:
        self._slide.close()


@final
class _WholePicture(Slide):
    def __init__(self, file: Path, *, has_openslide: bool) -> None:
        self.name = str(file)
        try:
            with warnings.catch_warnings():
                # Pillow warns of truncated metadata, and at half of the number of pixels that it refuses.
                warnings.simplefilter("ignore")
                with Image.open(file) as picture:
                    self.width, self.height = picture.size
                    if picture.mode.startswith(("I", "F")):
                        bits = 16 if picture.mode.startswith("I;16") else 32
                        raise SourceError(f"{file} has {bits}-bit pixels; convert it to 8 bits.")
                    self._pixels_HW3 = np.asarray(_on_white(picture))
        except Image.DecompressionBombError as error:
            raise SourceError(
                f"{file} is too large to be decoded whole, and is not tiled ({one_line(error, 120)}); convert it: vips "
                f"tiffsave --tile --pyramid."
            ) from None
        except UnidentifiedImageError as error:
            fix = "" if has_openslide else ", or install OpenSlide for slides: pip install 'penstock-nn[slides]'"
            raise SourceError(
                f"{file} is no picture, or is truncated ({one_line(error, 120)}); copy it again{fix}."
            ) from None
        except (OSError, SyntaxError, ValueError) as error:
            raise _damaged(file, error) from None

    def _read(self, left: int, top: int, width: int, height: int) -> Array:
        return self._pixels_HW3[top : top + height, left : left + width]


def _check_directories(file: Path) -> None:
    """Refuse a TIFF or BigTIFF whose chain of directories leaves the file; other files pass."""
    with file.open("rb") as source:
        head = source.read(16)
        order = _BYTE_ORDERS.get(head[:2], "")
        version = struct.unpack_from(f"{order}H", head, 2)[0] if order and len(head) == 16 else 0
        if version not in _TIFF:
            return
        count, entry, link = _TIFF[version]
        (at,) = struct.unpack_from(order + link, head, 4 if version == CLASSIC_TIFF else 8)
        seen = set[int]()
        try:
            while at and at not in seen:
                seen.add(at)
                source.seek(at)
                (entries,) = struct.unpack(order + count, source.read(struct.calcsize(count)))
                source.seek(entries * entry, os.SEEK_CUR)
                (at,) = struct.unpack(order + link, source.read(struct.calcsize(link)))
        except (struct.error, OSError, OverflowError):
            raise _damaged(file, SourceError(f"its directory {len(seen)} lies beyond its end")) from None


def _on_white(picture: Image.Image) -> Image.Image:
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    clear = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", clear.size, (WHITE,) * 4), clear).convert("RGB")


def _openslide() -> Any:
    try:
        import openslide
    except ImportError:
        return None
    return openslide


def _damaged(file: Path, error: Exception) -> SourceError:
    return SourceError(f"{file} is damaged or truncated ({one_line(error, 160)}); copy it again.")


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
