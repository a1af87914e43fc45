"""One client's connection: requests in order, answers in order, and nothing kept for a client that is gone."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast, final

import orjson

from penstock.core.errors import Overloaded, RequestError, TooSlow, Unauthorized, WrongMethod, WrongVersion
from penstock.serve.heard import Heard
from penstock.serve.wire import Head, Request, RequestReader, Response, serialised, upgraded

# A client may send this many requests ahead of their answers; then its socket is not read until some are answered.
PIPELINED = 16
# Bytes of answers under TLS that a client has not read, past which its requests are not read either.
UNREAD_BYTES = 1 << 20
# How long a refused client may go on sending what nobody keeps, so that it reads the refusal.
LINGER_S = 2.0

Answer = Callable[[Response], None]
# Handles one request: answers at once or later, exactly once; gives what cancels it, if anything can.
Handler = Callable[[Request, Answer], Callable[[], None] | None]
# Gives the whole answer to a request with this head where it is certain to be refused now, whatever its body; told what
# says how long ago it came.
Shed = Callable[[Head, Heard | None], bytes | None]
# Makes the answer to a request that could not be read to its end, of which the head says what was understood.
Refuse = Callable[[RequestError, Head], Response]


@dataclass(slots=True, kw_only=True)
class Refusal(Response):
    """A response that says why a request got no result.

    Args:
        error: Why.
    """

    error: RequestError


class Peer(Protocol):
    """What a server knows of each of its clients' connections, whatever is spoken on it."""

    def sweep(self, now_s: float, idle_s: float, begun_s: float) -> None:
        """End the connection if its client fell silent, see `Settings`; called every second or so."""

    def allow(self, max_body_bytes: int) -> None:
        """Take bodies of another size from now on."""

    def close_after_next(self) -> None:
        """The server is going down: the next answer is this connection's last."""

    def close_when_idle(self) -> None:
        """Close now, or as soon as what was begun is answered."""

    def abort(self) -> None:
        """End the connection at once."""


# Takes a connection over, and what it brought after its last request; adds itself to the server's.
Take = Callable[[asyncio.Transport, bytes, set[Peer]], None]


@dataclass(slots=True, kw_only=True)
class Switched(Response):
    """The last response of a connection that goes on in another protocol.

    Its status is for logs and traces; 101 is what is sent.

    Args:
        take: Goes on with it.
        error: Where the other protocol is only there to say why a request got no result: why.
    """

    take: Take
    error: RequestError | None = None


