"""Building blocks of a `decode`: turn request bytes into one raw array, in bounded memory and time."""

import io
import logging
import struct
import threading
import warnings
import zlib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Literal, final

import numpy as np

from penstock.core.errors import ApplicationError, InvalidInput, Overloaded, TooLarge
from penstock.core.machine.extras import DISTRIBUTION
from penstock.core.pictures.jpeg_header import plain_jpeg
from penstock.core.pictures.picture_bounds import JPEG, PNG, check_pieces
from penstock.core.pictures.picture_resize import resize_image, resize_pixels
from penstock.core.spec import Array

log = logging.getLogger(__name__)

Mode = Literal["L", "RGB", "RGBA"]
# Not every format of Pillow: some start other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Encoders write about ten.
MAX_SCANS = 100
# Passes over `max_pixels` pixels that the scans of a JPEG may take.
MAX_PASSES = 16
# A JPEG is decoded at one of these fractions of its size, by smaller inverse cosine transforms.
SCALES = (8, 4, 2)
# MPO is a JPEG that others follow: previews, depth maps.
JPEG_FORMATS = ("JPEG", "MPO")
SLOW_JPEG = (
    "JPEG files are decoded by Pillow, which takes half as long again, because the package simplejpeg is not "
    f"installed; pip install '{DISTRIBUTION}[cpu]'."
)
_CHANNELS = {"L": (), "RGB": (3,), "RGBA": (4,)}
ORIENTATION = 0x0112
SIDEWAYS = (5, 6, 7, 8)
# `PIL.Image.Transpose` for each orientation that is not upright: mirrored, turned by 180 degrees, and so on.
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}


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
_DAMAGED = "The picture is cut short or damaged; send the whole file."
# Raised by Pillow's decoders for damaged files; they have no common base.
_PILLOW_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, OSError, RuntimeError),
    *(SyntaxError, TypeError, ValueError, struct.error, zlib.error),
)


