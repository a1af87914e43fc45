"""Connections of live streams that are opened again, when theirs or the server is gone, and go on with the stream."""

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import orjson
from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.exceptions import ConnectionClosed, ConnectionClosedError
from websockets.frames import Close, CloseCode
from websockets.sync.client import ClientConnection

from penstock.client.kept_messages import KeptMessages, Message, StreamBeginning, Ticket
from penstock.client.retry import GATEWAY
from penstock.core.errors import ClientError, InvalidResponse, InvalidTicket, Overloaded, QuotaExceeded, RequestError

# Codes with which a server that goes on elsewhere, or later, closes a stream.
AGAIN = (CloseCode.GOING_AWAY, CloseCode.SERVICE_RESTART, CloseCode.TRY_AGAIN_LATER)
# Statuses of handshakes that may succeed later. The stream itself may count in a quota until its server finds it gone.
AGAIN_STATUSES = (QuotaExceeded.status, Overloaded.status, *GATEWAY)
# Pauses between attempts: the first, and the longest.
PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
# A wait for a message is interrupted so often for silence, as a share of the silence that ends a connection.
LOOKS = 4
# What a server must say again of the stream.
_SAME = ("app", "encoding", "rate_hz", "chunk_frames")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reconnect:
    """Settings of a live stream that goes on after its connection or its server is gone.

    The client keeps what it sent since the beginning of the stream or its last answered flush. On another connection it
    sends that again, and drops the results that it has already. Where the server gives tickets, it offers the newest
    one and sends what came after it.

    Args:
        for_s: Time for which a connection is tried, in seconds.
        silent_s: Time without an answer to a message after which a connection counts as gone, in seconds.
        kept_bytes: Memory for what is kept. A stream that outgrows it goes on from its newest ticket; without one, it
            ends with its connection.
        tickets: Whether tickets are asked for. Servers that know none refuse a stream that asks.

    Raises:
        ClientError: A value is out of its range.
    """

    for_s: float = 30.0
    silent_s: float = 1.0
    kept_bytes: int = 16 << 20
    tickets: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.for_s < math.inf:
            raise ClientError(f"for_s is {self.for_s!r}; it must be a number of seconds, 0 or more.")
        if not 0 < self.silent_s < math.inf:
            raise ClientError(f"silent_s is {self.silent_s!r}; it must be a number of seconds above 0.")
        if self.kept_bytes < 0:
            raise ClientError(f"kept_bytes is {self.kept_bytes!r}; it must be 0 or more.")


class _Attempts:
    """Attempts to go on, and the error that ends the stream.

    Args:
        reconnect: How.
        error: Why the connection is gone; None for silence.
        kept: What was sent.
        keeping: Held while `kept` is read or changed.
    """

    def __init__(
        self, reconnect: Reconnect, error: ConnectionClosed | None, kept: KeptMessages, keeping: threading.Lock
    ) -> None:
        received = None if error is None else error.rcvd
        if received is not None and received.code not in AGAIN:
            raise error or TimeoutError
        self._error, self._end_s = error, time.monotonic() + reconnect.for_s
        self._kept, self._keeping = kept, keeping
        self.pause_s = 0.0

    def beginning(self) -> StreamBeginning:
        """Choose where the next attempt begins; the stream ends where nothing is kept for it."""
        with self._keeping:
            if not self._kept.is_whole:
                raise self._error or TimeoutError
            return self._kept.beginning()

    @contextmanager
    def attempt(self, ticket: Ticket | None) -> Generator[None]:
        """Suppress the failure of an attempt, while there is time for another one; without a ticket that is refused."""
        try:
            yield
        except InvalidTicket as error:
            if ticket is None:
                raise
            with self._keeping:
                self._kept.refuse(ticket)
                is_whole = self._kept.is_whole
            if not is_whole:
                raise InvalidTicket(f"{error} That is not kept any more, see kept_bytes of Reconnect.") from None
        except InvalidResponse:
            raise
        except (ClientError, RequestError, ConnectionClosed, TimeoutError, OSError) as error:
            if isinstance(error, RequestError) and error.status not in AGAIN_STATUSES:
                raise
            if time.monotonic() + self.pause_s > self._end_s:
                raise self._error or error from None
            self.pause_s = min(LONGEST_PAUSE_S, 2 * self.pause_s or PAUSE_S)


