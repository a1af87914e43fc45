"""Pictures beside other tensors: as a file's part of a form, or in base64 in JSON by name."""

import binascii
import re
from typing import cast

import numpy as np

from penstock.core.application import Application
from penstock.core.errors import InvalidInput
from penstock.core.picture_file import PictureFile

_DATA_URL = re.compile(r"data:image/[\w.+-]{1,40};base64,")


def picture_of(application: Application) -> PictureFile | None:
    """Return the declaration of a picture beside other tensors; None where there is none."""
    decode = application.decode
    return decode if isinstance(decode, PictureFile) and decode.tensor else None


def has_text(body: bytes, picture: PictureFile) -> bool:
    """True if JSON may give the picture as a text, under its name or one with escapes."""
    return b"\\" in body or re.search(rb'"%s"\s*:\s*"' % re.escape(picture.tensor.encode()), body) is not None


def check_row(row: object, picture: PictureFile) -> None:
    """Check that a row of a batch has its picture as numbers.

    Raises:
        InvalidInput: It is a text.
    """
    if isinstance(row, dict) and isinstance(cast(dict[str, object], row).get(picture.tensor), str):
        raise InvalidInput("A batch takes pictures as nested lists of numbers; send a file with one row alone.")


def with_pixels(numbers: object, picture: PictureFile) -> object:
    """Replace the picture of one row of JSON by its pixels, where it is a text.

    Raises:
        InvalidInput: The text is no base64, or no picture.
        TooLarge: The picture has too many pixels.
    """
    if not isinstance(numbers, dict):
        return numbers
    named = cast(dict[str, object], numbers)
    text = named.get(picture.tensor)
    if not isinstance(text, str):
        return named
    if (found := _DATA_URL.match(text)) is not None:
        text = text[found.end() :]
    try:
        content = binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError):
        raise InvalidInput(
            f"{picture.tensor} is a text that is no base64; send the bytes of a picture's file in base64, or nested "
            f"lists of numbers."
        ) from None
    return {**named, picture.tensor: np.ascontiguousarray(picture.pixels(content))}
