"""Compressed messages, in bounded memory.

gRPC's library would unfold a message whole before it compares its size with the limit. It hands compressed messages
over as they came, and says neither that a message is compressed nor how. Their first bytes do: no message of
`oip_v2.proto` begins with them.
"""

import asyncio
import zlib
from typing import Any, final

from penstock.core.errors import InvalidInput, TooLarge

# First byte of gzip, whose three low bits are no wire type of protobuf; and of zlib's format, which gRPC calls deflate:
# a number in a field 15, which no message has.
_GZIP, _ZLIB = 0x1F, 0x78
# Bytes of a message that are unpacked at once; one that is larger is unpacked further in steps, which take about a
# millisecond each, and one such message after the other.
FIRST_BYTES, STEP_BYTES = 1 << 16, 1 << 20


@final
class Unfolding:
    """Unfolds the compressed messages of one server, in one event loop.

    Args:
        message_bytes: Largest message, also once it is unfolded.
    """

    def __init__(self, message_bytes: int) -> None:
        self._max_bytes = message_bytes
        self._turn = asyncio.Lock()

    async def unfolded(self, message: bytes) -> bytes:
        """Return a message as it was before its client compressed it; the same if it did not.

        Raises:
            InvalidInput: It is damaged or cut short.
            TooLarge: It unfolds to more than the largest message.
        """
        if not is_compressed(message):
            return message
        engine = zlib.decompressobj(wbits=47)  # detects gzip or zlib
        plain: bytes | None = _step(engine, message, FIRST_BYTES)
        if not engine.eof:
            async with self._turn:
                plain = await self._rest(engine, plain)
        # The traceback of an error must not hold what was unpacked.
        if plain is None:
            raise TooLarge(
                f"The message has more than {self._max_bytes:,} bytes once it is unpacked; that is the most taken."
            )
        if not engine.eof or engine.unused_data:
            plain = None
            raise InvalidInput("The compressed message is cut short, or bytes follow its end; send one stream, whole.")
        return plain

    async def _rest(self, engine: Any, plain: bytes) -> bytes | None:
        parts, size = [plain], len(plain)
        while not engine.eof and parts[-1]:
            # Calls of others are between the steps.
            await asyncio.sleep(0)
            parts.append(_step(engine, engine.unconsumed_tail, STEP_BYTES))
            size += len(parts[-1])
            if size > self._max_bytes:
                return None
        return b"".join(parts)


def is_compressed(message: bytes) -> bool:
    """Return whether a message of the protocol is compressed by gzip or deflate."""
    if len(message) < 2 or message[0] not in (_GZIP, _ZLIB):
        return False
    # The second byte of zlib's format makes a multiple of 31 of both.
    return message[0] == _GZIP or (message[0] << 8 | message[1]) % 31 == 0


def _step(engine: Any, data: bytes, most: int) -> bytes:
    try:
        return engine.decompress(data, most)
    except zlib.error:
        raise InvalidInput("The compressed message is damaged; send it as gzip or deflate, or plain.") from None