def _check_same(before: dict[str, Any], ready: Message) -> None:
    """Refuse to go on where the server describes another stream.

    Raises:
        InvalidResponse: It does.
    """
    fields = orjson.loads(ready)
    other = [name for name in _SAME if fields.get(name) != before.get(name)]
    if other:
        raise InvalidResponse(
            f"The stream cannot go on: its {other[0]} was {before.get(other[0])!r}, and is {fields.get(other[0])!r} on "
            f"the server that answers now."
        )


def _closed() -> ConnectionClosed:
    return ConnectionClosedError(Close(CloseCode.NORMAL_CLOSURE, "The stream is closed."), None)


def _text_of(ticket: Ticket | None) -> str | None:
    return None if ticket is None else ticket.text


C = TypeVar("C", ClientConnection, AsyncConnection)


class _Lasting(Generic[C]):
    """The part that both connections share: what was sent, and since when nothing came.

    One thread may send while another one reads.

    Args:
        connection: The first connection, whose stream has begun.
        ready: What the server said of the stream.
        reconnect: How to go on.
    """

    def __init__(self, connection: C, ready: dict[str, Any], reconnect: Reconnect) -> None:
        self._connection, self._ready, self._reconnect = connection, ready, reconnect
        self._kept = KeptMessages(reconnect.kept_bytes, has_tickets=ready.get("tickets") is True)
        # Held while `kept` is read or changed and the connection is replaced, and never while anything is waited for.
        self._keeping = threading.Lock()
        self._since_s = time.monotonic()
        self._closed = False

    @property
    def sent(self) -> int:
        """Number of messages so far that have a number, also those that were not written yet."""
        with self._keeping:
            return self._kept.sent

    @property
    def _look_s(self) -> float:
        """Time after which a wait for a message is interrupted, to look for silence."""
        return self._reconnect.silent_s / LOOKS

    @property
    def _is_silent(self) -> bool:
        """True if an answer is due, and no message came for long."""
        with self._keeping:
            return self._kept.waiting and time.monotonic() - self._since_s >= self._reconnect.silent_s

    def _sending(self, message: Message) -> Message:
        """Keep a message that is sent now; return it with its number on this connection."""
        with self._keeping:
            if not self._kept.waiting:
                self._since_s = time.monotonic()
            return self._kept.add(message)

    def _received(self, connection: C, message: Message) -> Message | None:
        """Take a message that came now; None if it came before, or its connection was replaced meanwhile."""
        with self._keeping:
            if connection is not self._connection:
                return None
            self._since_s = time.monotonic()
            return self._kept.take(message)

    def _attempts(self, error: ConnectionClosed | None) -> _Attempts:
        return _Attempts(self._reconnect, error, self._kept, self._keeping)

    def _beginning(self, attempts: _Attempts) -> StreamBeginning:
        """Choose where the next attempt begins; a stream that was closed meanwhile does not go on."""
        if self._closed:
            raise _closed()
        return attempts.beginning()

    def _began(self, connection: C, beginning: StreamBeginning) -> None:
        """Go on with a connection on which the stream was begun again."""
        with self._keeping:
            if self._closed:
                raise _closed()
            self._kept.begin(beginning)
            self._connection, self._since_s = connection, time.monotonic()

    def _close(self) -> C:
        """Note that the stream is closed, so that no thread goes on with it; returns the connection to close."""
        with self._keeping:
            self._closed = True
            return self._connection


