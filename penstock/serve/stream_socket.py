"""One client's live stream on its socket: the connection after it was upgraded from HTTP to WebSocket."""

import asyncio
import logging
from collections.abc import Callable
from typing import final

from penstock.core.errors import InvalidInput, RequestError, TooLarge
from penstock.serve.closing import LINGER_S, code_of, reason_of
from penstock.serve.connection import PIPELINED, UNREAD_BYTES, Peer
from penstock.serve.frames import (
    BINARY,
    BROKEN,
    CLOSE,
    DONE,
    GOING_AWAY,
    IDLE,
    PING,
    POLICY,
    PONG,
    TEXT,
    TOO_BIG,
    FrameReader,
    close_code,
    close_frame,
    frame,
)
from penstock.serve.protocols.live import State
from penstock.serve.streams import Stream

log = logging.getLogger(__name__)

GOING_DOWN = "The server is going down; open another stream."


@final
class StreamSocket(asyncio.Protocol):
    """Speaks WebSocket with one client.

    Args:
        stream: What its messages are for.
        transport: The client's, taken over.
        peers: All of the server's; this one adds and removes itself.
        clock_s: A monotonic clock in seconds.
    """

    def __init__(
        self, stream: Stream, transport: asyncio.Transport, peers: set[Peer], clock_s: Callable[[], float]
    ) -> None:
        self._stream = stream
        self._received = stream.received
        self._backlog = stream.backlog
        self._reader = FrameReader(stream.most_bytes)
        self._transport: asyncio.Transport | None = transport
        self._peers = peers
        self._clock_s = clock_s
        self._paused = self._pulling = self._unread = False
        self._resting = False  # messages wait for the other clients' turn
        self._deaf = False  # what comes are no frames any more
        self._heard = 0  # messages that said something, at the last sweep
        self._heard_s = self._moved_s = clock_s()
        self._unread_bytes = 0
        self._closing = False
        stream.attach(self)
        peers.add(self)

    def data_received(self, data: bytes) -> None:
        """asyncio's: the client sent something."""
        if self._deaf:
            return
        free = not (self._backlog or self._pulling or self._resting or self._closing)
        if free and (payload := self._reader.alone(data)) is not None:
            # Nearly every message of a stream that keeps time.
            try:
                self._received(BINARY, payload)
            except RequestError as error:
                self.fail(error)
            if self._backlog:
                self._pause()
            return
        self._reader.feed(data)
        self._pull()

    def eof_received(self) -> bool:
        """asyncio's: the client sends no more, and a WebSocket has no half-closed connections."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's: the client is gone; what waits need not run."""
        self._peers.discard(self)
        self._transport = None
        self._stream.leave(broken=not self._closing)

    def pause_writing(self) -> None:
        """asyncio's: the client does not read what it is sent."""
        self._unread = True

    def resume_writing(self) -> None:
        """asyncio's: the client reads again."""
        self._unread = False

    def say(self, opcode: int, payload: bytes) -> None:
        """`Port`'s."""
        if self._closing or self._transport is None:
            return
        self._transport.write(frame(opcode, payload))
        if self._unread and self._transport.get_write_buffer_size() > UNREAD_BYTES:
            log.info("stream %s: its client reads no results; it is ended", self._stream.name)
            self._end(POLICY, "Results wait unread; read them as they come.", broken=True)
            self.abort()

    def close(self, code: int, reason: str) -> None:
        """`Port`'s."""
        self._end(code, reason, broken=code != DONE)

    def fail(self, error: RequestError) -> None:
        """`Port`'s."""
        self._end(code_of(error), reason_of(error), broken=True)

    def resume(self) -> None:
        """`Port`'s."""
        self._pull()

    def sweep(self, now_s: float, idle_s: float, begun_s: float) -> None:
        """`Peer`'s."""
        if self._transport is None:
            return
        unread = self._transport.get_write_buffer_size()
        if unread != self._unread_bytes:
            self._unread_bytes, self._moved_s = unread, now_s
        if self._stream.heard != self._heard:
            self._heard, self._heard_s = self._stream.heard, now_s
        state, silent_s = self._stream.state, now_s - self._heard_s
        if self._closing:
            if now_s - self._moved_s > LINGER_S:
                self.abort()
        elif state is State.STARTING:
            if silent_s > begun_s:
                self._end(IDLE, f"No start came for {silent_s:.0f} s.", broken=True)
        elif unread and now_s - self._moved_s > idle_s:
            self.abort()
        elif state is State.FLOWING and not self._backlog and silent_s > idle_s:
            self._end(IDLE, f"No samples came for {silent_s:.0f} s; open another stream.", broken=True)

    def allow(self, max_body_bytes: int) -> None:
        """`Peer`'s: nothing here is as long as a body."""

    def close_after_next(self) -> None:
        """`Peer`'s: a stream goes on until `close_when_idle`."""

    def close_when_idle(self) -> None:
        """`Peer`'s: answer what came, release what the network holds back, and end."""
        self._stream.finish(GOING_AWAY, GOING_DOWN)

    def abort(self) -> None:
        """`Peer`'s: end at once."""
        if self._transport is not None:
            self._end(GOING_AWAY, GOING_DOWN, broken=True)
            self._transport.abort()

    def _pull(self) -> None:
        # A result that comes while a message is taken must not have the next one taken before it.
        if self._pulling or self._resting or self._transport is None:
            return
        self._pulling = True
        backlog = self._backlog
        try:
            # After some messages it is the others' turn.
            for _ in range(PIPELINED):
                if backlog or self._deaf or not self._take():
                    break
            else:
                self._resting = True
                asyncio.get_running_loop().call_soon(self._go_on)
        finally:
            self._pulling = False
        if self._deaf or not (backlog or self._resting):
            self._resume()
        else:
            self._pause()

    def _go_on(self) -> None:
        self._resting = False
        self._pull()

    def _take(self) -> bool:
        """Take the next message, or drop it where the stream is over; False where there is none."""
        reader = self._reader
        try:
            message = reader.next()
        except RequestError as error:
            self._deaf = True
            self._end(TOO_BIG if isinstance(error, TooLarge) else BROKEN, str(error), broken=True)
            return False
        if message is None:
            return False
        opcode, payload = message
        if opcode >= CLOSE:
            self._control(opcode, payload)
        elif not self._closing:
            try:
                self._received(opcode, payload)
            except RequestError as error:
                self.fail(error)
                return True
            if opcode == TEXT:
                reader.most_bytes = self._stream.most_bytes
        return True

    def _control(self, opcode: int, payload: bytes) -> None:
        if opcode == PING:
            self.say(PONG, payload)
        elif opcode == CLOSE:
            try:
                code = close_code(payload)
            except InvalidInput as error:
                self._end(BROKEN, str(error), broken=True)
            else:
                self._end(code, "", broken=True)
            self._deaf = True
            if self._transport is not None:
                self._transport.close()

    def _end(self, code: int, reason: str, *, broken: bool) -> None:
        if self._closing or self._transport is None:
            return
        self._closing = True
        log.info("stream %s of %s ends with %d %s", self._stream.name, self._stream.application, code, reason)
        self._transport.write(close_frame(code, reason))
        self._moved_s = self._clock_s()
        self._stream.leave(broken=broken)
        # What came and what still comes is dropped until the client closes too.
        self._pull()

    def _pause(self) -> None:
        if not self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()