def decode_image(body: bytes, *, mode: Mode, size: tuple[int, int] | None = None, max_pixels: int = 1 << 22) -> Array:
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
        TooLarge: More than `max_pixels`; a JPEG of more than 100 scans, or of fewer that decode more than 16 times
            `max_pixels`; more chunks, segments, blocks or tags than `penstock.core.pictures.picture_bounds` takes.
        Overloaded: There is no memory for its pixels.
        ApplicationError: The mode is another.
    """
    return decode_scaled(body, mode=mode, size=size, max_pixels=max_pixels, at_least=None)


def decode_scaled(
    body: bytes, *, mode: Mode, size: tuple[int, int] | None, max_pixels: int, at_least: tuple[int, int] | None
) -> Array:
    """Decode a picture as `decode_image` does, a JPEG at a fraction of its size where that is enough.

    Args:
        body: See `decode_image`.
        mode: See `decode_image`.
        size: See `decode_image`.
        max_pixels: See `decode_image`; it limits the picture in the file.
        at_least: Height and width that a JPEG has at least if it is decoded at 1/2, 1/4 or 1/8 of its size, the
            smallest of them that has both; None for all pixels.

    Raises:
        RequestError: See `decode_image`.
        ApplicationError: The mode is another.
    """
    if mode not in ("L", "RGB", "RGBA"):
        raise ApplicationError(f"decode_image has mode {mode!r}; choose 'L', 'RGB' or 'RGBA'.")
    if (pixels := _plain_jpeg_pixels(body, mode, max_pixels, at_least)) is not None:
        return resize_pixels(pixels, size)
    # Pillow warns of harmless oddities, which would let clients fill the server's log.
    with _WARNINGS_OFF:
        image = _opened(body, max_pixels)
        try:
            if image.format in JPEG_FORMATS:
                return _jpeg_pixels(body, image, mode, size, at_least)
            return _finished(plain_pixels(image, mode), mode, size)
        except MemoryError as error:
            raise _no_memory() from error
        except _PILLOW_ERRORS as error:
            raise InvalidInput(_DAMAGED) from error


def _plain_jpeg_pixels(body: bytes, mode: Mode, max_pixels: int, at_least: tuple[int, int] | None) -> Array | None:
    """Decode a JPEG about which Pillow would say no more than its header does; None for others and damaged ones."""
    header = plain_jpeg(body)
    if header is None or (mode == "L") != (header.channels == 1):
        return None
    height, width, _ = header
    if height * width > max_pixels or (decode := jpeg_decoder()) is None:
        return None
    try:
        return decode(body, height, width, _scale(height, width, at_least), mode)
    except MemoryError as error:
        raise _no_memory() from error


def _jpeg_pixels(
    body: bytes, image: Any, mode: Mode, size: tuple[int, int] | None, at_least: tuple[int, int] | None
) -> Array:
    from PIL import Image

    orientation = image.getexif().get(ORIENTATION, 1)
    if at_least is not None and orientation in SIDEWAYS:
        at_least = at_least[1], at_least[0]
    scale = _scale(image.height, image.width, at_least)
    decode = jpeg_decoder()
    pixels = None
    if decode is not None and image.mode in ("L", "RGB"):
        # Pillow rounds the grey of colours in its own way.
        direct = mode if mode != "L" and orientation == 1 else image.mode
        pixels = decode(body, image.height, image.width, scale, direct)
    if pixels is None:
        if scale > 1:
            image.draft(None, (image.width // scale, image.height // scale))
        return _finished(plain_pixels(image, mode), mode, size)
    if orientation == 1 and pixels.shape[2:] == _CHANNELS[mode]:
        return resize_pixels(pixels, size)
    found = Image.fromarray(pixels)
    turn = _TURNS.get(orientation)
    return _finished(found if turn is None else found.transpose(Image.Transpose(turn)), mode, size)


def _scale(height: int, width: int, at_least: tuple[int, int] | None) -> int:
    if at_least is None:
        return 1
    # Below 8 pixels, two fractions may give the same size.
    fit = (k for k in SCALES if -(-height // k) >= at_least[0] and -(-width // k) >= at_least[1])
    return next(fit, 1) if min(height, width) >= SCALES[0] else 1


@cache
def import_decoders() -> None:
    """Import all that decoding a picture takes; the first picture would wait 0.1 s for it otherwise.

    Pillow by itself would import the modules of all its formats for a body that begins as none it knows: 0.4 s.
    """
    from PIL import Image

    # It knows the others.
    Image.preinit()
    for name in ("PIL.WebPImagePlugin", "PIL.MpoImagePlugin"):
        import_module(name)
    jpeg_decoder()


JpegDecode = Callable[[bytes, int, int, int, str], Array | None]


@cache
def jpeg_decoder() -> JpegDecode | None:
    """Return the decoder of JPEG that takes two thirds of Pillow's time for the same pixels; None where it is missing.

    Both are libjpeg-turbo. A process without the package logs so once.
    """
    try:
        import simplejpeg
    except ImportError:
        log.warning("%s", SLOW_JPEG)
        return None

    colours = {"L": "GRAY", "RGB": "RGB", "RGBA": "RGBA"}

    def decode(body: bytes, height: int, width: int, scale: int, mode: str) -> Array | None:
        try:
            # Two readers may disagree about a damaged header, and only one of them has been checked for its size.
            if simplejpeg.decode_jpeg_header(body)[:2] != (height, width):
                return None
            high, wide = (-(-height // scale), -(-width // scale)) if scale > 1 else (0, 0)
            pixels = simplejpeg.decode_jpeg(body, colours[mode], min_height=high, min_width=wide)
        except ValueError:
            # Pillow accepts some kinds of damage, as browsers do, and refuses the others in its own words.
            return None
        return pixels[..., 0] if mode == "L" else pixels

    return decode


def decoded_pixels(body: bytes) -> int | None:
    """Read from the header of a PNG or JPEG how many pixels its scans decode; None where that is not known."""
    if body.startswith(PNG) and len(body) >= 24:
        width, height = struct.unpack_from(">II", body, 16)
        return width * height
    if not body.startswith(JPEG) or jpeg_decoder() is None:
        return None
    if (header := plain_jpeg(body)) is not None:
        return header.height * header.width
    import simplejpeg

    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(body)
    except ValueError:
        return None
    return int(height) * int(width) * _scan_count(body)


def slow_jpeg() -> str:
    """Return why JPEG is decoded in a slower way than there is, and what to do; empty where it is not."""
    return "" if jpeg_decoder() is not None else SLOW_JPEG


def text_fault(error: BaseException, body: bytes) -> InvalidInput | None:
    """Make the error of a body that an application's `decode` took for text; None where another text was at fault.

    Args:
        error: What `decode` raised.
        body: Its body.
    """
    if not isinstance(error, UnicodeDecodeError) or error.object not in body:
        return None
    at = body.find(error.object) + error.start
    return InvalidInput(f"The body is not text in {error.encoding}, from byte {at:,}: {error.reason}.")


def _opened(body: bytes, max_pixels: int) -> Any:
    from PIL import Image

    import_decoders()
    check_pieces(body)
    try:
        image = Image.open(io.BytesIO(body), formats=FORMATS)
    except Image.DecompressionBombError:
        raise TooLarge(
            f"The picture has far too many pixels; at most {max_pixels:,} are taken. Scale it down."
        ) from None
    except MemoryError as error:
        raise _no_memory() from error
    except _PILLOW_ERRORS as error:
        if body.startswith((PNG, JPEG)):
            raise InvalidInput(_DAMAGED) from error
        found = "not a picture that can be read" if body else "empty"
        raise InvalidInput(f"The file is {found}; send a PNG or JPEG file's bytes.") from error
    width, height = image.size
    if width * height > max_pixels:
        raise TooLarge(
            f"The picture has {width:,} x {height:,} pixels; at most {max_pixels:,} are taken. Scale it down."
        )
    # A scan of a progressive JPEG takes a few bytes in the file and a pass over the whole picture to decode. Of a plain
    # one, the first has all channels: no decoder takes another.
    if body.startswith(JPEG) and plain_jpeg(body) is None:
        scans, most = _scan_count(body), min(MAX_SCANS, max(1, MAX_PASSES * max_pixels // (width * height)))
        if scans > most:
            raise TooLarge(f"The picture has {scans:,} scans; at most {most} are taken of its size. Save it again.")
    return image


def _no_memory() -> Overloaded:
    # No fault of the file, whose pixels are within the limit.
    return Overloaded("There is no memory to decode the picture; send it again later, or a smaller one.")


def _scan_count(body: bytes) -> int:
    # The same as body.count(b"\xff\xda") in a quarter of its time.
    values = np.frombuffer(body, np.uint8)
    found = values[:-1] == 0xFF
    found &= values[1:] == 0xDA
    return int(np.count_nonzero(found))


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


def _finished(image: Any, mode: Mode, size: tuple[int, int] | None) -> Array:
    return resize_image(image if image.mode == mode else image.convert(mode), size)
