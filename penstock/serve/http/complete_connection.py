"""The complete way of a client's connection: any bytes, requests in order, answers in order, and the timeouts.

Nothing is kept for a client that is gone. The short way of common requests is in `penstock.serve.http.connection`.
"""

import asyncio
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast, final

from penstock.core.errors import RequestError, TooSlow
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.exchange.peer import PIPELINED, UNREAD_BYTES, Peer
from penstock.serve.exchange.request import Request
from penstock.serve.exchange.request_bounds import CONNECTION_BYTES, RequestBounds
from penstock.serve.exchange.response import Handlers, Response, ShortAnswer, Streamed, Switched
from penstock.serve.fair_turns import MAX_NS, FairTurns, Usage
from penstock.serve.frontend.table_writer import SlotHandle
from penstock.serve.http.encoding import serialize, serialize_head, serialize_upgrade
from penstock.serve.http.parser import RequestParser
from penstock.serve.http.refusals import Refusals
from penstock.serve.http.request_age import RequestAge
from penstock.serve.http.response_date import ResponseDate

# How long a rejected client may go on sending, unread, before the connection closes: it must read the rejection first.
LINGER_S = 2.0
# Uncertainty of an arrival time above which the request age is read from TCP_INFO.
VAGUE_NS = 5_000_000
# Bytes of a response in parts that a client may leave unread.
MAX_UNREAD_BYTES = 1 << 20