@final
class Connection(asyncio.Protocol):
    """Speaks HTTP/1.1 with one client.

    Args:
        handle: What answers a request.
        open_connections: All of the server's; this one adds and removes itself.
        reader: Makes requests of what the client sends.
        clock_s: A monotonic clock in seconds.
        refuse: Makes the answer to a request that cannot be read to its end.
        draining: Whether the server is going down.
        heard: Says how long ago the client's last bytes came, at most, in nanoseconds.
        shed: What refuses requests at once, where that may pass by `handle`.
    """

    # Of thousands of connections, what is not touched need not come into the processor's caches.
    __slots__ = (
        "_cancel",
        "_clock_s",
        "_closing",
        "_continued",
        "_current",
        "_draining",
        "_ended",
        "_handle",
        "_heard",
        "_inside",
        "_open",
        "_paused",
        "_reader",
        "_refusal",
        "_refuse",
        "_shed",
        "_transport",
        "_unread",
        "_unread_bytes",
        "_unwanted",
        "_waiting",
        "heard_s",
        "lingering_since_s",
    )

    def __init__(
        self,
        handle: Handler,
        open_connections: set[Peer],
        reader: RequestReader,
        clock_s: Callable[[], float],
        refuse: Refuse,
        draining: Callable[[], bool],
        heard: Heard | None = None,
        shed: Shed | None = None,
    ) -> None:
        self._handle = handle
        self._refuse = refuse
        self._draining = draining
        self._heard = heard
        self._shed = shed
        self._open = open_connections
        self._reader = reader
        self._clock_s = clock_s
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[Request] = deque()
        self._current: Request | None = None
        self._cancel: Callable[[], None] | None = None
        self._refusal: RequestError | None = None
        self._paused = self._closing = False
        self._inside = False  # within `_handle`, which may answer at once
        self._ended = False  # the client sends no more
        self._unwanted = False  # nothing more is wanted from the client
        self._unread = False  # the client does not read its answers
        self._continued = False
        self._unread_bytes = 0
        self.heard_s = clock_s()
        self.lingering_since_s: float | None = None

    @property
    def idle(self) -> bool:
        """Whether no request of this client is begun, waiting or being answered."""
        return self._current is None and not self._waiting and not self._reader.begun and self._refusal is None

    @property
    def answering(self) -> bool:
        """Whether a whole request waits for its answer, so that silence is not the client's fault."""
        return self._current is not None or (bool(self._waiting) and not self._unread)

    @property
    def unread(self) -> bool:
        """Whether the client does not read its answers."""
        return self._unread

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's: the client is there."""
        # uvloop's transports have asyncio's methods without being of its class.
        self._transport = cast(asyncio.Transport, transport)
        # Written at once: uvloop would keep it until all sockets that are readable now have been read. Under TLS, which
        # gathers records, a limit of 0 would mean that a client never reads its answers.
        encrypted = transport.get_extra_info("sslcontext") is not None
        self._transport.set_write_buffer_limits(UNREAD_BYTES if encrypted else 0)
        self._open.add(self)
        # A drain that began after this was created could not yet tell it.
        self._closing = self._draining()

    def data_received(self, data: bytes) -> None:
        """asyncio's: the client sent something."""
        self.heard_s = self._clock_s()
        if self._refusal is not None:
            return  # what it still sends is read and dropped, so that it gets to read why
        free = self._current is None and not self._waiting and not self._unread
        if free and (head := self._reader.known(data)) is not None:
            # Nearly every request of a client that stays: whole, alone, and with a head that was seen before.
            if self._shed is not None and not self._closing and (refusal := self._shed(head, self._heard)) is not None:
                self._write(refusal)
                return
            self._start(Request(head, data[head.nbytes :], self._heard))
            if self._current is None:
                self._proceed()
            return
        requests, refusal = self._reader.feed(data)
        if requests:
            self._waiting.extend(requests)
        if refusal is not None:
            self._refusal = refusal
        elif len(self._waiting) > PIPELINED:
            self._pause()
        elif self._reader.expects_continue and not self._continued and self._current is None and not self._waiting:
            self._continued = True
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._proceed()

    def eof_received(self) -> bool:
        """asyncio's: the client sends no more, but may still read the answers to what it sent."""
        self._ended = True
        if self.lingering_since_s is not None and self._transport is not None:
            self._transport.close()
        self._proceed()
        # TLS has no half-closed connections.
        return self._transport is not None and self._transport.can_write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's: the client is gone; what it asked for need not run."""
        self._open.discard(self)
        self._transport = None
        self._waiting.clear()
        if self._cancel is not None:
            self._cancel()
            self._cancel = None

    def pause_writing(self) -> None:
        """asyncio's: the client does not read its answers."""
        self._unread = True
        self._pause()

    def resume_writing(self) -> None:
        """asyncio's: the client reads again."""
        self._unread = False
        self._proceed()

    def allow(self, max_body_bytes: int) -> None:
        """Take bodies of another size from now on."""
        self._reader.max_body_bytes = max_body_bytes

    def close_after_next(self) -> None:
        """The server is going down: the next answer is this connection's last."""
        self._closing = True

    def close_when_idle(self) -> None:
        """Close now, or as soon as what was begun is answered."""
        self._closing = self._unwanted = True
        self._proceed()

    def silent_s(self, now_s: float) -> float:
        """For how long the client has not been seen to send or to read; to be asked again and again."""
        unread = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if unread != self._unread_bytes:
            self._unread_bytes, self.heard_s = unread, now_s
        return now_s - self.heard_s

    def let_go(self) -> None:
        """The client has been silent for long: close, without waiting for it to read what it did not read so far."""
        if self._unread_bytes:
            self.abort()
        else:
            self.close_when_idle()

    def sweep(self, now_s: float, idle_s: float, begun_s: float) -> None:
        """`Peer`'s."""
        silent_s = self.silent_s(now_s)
        if self.lingering_since_s is not None:
            if now_s - self.lingering_since_s > LINGER_S:
                self.abort()
        elif self.idle or self._unread:
            if silent_s > idle_s:
                self.let_go()
        elif not self.answering and silent_s > begun_s:
            self.refuse(TooSlow(f"Nothing came for {silent_s:.0f} s of a request that had begun; send it in one go."))

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def refuse(self, error: RequestError) -> None:
        """End the connection with a refusal, unless an answer is under way."""
        if self._refusal is None and self._current is None:
            self._waiting.clear()
            self._refusal = error
            self._proceed()

    def _proceed(self) -> None:
        if self._waiting:
            # Answers that come at once make a loop here, not a recursion, however many requests were sent ahead. After
            # some of them it is the others' turn, and nothing is answered that nobody reads.
            for _ in range(PIPELINED):
                if self._current is not None or not self._waiting or self._transport is None or self._unread:
                    break
                self._start(self._waiting.popleft())
            else:
                asyncio.get_running_loop().call_soon(self._proceed)
                return
        if self._transport is None or self._current is not None or self._waiting:
            return
        if self._refusal is not None:
            self._linger(self._refusal)
        elif self._ended or (self._unwanted and not self._reader.begun):
            self._transport.close()
        elif self._paused and not self._unread:
            self._resume()

    def _start(self, request: Request) -> None:
        self._current = request
        self._continued = False
        self._inside = True
        cancel = self._handle(request, self._answer)
        self._inside = False
        self._keep(cancel)

    def _keep(self, cancel: Callable[[], None] | None) -> None:
        # What was answered at once has nothing to cancel.
        if self._current is not None:
            self._cancel = cancel

    def _answer(self, response: Response) -> None:
        request = self._current
        assert request is not None, response
        self._cancel = self._current = None
        transport = self._transport
        if transport is None:
            return
        close = not request.head.keep_alive or (self._closing and not self._waiting)
        if close and isinstance(response, Switched):
            self._switch(transport, response, request)
            return
        transport.write(serialised(response, request, close=close))
        if close:
            self._waiting.clear()
            transport.close()
        elif not self._inside:
            self._proceed()

    def _switch(self, transport: asyncio.Transport, response: Switched, request: Request) -> None:
        self._resume()
        self._transport = None
        self._open.discard(self)
        transport.write(upgraded(response))
        response.take(transport, self._reader.rest or b"", self._open)

    def _linger(self, refusal: RequestError) -> None:
        # To close with unread bytes would reset the connection, and the client would never read the refusal.
        if self.lingering_since_s is None and self._transport is not None:
            self.lingering_since_s = self._clock_s()
            self._write(serialised(self._refuse(refusal, self._reader.head), None, close=True))
            if self._ended:
                self._transport.close()
                return
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._resume()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()


def refused(error: RequestError) -> Refusal:
    """The response that says why a request got no result."""
    headers: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded):
        headers = (("Retry-After", str(max(1, round(error.retry_after_s)))),)
    elif isinstance(error, WrongMethod):
        headers = (("Allow", error.allowed),)
    elif isinstance(error, Unauthorized):
        headers = (("WWW-Authenticate", "Bearer"),)
    elif isinstance(error, WrongVersion):
        headers = (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Version", error.spoken))
    return Refusal(status=error.status, body=orjson.dumps({"error": str(error)}), headers=headers, error=error)
