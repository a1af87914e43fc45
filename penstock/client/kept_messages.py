"""The messages that a client sent on a live stream, kept so that another connection can go on. No sockets, no clock."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast, final

import orjson

# The messages of the protocol that have no samples.
END = '{"type":"end"}'
FLUSH = '{"type":"flush"}'
NUMBER_BYTES = 4

Message = str | bytes


@final
@dataclass(slots=True, eq=False)
class KeptMessages:
    """The messages of a stream since its beginning or its last answered flush, and which of them are answered.

    A server that is sent them again gives the same results. Those that came before are dropped, so that each comes
    once. Numbers on a new connection count from 0; here they count from the beginning of the stream.

    Args:
        max_bytes: Memory for them. A stream that outgrows it goes on, and cannot be resumed.

    Attributes:
        is_whole: Whether the stream can be resumed.
    """

    max_bytes: int
    is_whole: bool = field(default=True, init=False)
    # Each with its number; the end has none.
    _kept: deque[tuple[int | None, Message]] = field(default_factory=deque[tuple[int | None, Message]], init=False)
    _bytes: int = field(default=0, init=False)
    # The number of the next message and of the next result; that of the first message on this connection.
    _next: int = field(default=0, init=False)
    _answered: int = field(default=0, init=False)
    _first: int = field(default=0, init=False)
    _flushes: deque[int] = field(default_factory=deque[int], init=False)
    _ended: bool = field(default=False, init=False)

    @property
    def waiting(self) -> bool:
        """True if a result is still to come."""
        return self._answered < self._next + self._ended

    def add(self, message: Message) -> Message:
        """Keep a message that is sent; return it with its number on this connection."""
        number = None
        if message == END:
            self._ended = True
        else:
            number, self._next = self._next, self._next + 1
            if message == FLUSH:
                self._flushes.append(number)
        self._bytes += len(message)
        if self._bytes > self.max_bytes:
            self.is_whole = False
        if self.is_whole:
            self._kept.append((number, message))
        else:
            self._kept.clear()
        return self._numbered(number, message)

    def begin(self) -> list[Message]:
        """Begin on a new connection; return the messages that it is sent first, with their numbers there."""
        assert self.is_whole, "the stream has outgrown what is kept"
        numbers = (number for number, _ in self._kept if number is not None)
        self._first = next(numbers, self._next)
        return [self._numbered(number, message) for number, message in self._kept]

    def take(self, message: Message) -> Message | None:
        """Take a message of the server; return it with its number in the stream, or None if it came before."""
        if isinstance(message, bytes):
            number = int.from_bytes(message[:NUMBER_BYTES], "little") + self._first
            if not self._is_new(number):
                return None
            return number.to_bytes(NUMBER_BYTES, "little") + message[NUMBER_BYTES:]
        fields = _fields_of(message)
        if "segment" in fields:
            # Those of several segments alternate; which of them came before is not known.
            self.is_whole = False
            self._kept.clear()
        if fields.get("type") != "result" or not isinstance(fields.get("seq"), int):
            return message
        number = fields["seq"] + self._first
        if not self._is_new(number):
            return None
        return message if self._first == 0 else orjson.dumps(fields | {"seq": number}).decode()

    def _is_new(self, number: int) -> bool:
        if number < self._answered:
            return False
        self._answered = number + 1
        while self._flushes and self._flushes[0] <= number:
            self._drop_until(self._flushes.popleft())
        return True

    def _drop_until(self, flush: int) -> None:
        while self._kept and (at := self._kept[0][0]) is not None and at <= flush:
            self._bytes -= len(self._kept.popleft()[1])

    def _numbered(self, number: int | None, message: Message) -> Message:
        if number is None or isinstance(message, str):
            return message
        return (number - self._first).to_bytes(NUMBER_BYTES, "little") + message[NUMBER_BYTES:]


def _fields_of(message: str) -> dict[str, Any]:
    try:
        fields = orjson.loads(message)
    except orjson.JSONDecodeError:
        return {}
    return cast(dict[str, Any], fields) if isinstance(fields, dict) else {}
