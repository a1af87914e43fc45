"""Building blocks of a `decode`: turn request bytes into one raw array, in bounded memory and time."""

import io
import struct
import threading
import warnings
import zlib
from typing import Any, Literal, final

import numpy as np

from penstock.core.errors import ApplicationError, InvalidInput, TooLarge
from penstock.core.spec import Array

# Not every format of Pillow: some start other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Encoders write about ten.
MAX_SCANS = 100


@final
class _WarningsOff:
    """Suppress warnings while at least one thread is inside; the filters are shared by all threads of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._warnings = warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._warnings = warnings.catch_warnings()
                self._warnings.__enter__()
                warnings.simplefilter("ignore")

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._warnings.__exit__(None, None, None)


_WARNINGS_OFF = _WarningsOff()
# Raised by Pillow's decoders for damaged files; they have no common base.
_PILLOW_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError),
    *(SyntaxError, TypeError, ValueError, struct.error, zlib.error),
)


def decode_image(
    body: bytes, *, mode: Literal["L", "RGB", "RGBA"], size: tuple[int, int] | None = None, max_pixels: int = 1 << 22
) -> Array:
    """Decode a picture to uint8: `[H, W]` for mode `"L"`, `[H, W, 3]` for `"RGB"` and `[H, W, 4]` for `"RGBA"`.

    PNG, JPEG, WebP, GIF (its first frame) and BMP are read, upright by their orientation tag, as in a browser. The
    header is read first: a picture of too many pixels is refused before it is decoded.

    Args:
        body: The file's bytes.
        mode: `"L"` for grey, `"RGB"` for colour; `"RGBA"` for colour and 255, as in a browser's opaque canvas.
            Transparent parts become black, 16 bits become the upper 8.
        size: Height and width in pixels to resize to, by averaging or interpolation.
        max_pixels: Largest number of pixels that is decoded.

    Raises:
        InvalidInput: Not a picture, or one that is cut short.
        TooLarge: More than `max_pixels`, or a JPEG of more than 100 scans.
        ApplicationError: The mode is another.
    """
    if mode not in ("L", "RGB", "RGBA"):
        raise ApplicationError(f"decode_image has mode {mode!r}; choose 'L', 'RGB' or 'RGBA'.")
    # Pillow warns of harmless oddities, which would let clients fill the server's log.
    with _WARNINGS_OFF:
        image = _opened(body, max_pixels)
        try:
            return np.asarray(_resized(plain_pixels(image, mode), size), np.uint8)
        except _PILLOW_ERRORS as error:
            raise InvalidInput("The picture is cut short or damaged; send the whole file.") from error


def _opened(body: bytes, max_pixels: int) -> Any:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(body), formats=FORMATS)
    except Image.DecompressionBombError:
        raise TooLarge(
            f"The picture has far too many pixels; at most {max_pixels:,} are taken. Scale it down."
        ) from None
    except _PILLOW_ERRORS as error:
        raise InvalidInput("The body is not a picture that can be read; send a PNG or JPEG file's bytes.") from error
    # A scan of a progressive JPEG takes a few bytes in the file and a pass over the whole picture to decode.
    if body.startswith(b"\xff\xd8") and (scans := body.count(b"\xff\xda")) > MAX_SCANS:
        raise TooLarge(f"The picture has {scans:,} scans; at most {MAX_SCANS} are taken. Save it again.")
    width, height = image.size
    if width * height > max_pixels:
        raise TooLarge(
            f"The picture has {width:,} x {height:,} pixels; at most {max_pixels:,} are taken. Scale it down."
        )
    return image


def plain_pixels(image: Any, mode: str) -> Any:
    """Convert a Pillow image to a mode: upright, opaque, 8 bits per channel; the argument may be modified."""
    from PIL import Image, ImageOps

    if image.mode.startswith("I"):
        # Pillow clips 16-bit grey at 255.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    ImageOps.exif_transpose(image, in_place=True)
    if "A" in image.getbands() or "transparency" in image.info:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image.convert("RGBA"))
    # Pillow copies even if the mode is the same.
    return image if image.mode == mode else image.convert(mode)


def _resized(image: Any, size: tuple[int, int] | None) -> Any:
    from PIL import Image

    if size is None or (image.height, image.width) == size:
        return image
    smaller = size[0] <= image.height and size[1] <= image.width
    return image.resize((size[1], size[0]), Image.Resampling.BOX if smaller else Image.Resampling.BILINEAR)
