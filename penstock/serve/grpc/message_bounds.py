"""Bounds of gRPC messages that have not come whole: time, and how many may come at once.

The library tells neither how long a message is nor how much of it has come. While a call reads, it holds up to the
largest message; before that, at most the first window of its stream.
"""

import asyncio
from collections.abc import Callable
from typing import Any, final

from grpc import aio

from penstock.core.errors import InvalidInput, Overloaded, RequestError, TooSlow
from penstock.serve.grpc.compression import Unfolding
from penstock.serve.settings import LimitSettings

Context = aio.ServicerContext[Any, Any]

# A message that has not come whole after this time makes room for a newer one, as a request over HTTP does.
OLD_S = 1.0
# Calls of one connection, and messages that may come at once at least, however large one may be.
CALLS_EACH, MIN_READING = 1024, 16
SWEEP_S = 0.5
# What a stream may send before its call reads.
FIRST_WINDOW = 1 << 16
# Calls that the library keeps until the server takes them. It refuses some of those that come beyond, and all beyond
# twice as many.
MAX_PENDING = 1000


def channel_options(limits: LimitSettings, message_bytes: int) -> tuple[tuple[str, int], ...]:
    """Options of a gRPC server within the limits of HTTP.

    Args:
        limits: Limits and timeouts.
        message_bytes: Largest message.
    """
    pending = min(MAX_PENDING, max(1, _max_waiting(limits) // 2))
    return (
        ("grpc.max_receive_message_length", message_bytes),
        # It would unfold a message before it compares the size, see `Unfolding`.
        ("grpc.per_message_decompression", 0),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", CALLS_EACH),
        ("grpc.max_connection_idle_ms", int(limits.idle_timeout_s * 1e3)),
        # The first frames.
        ("grpc.server_handshake_timeout_ms", int(min(limits.request_timeout_s, limits.head_timeout_s) * 1e3)),
        # A stream may send this much before its call reads.
        ("grpc.http2.lookahead_bytes", FIRST_WINDOW),
        # Otherwise the window grows with what a client sends, up to megabytes for each call.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.server.max_pending_requests", pending),
        ("grpc.server.max_pending_requests_hard_limit", 2 * pending),
    )


def _max_waiting(limits: LimitSettings) -> int:
    """Calls that may wait with their first window: in the server, and likewise in the library."""
    return (limits.max_unfinished_mib << 20) // FIRST_WINDOW // 2


@final
class MessageBounds:
    """Bounds of the messages of one server, in one event loop.

    Args:
        limits: Limits and timeouts.
        message_bytes: Largest message.

    Attributes:
        unfolding: Unfolds compressed messages.
    """

    def __init__(self, limits: LimitSettings, message_bytes: int) -> None:
        self.unfolding = Unfolding(message_bytes)
        max_bytes = limits.max_unfinished_mib << 20
        self._body_timeout_s = limits.body_timeout_s
        self._max_reading = max(MIN_READING, max_bytes // message_bytes)
        self._max_waiting = _max_waiting(limits)
        # When the message of each call began to be read, the oldest first.
        self._reading: dict[asyncio.Task[Any], float] = {}
        # Why calls were cancelled here.
        self._rejected: dict[asyncio.Task[Any], RequestError] = {}
        # Calls that wait for their turn to read, by connection, the newest last; the connection whose turn is next is
        # the first.
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._count = 0
        # How many have their turn and do not read yet.
        self._admitted = 0
        self._sweeping = False

    async def read(self, context: Context) -> bytes:
        """Read the one message of a call, and unfold it.

        Raises:
            TooSlow: It was not whole in time.
            Overloaded: Too many messages have not come whole.
            InvalidInput: None came, or a damaged one.
            TooLarge: It unfolds to more than the largest.
        """
        loop, call = asyncio.get_running_loop(), asyncio.current_task()
        assert call is not None
        if len(self._reading) + self._admitted >= self._max_reading:
            await self._wait_for_turn(loop, context.peer())
        # One timer for all: one for each call would cost several percent of a call.
        if not self._sweeping:
            self._sweeping = True
            loop.call_later(SWEEP_S, self._sweep, loop)
        self._reading[call] = loop.time()
        try:
            message = await context.read()
            if isinstance(message, bytes):
                return await self.unfolding.unfolded(message)
        except asyncio.CancelledError:
            rejection = self._rejected.pop(call, None)
            if rejection is None:
                raise
            call.uncancel()
            raise rejection from None
        finally:
            self._reading.pop(call, None)
            if self._waiting:
                self._admit()
        raise InvalidInput("The call has no message; send one.")

    async def _wait_for_turn(self, loop: asyncio.AbstractEventLoop, peer: str) -> None:
        if self._count >= self._max_waiting:
            self._make_room(peer)
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(peer, []).append(turn)
        self._count += 1
        try:
            async with asyncio.timeout(self._body_timeout_s):
                await turn
        except TimeoutError:
            raise self._full() from None
        finally:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._admitted -= 1
            elif turn in (turns := self._waiting.get(peer, [])):
                turns.remove(turn)
                self._count -= 1
                if not turns:
                    del self._waiting[peer]

    def _make_room(self, peer: str) -> None:
        """Reject the oldest call of the connection with the most, or the new one if that is its own."""
        most = max(self._waiting, key=lambda each: len(self._waiting[each]))
        if len(self._waiting[most]) <= len(self._waiting.get(peer, ())) + 1:
            raise self._full()
        turn = self._waiting[most].pop(0)
        self._count -= 1
        if not turn.done():
            turn.set_exception(self._full())

    def _admit(self) -> None:
        # One connection after the other, and its newest first: a well-behaved client is not behind all that others keep
        # waiting.
        while self._waiting and len(self._reading) + self._admitted < self._max_reading:
            peer, turns = next(iter(self._waiting.items()))
            del self._waiting[peer]
            turn = turns.pop()
            self._count -= 1
            if turns:
                self._waiting[peer] = turns
            if not turn.done():
                turn.set_result(None)
                self._admitted += 1

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        limit_s, now_s = self._body_timeout_s, loop.time()
        needed = self._count
        for count, (call, begun_s) in enumerate(list(self._reading.items())):
            if now_s - begun_s > limit_s:
                self._reject(call, TooSlow(f"The message was not whole after {limit_s:g} s; send it sooner."))
            elif count < needed and now_s - begun_s > OLD_S:
                self._reject(call, self._full())
            else:
                break
        self._admit()
        self._sweeping = bool(self._reading or self._waiting)
        if self._sweeping:
            loop.call_later(SWEEP_S, self._sweep, loop)

    def _reject(self, call: "asyncio.Task[Any]", error: RequestError) -> None:
        del self._reading[call]
        if call.cancel():
            self._rejected[call] = error

    def _full(self) -> RequestError:
        return Overloaded(f"{self._max_reading:,} messages have not come whole, as many as may; come back later.")


@final
class StreamPatience:
    """Ends a stream on which nothing has moved for too long: no whole message, and no answer that its client reads.

    Args:
        limits: Limits and timeouts.
        end: Called once with the reason.
    """

    def __init__(self, limits: LimitSettings, end: Callable[[RequestError], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._end = end
        self._began = False
        self._moved_s = self._loop.time()
        self._unanswered = 0
        self._writing = 0
        self._timer = self._loop.call_later(limits.body_timeout_s, self._look)

    def message_came(self) -> None:
        """Note a whole message."""
        self._began = True
        self._unanswered += 1
        self._moved_s = self._loop.time()

    def write_begins(self) -> None:
        """Note that a response is being written; the client may not read it."""
        self._writing += 1
        self._moved_s = self._loop.time()

    def write_ended(self) -> None:
        """Note that it is written."""
        self._writing -= 1
        self._moved_s = self._loop.time()

    def answered(self) -> None:
        """Note that a message has all of its responses."""
        self._unanswered -= 1

    def close(self) -> None:
        """Forget the stream."""
        self._timer.cancel()

    def _look(self) -> None:
        limit_s = self._limits.idle_timeout_s if self._began else self._limits.body_timeout_s
        still_s = self._loop.time() - self._moved_s
        if still_s < limit_s or (self._unanswered and not self._writing):
            self._timer = self._loop.call_later(max(0.5, limit_s - still_s), self._look)
        elif self._unanswered:
            self._end(TooSlow(f"No response was read for {limit_s:.0f} s; read them, or open fewer requests."))
        else:
            self._end(TooSlow(f"No whole message came for {limit_s:.0f} s; open a stream when you send."))
