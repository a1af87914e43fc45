"""Ready-made parts of a `decode`: request bytes to one raw array, in bounded memory and time."""

import io
import warnings

import numpy as np

from penstock.core.errors import InvalidInput, TooLarge
from penstock.core.spec import Array


def decode_image(body: bytes, *, mode: str, size: tuple[int, int] | None = None, max_pixels: int = 1 << 22) -> Array:
    """The pixels of a PNG, JPEG or other picture as uint8, `[H, W]` for mode `"L"` and `[H, W, 3]` for `"RGB"`.

    The header is read first: a picture of too many pixels is refused before any of them is decoded.

    Args:
        body: The file's bytes.
        mode: `"L"` for grey, `"RGB"` for colour. Transparent parts become black.
        size: The sensor's height and width in pixels; another size is averaged or interpolated to it.
        max_pixels: The most pixels that are decoded.

    Raises:
        InvalidInput: Not a picture, or one that is cut short.
        TooLarge: More than `max_pixels`.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(body))
    except Image.DecompressionBombError:
        raise TooLarge(
            f"The picture has far too many pixels; at most {max_pixels:,} are taken. Scale it down."
        ) from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
        raise InvalidInput("The body is not a picture that can be read; send a PNG or JPEG file's bytes.") from None
    width, height = image.size
    if width * height > max_pixels:
        raise TooLarge(
            f"The picture has {width:,} x {height:,} pixels; at most {max_pixels:,} are taken. Scale it down."
        )
    try:
        if "A" in image.getbands() or "transparency" in image.info:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image.convert("RGBA"))
        image = image.convert(mode)
    except (OSError, ValueError, SyntaxError):
        raise InvalidInput("The picture is cut short or damaged; send the whole file.") from None
    if size is not None and (height, width) != size:
        image = image.resize(
            (size[1], size[0]), Image.Resampling.BOX if width >= size[1] else Image.Resampling.BILINEAR
        )
    return np.asarray(image, np.uint8)
