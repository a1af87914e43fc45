"""Entries of the messages on a connection that many live streams share, for servers and clients.

Each binary message of the WebSocket holds one entry or more: a head of three little-endian uint32 (the stream's id, the
kind, the size of the payload), then the payload, which is a message as on a connection of its own.
docs/reference/streams.md describes it to users.
"""

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import final

from penstock.core.errors import InvalidInput

HEAD = Struct("<III")
# Path of the upgrade to a shared connection.
PATH = "/v1/streams"
# Kinds of entries: opcodes of WebSocket.
TEXT, BINARY, CLOSE = 1, 2, 8
_KINDS = (TEXT, BINARY, CLOSE)
# Longest message before a stream is open; longer ones are taken later.
MAX_FIRST_BYTES = 1 << 16

Entry = tuple[int, int, bytes]


@final
class EntryReader:
    """Takes the entries of messages out one at a time, so that a caller can bound what it takes at once.

    Attributes:
        message: The message that is being read, or several that are joined.
        each: Size of each of these.
        at: Where its next entry begins.
    """

    __slots__ = ("at", "each", "message")

    def __init__(self) -> None:
        self.message, self.each, self.at = b"", 0, 0

    def feed(self, message: bytes, each: int = 0) -> None:
        """Begin with a message, or with several of one size; the last one was read to its end."""
        assert self.at == len(self.message), (self.at, len(self.message))
        self.message, self.each, self.at = message, each or len(message), 0

    def drop(self) -> None:
        """Drop what was not taken."""
        self.message, self.each, self.at = b"", 0, 0

    @property
    def left(self) -> int:
        """Number of bytes that were not taken."""
        return len(self.message) - self.at

    @property
    def next_id(self) -> int:
        """Id of the stream of the next entry; -1 if its head is not whole."""
        return HEAD.unpack_from(self.message, self.at)[0] if self.left >= HEAD.size else -1

    def next(self) -> Entry | None:
        """Take the next entry: its stream's id, its kind, its payload; None at the end of the message.

        Raises:
            InvalidInput: The bytes are no entry.
        """
        message, at = self.message, self.at
        if at == len(message):
            return None
        limit = at + self.each - at % self.each
        left = limit - at
        if left < HEAD.size:
            raise InvalidInput(f"An entry has {left} bytes; its head alone has {HEAD.size}.")
        stream_id, kind, size = HEAD.unpack_from(message, at)
        begin = at + HEAD.size
        end = begin + size
        if end > limit:
            raise InvalidInput(f"An entry of {size:,} bytes has {limit - begin:,} in its message.")
        if kind not in _KINDS:
            raise InvalidInput(f"An entry is of kind {kind}; it must be 1 (text), 2 (binary) or 8 (close).")
        self.at = end
        return stream_id, kind, message[begin:end]


def entry_of(stream_id: int, kind: int, payload: bytes | memoryview) -> bytes:
    """One entry."""
    return b"".join((HEAD.pack(stream_id, kind, len(payload)), payload))


def close_payload(code: int, reason: str) -> bytes:
    """Payload of the end of a stream, as in WebSocket's close frame."""
    return code.to_bytes(2, "big") + reason.encode()


def messages_of(entries: Iterable[bytes]) -> Iterator[bytes]:
    """Join entries into as few messages as a server takes at any time."""
    parts: list[bytes] = []
    size = 0
    for entry in entries:
        if parts and size + len(entry) > MAX_FIRST_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
        parts.append(entry)
        size += len(entry)
    if parts:
        yield b"".join(parts)
