"""WebSocket connection of one generated answer: a request in, a message for each step out."""

import asyncio
from collections.abc import Callable
from typing import final

from websockets.frames import CloseCode

from penstock.core.errors import InvalidInput, RequestError
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.exchange.peer import PIPELINED, UNREAD_BYTES, Peer
from penstock.serve.exchange.request_bounds import CONNECTION_BYTES, HeldBytes, RequestBounds
from penstock.serve.registry.served_chain import Served, ServedChain
from penstock.serve.websocket import frames
from penstock.serve.websocket.closing import IDLE, LINGER_S, code_of, reason_of
from penstock.serve.websocket.frames import BINARY, TEXT, frame
from penstock.serve.websocket.step_answers import ChainAnswer, ChunkOf, ModelAnswer, StepAnswer


@final
class GenerateConnection(asyncio.Protocol):
    """One request of a client and the steps of its answer, from the upgrade on.

    Args:
        served: The model, or a chain whose last part generates.
        chunk_of: Makes a chunk of the request's message.
        batch_loop: Knows when what is read now can have arrived.
        clock_s: A monotonic clock in seconds.
        bounds: Bounds of requests that have not come whole.
    """

    def __init__(
        self,
        served: Served,
        chunk_of: ChunkOf,
        batch_loop: BatchLoop,
        clock_s: Callable[[], float],
        bounds: RequestBounds,
    ) -> None:
        self._served, self._chunk_of, self._batch_loop = served, chunk_of, batch_loop
        self._clock_s, self._active_s = clock_s, clock_s()
        self._bounds, self._held, self._begun_s = bounds, HeldBytes(bounds), self._active_s
        self._reader = frames.FrameReader(served.application.max_body_bytes)
        self._transport: asyncio.Transport | None = None
        self._peers: set[Peer] = set()
        self._cancel: Callable[[], None] | None = None
        self._answer: StepAnswer
        if isinstance(served, ServedChain):
            self._answer = ChainAnswer(served, self)
        else:
            self._answer = ModelAnswer(served, self)
        self._closing = False
        self._yielded = False  # frames wait until other connections were served

    def take_over(self, transport: asyncio.Transport, rest: bytes, peers: set[Peer]) -> None:
        """Go on with a connection that was upgraded from HTTP, see `StreamConnection.take_over`."""
        self._transport, self._peers = transport, peers
        peers.add(self)
        self._held.hold(CONNECTION_BYTES, self)
        transport.set_protocol(self)
        if transport.is_closing():
            self.connection_lost(None)
        elif rest:
            self.data_received(rest)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""
        if not self._closing:
            self._active_s = self._clock_s()
        self._reader.feed(data)
        if not self._yielded:
            self._pull()

    def _pull(self) -> None:
        was_paused, self._yielded = self._yielded, False
        try:
            for _ in range(PIPELINED):
                if self._transport is None or (message := self._reader.next()) is None:
                    break
                if message is not frames.FRAGMENT:
                    self._take(*message)
            else:
                self._yielded = True
                asyncio.get_running_loop().call_soon(self._pull)
            self._bound()
        except RequestError as error:
            self.reject(error)
        transport = self._transport
        if transport is None or transport.is_closing() or was_paused == self._yielded:
            return
        if self._yielded:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def reject(self, error: RequestError) -> None:
        """End the connection with a rejection, see `Unfinished`."""
        if self._closing:
            self.abort()
        self._fail(error)

    def _bound(self) -> None:
        """Count the bytes that wait here, and reject a request for which there is no room."""
        if self._transport is None:
            return
        held = CONNECTION_BYTES + self._reader.held_bytes
        rejection = self._held.take(held, self, int(self._active_s * 1e9))
        if rejection is not None:
            raise rejection

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the answer."""
        self._peers.discard(self)
        self._transport = None
        self._held.hold(0, self)
        if self._cancel is not None:
            self._cancel()
            self._cancel = None

    def sweep(self, now_s: float, idle_timeout_s: float, request_timeout_s: float) -> None:
        """Enforce the timeouts, see `Peer`."""
        silent_s = now_s - self._active_s
        if self._closing:
            if silent_s > LINGER_S:
                self.abort()
        elif self._cancel is None and silent_s > request_timeout_s:
            self._end(IDLE, f"No request came for {silent_s:.0f} s.")
        elif self._cancel is None and (slow := self._bounds.reject_slow(now_s - self._begun_s, in_body=True)):
            self._fail(slow)

    def close_after_next(self) -> None:
        """Do nothing: there is one answer."""

    def close_when_idle(self) -> None:
        """Close if no answer is in progress, see `Peer`."""
        if self._cancel is None and not self._closing:
            self._end(CloseCode.SERVICE_RESTART, "The server is shutting down; open a connection to another one.")

    def abort(self) -> None:
        """Close at once, see `Peer`."""
        if self._transport is not None:
            self._transport.abort()

    def _take(self, opcode: int, payload: bytes) -> None:
        if opcode == frames.PING:
            self._write(frame(frames.PONG, payload))
        elif opcode == frames.CLOSE:
            if not self._closing:
                self._write(frames.close_frame(CloseCode.NORMAL_CLOSURE, ""))
            assert self._transport is not None
            self._transport.close()
        elif opcode in (TEXT, BINARY) and not self._closing:
            if self._cancel is not None:
                raise InvalidInput("A second request came; open a connection for each.")
            self._submit(payload)

    def _submit(self, payload: bytes) -> None:
        served = self._served
        try:
            chunk = self._chunk_of(payload)
            cancel = self._answer.begin(chunk, self._batch_loop.arrival_ns(served.now_ns()))
        except RequestError as error:
            served.count_rejection(error)
            raise
        if self._closing:
            cancel()
        else:
            self._cancel = cancel

    def send(self, step: bytes) -> None:
        """Send a step, see `StepSink`."""
        self._active_s = self._clock_s()
        self._write(frame(TEXT, step))

    def end(self, done: bytes) -> None:
        """Send the end and close, see `StepSink`."""
        self._active_s, self._cancel = self._clock_s(), None
        self._write(frame(TEXT, b'{"done":' + done + b"}"))
        self._end(CloseCode.NORMAL_CLOSURE, "")

    def fail(self, error: RequestError) -> None:
        """Close with an error, see `StepSink`."""
        self._active_s, self._cancel = self._clock_s(), None
        self._fail(error)

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(data)
        if transport.get_write_buffer_size() > UNREAD_BYTES:
            transport.abort()

    def _fail(self, error: RequestError) -> None:
        self._end(code_of(error), reason_of(error))

    def _end(self, code: int, reason: str) -> None:
        if self._closing:
            return
        self._closing = True
        self._write(frames.close_frame(code, reason))
        if self._cancel is not None:
            self._cancel()
            self._cancel = None