# Slots: fewer cache lines per connection matter with thousands of them.
@dataclass(slots=True, eq=False)
class CompleteConnection:
    """HTTP/1.1 with one client, for any request.

    It has the methods of `asyncio.Protocol`, and not its class: a compiled class has no base class of Python.

    Args:
        handlers: Answer requests.
        open_connections: The connections of the server; this one adds and removes itself.
        parser: Makes requests from the client's bytes.
        batch_loop: Runs batches; has the earliest arrival time of the bytes read now.
        clock_ns: A monotonic clock.
        draining: Whether the server is going down.
        age: Age of the newest bytes in the socket.
        bounds: Bounds of requests that have not come whole.
        refusals: Bounds the refusals of the server's connections; None if they are answered at once.
        date: The date of responses.
    """

    handlers: Handlers
    open_connections: set[Peer]
    parser: RequestParser
    batch_loop: BatchLoop
    clock_ns: Callable[[], int]
    draining: Callable[[], bool]
    age: RequestAge | None = None
    bounds: RequestBounds = field(default_factory=RequestBounds)
    refusals: Refusals | None = None
    date: ResponseDate = field(default_factory=ResponseDate)
    usage: Usage = field(init=False)
    last_active_ns: int = field(default=0, init=False)
    lingering_since_ns: int | None = field(default=None, init=False)
    _transport: asyncio.Transport | None = field(default=None, init=False)
    _waiting: deque[Request] = field(default_factory=deque[Request], init=False)
    _current: Request | None = field(default=None, init=False)
    _cancel: Callable[[], None] | None = field(default=None, init=False)
    _rejection: RequestError | None = field(default=None, init=False)
    _paused: bool = field(default=False, init=False)
    _closing: bool = field(default=False, init=False)
    _inside: bool = field(default=False, init=False)  # within `handle`, which may answer at once
    _ended: bool = field(default=False, init=False)  # the client sent EOF
    _unwanted: bool = field(default=False, init=False)  # no further request is accepted
    _unread: bool = field(default=False, init=False)  # the client does not read its answers
    _continued: bool = field(default=False, init=False)
    _unread_bytes: int = field(default=0, init=False)
    _scheduled: bool = field(default=False, init=False)  # `_go_on` is called in a later loop iteration
    _turns: FairTurns = field(init=False)
    _held_bytes: int = field(default=0, init=False)  # counted in `bounds`
    _in_body: bool = field(default=False, init=False)
    # When the head or the body began that is being read now.
    _part_ns: int = field(default=0, init=False)
    # What answers the current request and its slot, if it went the short way.
    _short: ShortAnswer | None = field(default=None, init=False)
    _handle: SlotHandle | None = field(default=None, init=False)
    _refused_ns: int = field(default=0, init=False)  # when a request was refused last, the short way
    # When it may be handed over at the earliest; the listener keeps it.
    stays_ns: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._turns = self.batch_loop.turns
        self.usage = Usage(self._turns)
        self.last_active_ns = self.clock_ns()

    @property
    def idle(self) -> bool:
        """True if no request is partly read, waiting or being answered."""
        return self._current is None and not self._waiting and not self.parser.in_message and self._rejection is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Join the open connections."""
        # uvloop's transports have asyncio's methods without being of its class.
        self._transport = cast(asyncio.Transport, transport)
        # With a limit of 0 uvloop writes at once, not after all readable sockets have been read. TLS gathers records,
        # so there a limit of 0 would mark every client as one that does not read.
        encrypted = transport.get_extra_info("sslcontext") is not None
        self._transport.set_write_buffer_limits(UNREAD_BYTES if encrypted else 0)
        self.open_connections.add(self)
        self._hold(CONNECTION_BYTES)
        # A drain may have begun between accept and here.
        self._closing = self.draining()

    @abstractmethod
    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""

    def _parse(self, data: bytes, began_ns: int = 0) -> None:
        parser = self.parser
        requests, rejection = parser.feed(data, 1) if self.usage.waits else parser.feed(data)
        if requests:
            self._waiting.extend(requests)
        if rejection is None and parser.in_message:
            counted = max(0, self._held_bytes - CONNECTION_BYTES)
            more = parser.held_bytes + parser.body_left - counted
            self.bounds.begin(self, self.last_active_ns)
            rejection = self.bounds.make_room(more, self, self.last_active_ns)
            if requests or self._in_body != parser.head_is_whole or not self._part_ns:
                self._in_body, self._part_ns = parser.head_is_whole, self.last_active_ns
        elif rejection is None or requests:
            self._part_ns = 0
        if rejection is not None:
            self._rejection = rejection
        elif parser.unparsed or len(self._waiting) > PIPELINED:
            self._pause()
            if len(self._waiting) <= PIPELINED:
                self._schedule()
        elif parser.expects_continue and not self._continued and self._current is None and not self._waiting:
            self._continued = True
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif self._paused and not self._unread:
            self._resume()
        self._proceed(began_ns)
        self._hold_unfinished()

    def _schedule(self) -> None:
        """Go on in a later loop iteration: what one connection sends must not hold up the others."""
        if not self._scheduled:
            self._scheduled = True
            self._turns.add(self._go_on, self.usage)

    def _go_on(self) -> None:
        self._scheduled = False
        if self._transport is None:
            return
        begin_ns, begin_cpu_ns = self.clock_ns(), self._turns.cpu_ns()
        # Otherwise `_proceed` schedules it again.
        if self.parser.unparsed and len(self._waiting) <= PIPELINED and self._rejection is None and not self._unread:
            self._parse(b"", began_ns=begin_ns)
        else:
            self._proceed(begin_ns)
        self._turns.charge_turn(self.usage, begin_cpu_ns)

    def eof_received(self) -> bool:
        """Close once all is answered; until then the client can read."""
        self._ended = True
        if self.lingering_since_ns is not None and self._transport is not None:
            self._transport.close()
        self._proceed()
        # TLS has no half-closed connections.
        return self._transport is not None and self._transport.can_write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the current request."""
        self.open_connections.discard(self)
        self._transport = None
        self._waiting.clear()
        self._hold(0)
        if self._cancel is not None:
            self._cancel()
            self._cancel = None
        if self._handle is not None:
            self._handle.cancel()
            self._short = self._handle = None

    def pause_writing(self) -> None:
        """Stop reading from a client that does not read its answers."""
        self._unread = True
        self._pause()

    def resume_writing(self) -> None:
        """Read from the client again."""
        self._unread = False
        self._proceed()

    def close_after_next(self) -> None:
        """Close after the next answer, see `Peer`."""
        self._closing = True

    def close_when_idle(self) -> None:
        """Close once all is answered, see `Peer`."""
        self._closing = self._unwanted = True
        self._proceed()

    def silent_s(self, now_s: float) -> float:
        """Time since the client last sent bytes or read an answer, in seconds; accurate when called regularly."""
        unread = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if unread != self._unread_bytes:
            self._unread_bytes, self.last_active_ns = unread, int(now_s * 1e9)
        return now_s - self.last_active_ns / 1e9

    def unused(self) -> tuple[int, bool] | None:
        """Tell since when there is no whole request, see `Evictable`."""
        transport = self._transport
        if transport is None:
            return self.last_active_ns, True  # TLS is not negotiated yet
        if self.lingering_since_ns is not None:
            return self.lingering_since_ns, False
        if self._current is not None or self._waiting or self._rejection is not None or self._scheduled:
            return None
        if self._paused or transport.get_write_buffer_size():
            return None
        return (self._part_ns or self.last_active_ns, True) if self.parser.in_message else (self.last_active_ns, False)

    @property
    def may_move(self) -> bool:
        """True if another process could go on with it after the present request: nothing else of it is kept here."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._closing or self._ended or self._rejection is not None:
            return False
        if self.usage.unusual or self.usage.stays or self.lingering_since_ns is not None:
            return False
        return transport.get_extra_info("sslcontext") is None

    @property
    def can_move(self) -> bool:
        """True if another process could go on with it now, because it is between two requests."""
        if not self.may_move or self._unread or self.parser.unparsed:
            return False
        unused = self.unused()
        return unused is not None and not unused[1]

    def hand_over(self) -> int | None:
        """Give up the connection, for another process to go on with it.

        Returns:
            A descriptor of its socket, which the caller closes; None if it cannot be moved now.
        """
        if not self.can_move or self._transport is None:
            return None
        try:
            descriptor = os.dup(self._transport.get_extra_info("socket").fileno())
        except OSError:
            return None
        # What comes from now on stays in the socket. Closing one of two descriptors says nothing to the client.
        self._transport.pause_reading()
        self._transport.abort()
        self.open_connections.discard(self)
        return descriptor

    def make_room(self, error: RequestError, others: set[Peer]) -> None:
        """End the connection, which was removed from those that count and is among others until it is closed."""
        self.open_connections = others
        if self._transport is None:
            return
        others.add(self)
        if self.parser.in_message:
            self.reject(error)
        else:
            self._closing = self._unwanted = True
            self._transport.close()

    def close_idle(self) -> None:
        """Close an inactive connection, without waiting for the client to read its answers."""
        if self._unread_bytes:
            self.abort()
        else:
            self.close_when_idle()

    def sweep(self, now_s: float, idle_timeout_s: float, request_timeout_s: float) -> None:
        """Enforce the timeouts, see `Peer`."""
        silent_s = self.silent_s(now_s)
        if self.lingering_since_ns is not None:
            if now_s - self.lingering_since_ns / 1e9 > LINGER_S:
                self.abort()
        elif self.idle or self._unread:
            if silent_s > idle_timeout_s:
                self.close_idle()
        elif self._current is None and not self._waiting:
            if silent_s > request_timeout_s:
                self.reject(TooSlow(f"No bytes of the request came for {silent_s:.0f} s; send it without pauses."))
            elif self._part_ns and (
                slow := self.bounds.reject_slow(now_s - self._part_ns / 1e9, in_body=self._in_body)
            ):
                self.reject(slow)
        else:
            # It is idle from the answer on.
            self.last_active_ns = int(now_s * 1e9)

    def abort(self) -> None:
        """Close at once, see `Peer`."""
        if self._transport is not None:
            self._transport.abort()

    def reject(self, error: RequestError) -> None:
        """End the connection with a rejection, unless a request is being answered."""
        if self._rejection is None and self._current is None:
            self._waiting.clear()
            self._rejection = error
            self._proceed()

    def _proceed(self, began_ns: int = 0) -> None:
        """Answer what waits.

        Args:
            began_ns: When this connection's turn began; 0 where the turn is another's.
        """
        if self._waiting:
            if self.usage.waits and not began_ns:
                self._schedule()
                return
            if not self._answer_waiting(began_ns or self.clock_ns()):
                self._schedule()
                return
            self._hold_unfinished()
        if self._transport is None or self._current is not None or self._waiting:
            return
        if self._rejection is not None:
            self._linger(self._rejection)
        elif self._ended or (self._unwanted and not self.parser.in_message):
            if self.parser.unparsed:
                self._schedule()
            else:
                self._transport.close()
        elif self._paused and not self._unread:
            if self.parser.unparsed:
                self._schedule()
            else:
                self._resume()

    def _answer_waiting(self, began_ns: int) -> bool:
        """Start the requests that wait; False if others must come first."""
        # Immediate answers to pipelined requests loop here instead of recursing. The loop is bounded, for fairness to
        # other connections, and stops when the client does not read.
        for _ in range(PIPELINED):
            if self._current is not None or not self._waiting or self._transport is None or self._unread:
                return True
            now_ns = self.clock_ns()
            if now_ns - began_ns > MAX_NS // 2:
                break
            request = self._waiting.popleft()
            # A pipelined request arrives, for its deadline, when the one before it is answered.
            request.arrival_ns = self._arrival_ns(now_ns)
            self._start(request)
            if self.usage.waits:
                break
        return self._current is not None or not self._waiting

    def _start(self, request: Request) -> None:
        self._current = request
        request.transport, request.usage = self._transport, self.usage
        self._continued = False
        self._inside = True
        cancel = self.handlers.handle(request, self._answer)
        self._inside = False
        if cancel is not None and self._is_answering():
            self._cancel = cancel

    def _is_answering(self) -> bool:
        return self._current is not None

    def _arrival_ns(self, now_ns: int) -> int:
        arrival_ns = self.batch_loop.arrival_ns(now_ns)
        if now_ns - arrival_ns > VAGUE_NS and self.age is not None:
            return max(arrival_ns, self.clock_ns() - self.age())
        return arrival_ns

    def _answer(self, response: Response) -> None:
        request = self._current
        assert request is not None, response
        if isinstance(response, Streamed):
            if self._transport is not None:
                self._transport.write(serialize_head(response, self.date.line, chunked=request.head.version != "1.0"))
                response.opened(ChunkedBody(self))
            return
        self._cancel = self._current = None
        transport = self._transport
        if transport is None:
            return
        close = not request.head.keep_alive or (self._closing and not self._waiting)
        if close and isinstance(response, Switched):
            self._switch(transport, response, request)
            return
        transport.write(serialize(response, request, self.date.line, close=close))
        self._finish(transport, close)

    def write_part(self, data: bytes) -> None:
        """Send a part of a response's body; a client that leaves too much unread is cut off."""
        if self._transport is None or self._current is None:
            return
        # HTTP/1.0 has no chunks: there the body ends with the connection.
        chunked = self._current.head.version != "1.0"
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self._transport.abort()

    def end_parts(self) -> None:
        """End the body of a response that was sent in parts."""
        request, transport = self._current, self._transport
        self._cancel = self._current = None
        if transport is None or request is None:
            return
        chunked = request.head.version != "1.0"
        if chunked:
            transport.write(b"0\r\n\r\n")
        self._finish(transport, not (chunked and request.head.keep_alive) or (self._closing and not self._waiting))

    def _finish(self, transport: asyncio.Transport, close: bool) -> None:
        if close:
            self._waiting.clear()
            transport.close()
        elif not self._inside:
            self._proceed()

    def _switch(self, transport: asyncio.Transport, response: Switched, request: Request) -> None:
        self._resume()
        self._transport = None
        self._hold(0)
        self.open_connections.discard(self)
        transport.write(serialize_upgrade(response, self.date.line))
        response.take(transport, self.parser.rest or b"", self.open_connections)

    def _linger(self, rejection: RequestError) -> None:
        # Closing with unread bytes would reset the connection, and the client would never read the rejection.
        if self.lingering_since_ns is None and self._transport is not None:
            self.lingering_since_ns = self.clock_ns()
            head = self.parser.head
            head.began_ns = self._part_ns
            self._write(serialize(self.handlers.reject(rejection, head), None, self.date.line, close=True))
            self.parser.forget()
            self._hold(CONNECTION_BYTES)
            if self._ended:
                self._transport.close()
                return
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._resume()

    def _hold_unfinished(self) -> None:
        if self._transport is not None:
            self._hold(CONNECTION_BYTES + self.parser.held_bytes + sum(len(request.body) for request in self._waiting))

    def _hold(self, count: int) -> None:
        if count <= CONNECTION_BYTES:
            self.bounds.end(self)
        self.bounds.held_bytes += count - self._held_bytes
        self._held_bytes = count

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
            if self._part_ns:
                # The client could not send on meanwhile.
                self._part_ns = self.last_active_ns = self.clock_ns()
            self._transport.resume_reading()


@final
@dataclass(frozen=True, slots=True)
class ChunkedBody:
    """The body of a response that is sent in parts, each a chunk of HTTP's chunked coding.

    Args:
        connection: The connection of its client.
    """

    connection: CompleteConnection

    def write(self, data: bytes) -> None:
        """Send a part, see `Body`."""
        self.connection.write_part(data)

    def end(self) -> None:
        """End the response, see `Body`."""
        self.connection.end_parts()
