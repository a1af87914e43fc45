"""The messages that a client sent on a live stream, kept so that another connection can go on. No sockets, no clock."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast, final

import orjson

# The messages of the protocol that have no samples.
END = '{"type":"end"}'
FLUSH = '{"type":"flush"}'
NUMBER_BYTES = 4

Message = str | bytes


class Ticket(NamedTuple):
    """A server's ticket: the state of the stream after some messages.

    Args:
        text: What another server is given.
        next: Number in the stream of the first message that it does not cover.
        first: Number in the stream of the message that has number 0 for the servers of this ticket.
    """

    text: str
    next: int
    first: int


class StreamBeginning(NamedTuple):
    """The messages with which another connection begins.

    Args:
        ticket: The ticket from which it goes on; None for none.
        first: Number in the stream of the message that has number 0 there.
        messages: The messages that it is sent first, with their numbers there.
    """

    ticket: Ticket | None
    first: int
    messages: list[Message]


@final
@dataclass(slots=True, eq=False)
class KeptMessages:
    """The messages of a stream since its beginning, its last answered flush or a ticket, and which are answered.

    A server that is sent them again gives the same results. Those that came before are dropped, so that each comes
    once. Numbers on a new connection count from 0, or on from the ticket; here they count from the beginning of the
    stream. Messages of the connection before may come between `beginning` and `begin`, and not after. Threads take
    turns by a lock of the caller's.

    Args:
        max_bytes: Memory for them. Without tickets, a stream that outgrows it goes on, and cannot be resumed. With
            tickets, those that a ticket covers are dropped for others.
        has_tickets: Whether the server sends tickets.
    """

    max_bytes: int
    has_tickets: bool = False
    # Whether the first one that is kept is the stream's first, or the first after a flush.
    _begins_clear: bool = field(default=True, init=False)
    # Whether nothing is kept any more.
    _is_lost: bool = field(default=False, init=False)
    _ticket: Ticket | None = field(default=None, init=False)
    # Each with its number; the end has none.
    _kept: deque[tuple[int | None, Message]] = field(default_factory=deque[tuple[int | None, Message]], init=False)
    _bytes: int = field(default=0, init=False)
    # The number of the next message and of the next result; that of the message with number 0 on this connection; and
    # of the first message that is kept.
    _next: int = field(default=0, init=False)
    _answered: int = field(default=0, init=False)
    _first: int = field(default=0, init=False)
    _oldest: int = field(default=0, init=False)
    _flushes: deque[int] = field(default_factory=deque[int], init=False)
    _ended: bool = field(default=False, init=False)

    @property
    def sent(self) -> int:
        """Number of messages so far that have a number."""
        return self._next

    @property
    def waiting(self) -> bool:
        """True if a result is still to come."""
        return self._answered < self._next + self._ended

    @property
    def is_whole(self) -> bool:
        """True if the stream can be resumed."""
        return not self._is_lost and (self._begins_clear or self.ticket is not None)

    @property
    def ticket(self) -> Ticket | None:
        """The newest ticket from which the stream can go on; None without one."""
        ticket = self._ticket
        return ticket if ticket is not None and self._oldest <= ticket.next else None

    def add(self, message: Message) -> Message:
        """Keep a message that is sent; return it with its number on this connection."""
        number = None
        if message == END:
            self._ended = True
        else:
            number, self._next = self._next, self._next + 1
            if message == FLUSH:
                self._flushes.append(number)
        if not self._is_lost:
            self._kept.append((number, message))
            self._bytes += len(message)
            self._shrink()
        return _numbered(number, message, self._first)

    def refuse(self, ticket: Ticket) -> None:
        """Forget a ticket that a server refused."""
        if self._ticket is ticket:
            self._ticket = None

    def beginning(self) -> StreamBeginning:
        """Choose where another connection begins: at the newest ticket, or with all that is kept."""
        assert self.is_whole, "the stream has outgrown what is kept"
        ticket = self.ticket
        first, begin = (self._oldest, self._oldest) if ticket is None else (ticket.first, ticket.next)
        messages = [
            _numbered(number, message, first) for number, message in self._kept if number is None or number >= begin
        ]
        return StreamBeginning(ticket, first, messages)

    def begin(self, beginning: StreamBeginning) -> None:
        """Go on with a connection that began so."""
        self._first = beginning.first

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
            self._lose()
        if fields.get("type") == "ticket":
            self._keep_ticket(fields)
            return None
        if fields.get("type") != "result" or not isinstance(fields.get("seq"), int):
            return message
        number = fields["seq"] + self._first
        if not self._is_new(number):
            return None
        return message if self._first == 0 else orjson.dumps(fields | {"seq": number}).decode()

    def _keep_ticket(self, fields: dict[str, Any]) -> None:
        text, covered = fields.get("ticket"), fields.get("seq")
        if isinstance(text, str) and isinstance(covered, int):
            self._ticket = Ticket(text, covered + 1 + self._first, self._first)
            self._shrink()

    def _shrink(self) -> None:
        """Keep no more than there is memory for; what a ticket covers goes first."""
        if self._bytes <= self.max_bytes:
            return
        if (ticket := self.ticket) is not None:
            self._drop_until(ticket.next)
        if not self.has_tickets and self._bytes > self.max_bytes:
            self._lose()
        # A ticket that comes later may cover what is dropped here.
        while self._bytes > self.max_bytes and self._kept and (at := self._kept[0][0]) is not None:
            self._drop_until(at + 1)

    def _is_new(self, number: int) -> bool:
        if number < self._answered:
            return False
        self._answered = number + 1
        while self._flushes and self._flushes[0] <= number:
            after = self._flushes.popleft() + 1
            if self._oldest <= after:
                self._drop_until(after)
                self._begins_clear = True
        return True

    def _lose(self) -> None:
        self._is_lost = True
        self._kept.clear()

    def _drop_until(self, number: int) -> None:
        """Drop what was sent before a message."""
        self._begins_clear = self._begins_clear and number <= self._oldest
        while self._kept and (at := self._kept[0][0]) is not None and at < number:
            self._bytes -= len(self._kept.popleft()[1])
        self._oldest = max(self._oldest, number)


def _numbered(number: int | None, message: Message, first: int) -> Message:
    if number is None or isinstance(message, str):
        return message
    return (number - first).to_bytes(NUMBER_BYTES, "little") + message[NUMBER_BYTES:]


def _fields_of(message: str) -> dict[str, Any]:
    try:
        fields = orjson.loads(message)
    except orjson.JSONDecodeError:
        return {}
    return cast(dict[str, Any], fields) if isinstance(fields, dict) else {}
