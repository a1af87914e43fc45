"""WebSocket connection of one live stream, after the upgrade from HTTP."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast, final

from websockets.frames import CloseCode

from penstock.core.errors import InvalidInput, RequestError, TooLarge
from penstock.serve.exchange.peer import PIPELINED, UNREAD_BYTES, Peer
from penstock.serve.exchange.request_bounds import CONNECTION_BYTES, HeldBytes, RequestBounds
from penstock.serve.fair_turns import CHUNK_BATCH_NS, Usage, stream_read_ns
from penstock.serve.registry.served_chain import ServedChain
from penstock.serve.streams.protocol import STARTING
from penstock.serve.streams.signal_pace import SignalPace
from penstock.serve.streams.stream_start import MAX_START_BYTES
from penstock.serve.streams.streams import Streams
from penstock.serve.websocket import frames
from penstock.serve.websocket.closing import LINGER_S
from penstock.serve.websocket.frames import BINARY, TEXT, frame
from penstock.serve.websocket.live_stream import LiveStream, MakeProtocol
from penstock.serve.websocket.paused_connection import PausedConnection

log = logging.getLogger(__name__)

SHUTTING_DOWN = "The server is shutting down; open another stream."

# Has a stream admitted once, which the given function makes.
Admit = Callable[[Callable[[Streams], LiveStream]], LiveStream]


@final
class StreamConnection(PausedConnection):
    """The connection of a live stream, from its admission on; see `StreamOwner`.

    Args:
        admit: Admits its stream.
        clock_s: A monotonic clock in seconds.
        chain: The chain that begins with the stream; None for the model alone.
        protocol: Makes the stream's protocol; None for `Session`.
        bounds: Bounds of messages that have not come whole or wait for room; None where they are short.
        start_bounds: Bounds of a start that may bring a ticket, where the messages after it are short.
        client: Name of the client's API key, to which the stream's tickets are bound; None where it may have none.

    Attributes:
        stream: Its stream.

    Raises:
        RequestError: The stream is not admitted.
    """

    def __init__(
        self,
        admit: Admit,
        clock_s: Callable[[], float],
        chain: ServedChain | None = None,
        *,
        protocol: MakeProtocol | None = None,
        bounds: RequestBounds | None = None,
        start_bounds: RequestBounds | None = None,
        client: str | None = None,
    ) -> None:
        super().__init__(clock_s)
        self.pushed = 0
        self.arrival_ns = 0
        self._held = None if bounds is None else HeldBytes(bounds)
        self.stream = stream = admit(
            lambda streams: LiveStream(streams, self, chain, now_s=self._moved_s, protocol=protocol, client=client)
        )
        self._bounds_start = False
        if start_bounds is not None and stream.session.max_message_bytes > MAX_START_BYTES:
            self._held, self._bounds_start = HeldBytes(start_bounds), True
        self._chunk_bytes = stream.streams.application.input_tensor.nbytes
        self._batch_loop, self._now_ns = stream.streams.batch_loop, stream.streams.now_ns
        self._turns = self._batch_loop.turns
        self.usage = Usage(self._turns)
        self._reader = frames.FrameReader(stream.session.max_message_bytes)
        self._pace = SignalPace(1e9 * stream.streams.chunk_s, self._now_ns())
        self._pulling = False  # a message is being taken
        self._yielded, self._yielded_ns = False, 0  # messages wait until other connections were served, and since when
        self._closed_by_client = False  # what comes now is dropped unread

    def take_over(self, transport: asyncio.Transport, rest: bytes, peers: set[Peer]) -> None:
        """Go on with a connection that was upgraded from HTTP.

        Args:
            transport: The connection's.
            rest: Bytes that came after the upgrade.
            peers: All connections of the server; this one adds and removes itself.
        """
        self._transport, self._peers = transport, peers
        peers.add(self)
        transport.set_protocol(cast(Any, self))
        if transport.is_closing():
            self.connection_lost(None)
        elif self.stream.over:
            # Finished while the upgrade waited for its turn.
            self.end(self.stream, CloseCode.SERVICE_RESTART, SHUTTING_DOWN)
        else:
            self.stream.open()
        if rest:
            self.data_received(rest)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""
        now_ns = self._now_ns()
        self._batch_loop.run_if_overdue(now_ns)
        self.arrival_ns = self._batch_loop.arrival_ns(now_ns)
        begin_cpu_ns = self.usage.begin()
        # A large message may be complete with the last of its bytes.
        nbytes = len(data) + self._reader.held_bytes if begin_cpu_ns else 0
        self._take_in(data)
        if self._held is not None:
            self._bound(self._held)
        if begin_cpu_ns:
            self.usage.end(begin_cpu_ns, stream_read_ns(nbytes))

    def _take_in(self, data: bytes) -> None:
        stream, usage = self.stream, self.usage
        if usage.unusual and usage.waits and not self._yielded and not stream.full:
            self._yield()
            self._pause()
        if stream.full or self._yielded or stream.over or (payload := self._reader.next_alone(data)) is None:
            if not self._closed_by_client:
                self._reader.feed(data)
                self._pull()
            return
        # The common case: one whole message of samples, and room for it.
        stream.receive_binary(payload)
        if stream.full:
            self._pause()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave: what waits need not run."""
        self._peers.discard(self)
        self._transport = None
        if self._held is not None:
            self._held.hold(0, self)
        self.stream.leave()

    def reject(self, error: RequestError) -> None:
        """End the stream whose message has not come whole, see `Unfinished`."""
        self.stream.fail(error)
        self.abort()

    def sweep(self, now_s: float, idle_timeout_s: float, request_timeout_s: float) -> None:
        """Enforce the timeouts, see `Peer`."""
        if self._transport is None:
            return
        unread = self._count_unread(self._transport, now_s)
        if self.stream.over:
            if now_s - self._moved_s > LINGER_S:
                self.abort()
        elif unread and now_s - self._moved_s > idle_timeout_s:
            self.abort()
        else:
            self.stream.sweep(now_s, idle_timeout_s, request_timeout_s)

    def close_after_next(self) -> None:
        """Do nothing: a stream goes on until `close_when_idle`."""

    def close_when_idle(self) -> None:
        """End the stream once what came is answered."""
        self.stream.finish(CloseCode.SERVICE_RESTART, SHUTTING_DOWN)

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self.stream.end(CloseCode.SERVICE_RESTART, SHUTTING_DOWN)
            self._transport.abort()

    def stamp(self) -> None:
        """Let what is taken now arrive now: a message that waited arrives, for its deadline, when it is taken."""
        self.arrival_ns = self._batch_loop.arrival_ns(self._now_ns())

    def send(self, stream: LiveStream, payload: bytes, binary: bool) -> None:
        """Send a message of the stream, see `StreamOwner`."""
        self._write(frame(BINARY if binary else TEXT, payload))

    def end(self, stream: LiveStream, code: int, reason: str) -> None:
        """Send the close frame."""
        if self._transport is None:
            return
        self._transport.write(frames.close_frame(code, reason))
        self._moved_s = self._clock_s()
        # What came and what still comes is dropped until the client closes too.
        self._pull()

    def on_room(self, stream: LiveStream) -> None:
        """Take the messages that waited, see `StreamOwner`."""
        if self.usage.waits:
            if not self._yielded:
                self._yield()
            return
        self.stamp()
        self._pull()
        if self._held is not None:
            self._bound(self._held)

    def on_moved(self, stream: LiveStream, before: Streams) -> None:
        """Do nothing: the stream knows where it is, see `StreamOwner`."""

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if self.stream.over or transport is None:
            return
        transport.write(data)
        if self._writing_paused and transport.get_write_buffer_size() > UNREAD_BYTES:
            log.info("a client of %s reads no results; its stream is ended", self.stream.streams.name)
            # Neither would a last message or the reason of a close be read.
            self.stream.leave()
            transport.abort()

    def _pull(self) -> None:
        # A result that comes while a message is taken must not have the next one taken before it.
        if self._pulling or self._yielded or self._transport is None:
            return
        self._pulling = True
        try:
            # After some messages other connections are served first.
            for _ in range(PIPELINED):
                if self.stream.full or self._closed_by_client or not self._take():
                    break
            else:
                self._yield()
        finally:
            self._pulling = False
        if self._closed_by_client or not (self.stream.full or self._yielded):
            self._resume()
        else:
            self._pause()

    def _bound(self, held: HeldBytes) -> None:
        """Count what waits here, and end the stream if there is no room for it."""
        if self._transport is None:
            return
        waiting = self._reader.held_bytes + self.stream.waiting * self._chunk_bytes
        if (rejection := held.take(CONNECTION_BYTES + waiting, self, self._now_ns())) is not None:
            self.reject(rejection)

    def _end_start(self) -> None:
        """Hold nothing from now on: the start was taken."""
        assert self._held is not None
        self._held.hold(0, self)
        self._held, self._bounds_start = None, False

    def _yield(self) -> None:
        self._yielded, self._yielded_ns = True, self._now_ns()
        self._turns.add(self._go_on, self.usage)

    def _go_on(self) -> None:
        begin_cpu_ns, held_bytes, pushed = self._turns.cpu_ns(), self._reader.held_bytes, self.pushed
        since_ns = self._yielded_ns
        self._yielded = False
        self.stamp()
        self._pull()
        if self._held is not None:
            self._bound(self._held)
        # A signal in real time was admitted with its work; what comes faster is paid back before the next.
        ahead = self._pace.ahead(self.pushed - pushed, since_ns, self._now_ns())
        later_ns = ahead * max(CHUNK_BATCH_NS, self.stream.streams.min_compute_ns)
        taken_bytes = held_bytes - self._reader.held_bytes
        self._turns.charge_turn(self.usage, begin_cpu_ns, later_ns, stream_read_ns(taken_bytes))

    def _take(self) -> bool:
        """Take the next message, or drop it if the stream is over; False if there is none."""
        reader, stream = self._reader, self.stream
        try:
            message = reader.next()
        except RequestError as error:
            self._closed_by_client = True
            code = CloseCode.MESSAGE_TOO_BIG if isinstance(error, TooLarge) else CloseCode.PROTOCOL_ERROR
            stream.end(code, str(error))
            return False
        if message is None:
            return False
        opcode, payload = message
        if opcode >= frames.CLOSE:
            self._control(opcode, payload)
        elif message is not frames.FRAGMENT and not stream.over:
            if opcode == BINARY:
                stream.receive_binary(payload)
            else:
                stream.receive_text(payload)
                reader.max_bytes = stream.session.max_message_bytes
                if self._bounds_start and stream.session.state is not STARTING:
                    self._end_start()
        return True

    def _control(self, opcode: int, payload: bytes) -> None:
        if opcode == frames.PING:
            self._write(frame(frames.PONG, payload))
        elif opcode == frames.CLOSE:
            try:
                self.stream.end(frames.close_code(payload), "")
            except InvalidInput as error:
                self.stream.end(CloseCode.PROTOCOL_ERROR, str(error))
            self._closed_by_client = True
            if self._transport is not None:
                self._transport.close()
