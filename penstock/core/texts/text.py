"""Text as the bytes of its UTF-8: the same array from a request, on a device and in a browser.

`device/web/text.js` makes the same bytes; `tests/data/text.json` tests both.
"""

import unicodedata
from dataclasses import dataclass
from typing import final

import numpy as np

from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError, InvalidInput, TooLarge
from penstock.core.prepare import RawSpec
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array

# First byte of a character, in UTF-8: all others are 0b10xxxxxx.
_CONTINUES, _CONTINUES_MASK = 0x80, 0xC0
# Composing a text makes it shorter by this factor at most: U+0390 has two bytes, its parts 2 + 2 + 2.
_COMPOSED = 4


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ByteText:
    """A `decode` of text: the bytes of its UTF-8 in Unicode's composed form (NFC) as one tensor, uint8 `[bytes]`.

    An exported pack carries it, so that its text box takes text too.

    Args:
        tensor: The name of the input.
        max_bytes: The largest number of bytes, that of the input's `Dim`.
        cut: Cut a longer text after its last whole character that fits; otherwise it is refused.

    Raises:
        ApplicationError: No room for a character, or no name.
    """

    tensor: str
    max_bytes: int
    cut: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, str) or not self.tensor:
            raise ApplicationError(f"ByteText has tensor={self.tensor!r}; give the name of the input.")
        if type(self.max_bytes) is not int or self.max_bytes < 4:
            raise ApplicationError(f"ByteText has max_bytes={self.max_bytes!r}; a character has up to 4, so give more.")

    def __call__(self, body: bytes, content_type: str) -> dict[str, Array]:
        """Decode a request's body.

        Raises:
            InvalidInput: No UTF-8, or no text.
            TooLarge: More bytes than there is room for.
        """
        # Composing costs time, and what lies beyond these bytes is never used.
        beyond = self.max_bytes * _COMPOSED
        if self.cut and len(body) > beyond:
            body = body[: _whole(body, beyond)]
        try:
            return {self.tensor: self.of_text(body.decode())}
        except UnicodeDecodeError as error:
            raise InvalidInput(f"The text is not UTF-8 (byte {error.start:,}); send it as UTF-8.") from None

    def of_text(self, text: str) -> Array:
        """The bytes of a text, uint8 `[bytes]`.

        Raises:
            InvalidInput: No text, or half of a surrogate pair.
            TooLarge: More bytes than there is room for.
        """
        try:
            data = unicodedata.normalize("NFC", text).encode()
        except UnicodeEncodeError:
            raise InvalidInput("The text holds half of a surrogate pair; send whole characters.") from None
        if not data:
            raise InvalidInput("The text is empty; send at least one character.")
        if len(data) > self.max_bytes:
            if not self.cut:
                raise TooLarge(f"The text has {len(data):,} bytes; at most {self.max_bytes:,} are taken. Split it.")
            data = data[: _whole(data, self.max_bytes)]
        return np.frombuffer(data, np.uint8)

    @property
    def needs(self) -> str:
        """The inputs that it fills, for messages."""
        return f"one input, uint8 of a Dim with max={self.max_bytes}, named {self.tensor!r}"

    def fits(self, input: ChunkSpec | RawSpec) -> bool:
        """Check that an input is one tensor of bytes, of the length that a text gives."""
        if not isinstance(input, RecordSpec) or len(input.tensors) != 1:
            return False
        (tensor,) = input.tensors
        return (
            tensor.name == self.tensor
            and tensor.dtype == "uint8"
            and len(tensor.shape) == 1
            and isinstance(tensor.shape[0], Dim)
            and tensor.shape[0].max == self.max_bytes
        )


def _whole(data: bytes, size: int) -> int:
    """The largest number of bytes, at most `size`, that ends between two characters."""
    while size and data[size] & _CONTINUES_MASK == _CONTINUES:
        size -= 1
    return size