@final
class LastingConnection(_Lasting[ClientConnection]):
    """A `SyncWire` for one thread that sends and one that reads.

    Args:
        connection: See `_Lasting`, like the others.
        ready: What the server said of the stream.
        open: Opens another connection, and begins the stream on it with the text of a ticket, if there is one; returns
            what the server says of it.
        reconnect: How to go on.
    """

    def __init__(
        self,
        connection: ClientConnection,
        ready: dict[str, Any],
        open: Callable[[str | None], tuple[ClientConnection, Message]],
        reconnect: Reconnect,
    ) -> None:
        super().__init__(connection, ready, reconnect)
        self._open, self._lock = open, threading.Lock()

    def send(self, message: Message, /) -> None:
        """Send a message; on another connection, if this one is gone."""
        with self._lock:
            numbered = self._sending(message)
            try:
                self._connection.send(numbered)
            except ConnectionClosed as error:
                self._go_on(error)

    def recv(self, timeout: float | None = None, /) -> Message:
        """Wait for a message that did not come before."""
        end_s = None if timeout is None else time.monotonic() + timeout
        while True:
            connection, error = self._connection, None
            try:
                if (taken := self._received(connection, connection.recv(self._look_s))) is not None:
                    return taken
                continue
            except TimeoutError:
                if end_s is not None and time.monotonic() > end_s:
                    raise
                if not self._is_silent:
                    continue
            except ConnectionClosed as closed:
                error = closed
            # A thread that sends on it returns then.
            connection.close_socket()
            with self._lock:
                # Another thread may have been here before.
                if connection is self._connection:
                    self._go_on(error)

    def close(self) -> None:
        """Close it."""
        self._close().close()

    def _go_on(self, error: ConnectionClosed | None) -> None:
        attempts = self._attempts(error)
        while True:
            beginning = self._beginning(attempts)
            with attempts.attempt(beginning.ticket):
                connection, ready = self._open(_text_of(beginning.ticket))
                try:
                    _check_same(self._ready, ready)
                    for message in beginning.messages:
                        connection.send(message)
                    self._connection.close_socket()
                    self._began(connection, beginning)
                except BaseException:
                    connection.close_socket()
                    raise
                return
            time.sleep(attempts.pause_s)


@final
class AsyncLastingConnection(_Lasting[AsyncConnection]):
    """`LastingConnection` for asyncio."""

    def __init__(
        self,
        connection: AsyncConnection,
        ready: dict[str, Any],
        open: Callable[[str | None], Awaitable[tuple[AsyncConnection, Message]]],
        reconnect: Reconnect,
    ) -> None:
        super().__init__(connection, ready, reconnect)
        self._open, self._lock = open, asyncio.Lock()

    async def send(self, message: Message, /) -> None:
        """As `LastingConnection.send`."""
        async with self._lock:
            numbered = self._sending(message)
            try:
                await self._connection.send(numbered)
            except ConnectionClosed as error:
                await self._go_on(error)

    async def recv(self) -> Message:
        """As `LastingConnection.recv`."""
        while True:
            connection, error = self._connection, None
            try:
                async with asyncio.timeout(self._look_s):
                    message = await connection.recv()
                if (taken := self._received(connection, message)) is not None:
                    return taken
                continue
            except TimeoutError:
                if not self._is_silent:
                    continue
            except ConnectionClosed as closed:
                error = closed
            connection.transport.abort()
            async with self._lock:
                if connection is self._connection:
                    await self._go_on(error)

    async def close(self) -> None:
        """Close it."""
        await self._close().close()

    async def _go_on(self, error: ConnectionClosed | None) -> None:
        attempts = self._attempts(error)
        while True:
            beginning = self._beginning(attempts)
            with attempts.attempt(beginning.ticket):
                connection, ready = await self._open(_text_of(beginning.ticket))
                try:
                    _check_same(self._ready, ready)
                    for message in beginning.messages:
                        await connection.send(message)
                    self._connection.transport.abort()
                    self._began(connection, beginning)
                except BaseException:
                    connection.transport.abort()
                    raise
                return
            await asyncio.sleep(attempts.pause_s)
