"""WebSocket connection that many live streams share, after the upgrade from HTTP.

Each stream is opened, answered, ended and closed alone; see `penstock.core.streams.stream_entries`. The results of a
batch are written by one call.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast, final

from websockets.frames import CloseCode

from penstock.core.errors import InvalidInput, RequestError, TooLarge, UnsupportedContent
from penstock.core.streams.stream_entries import BINARY, CLOSE, HEAD, MAX_FIRST_BYTES, TEXT, EntryReader, close_payload
from penstock.core.wording.shown import shortened
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.exchange.peer import UNREAD_BYTES, Peer
from penstock.serve.exchange.request_bounds import CONNECTION_BYTES, HeldBytes, RequestBounds
from penstock.serve.fair_turns import CHUNK_BATCH_NS, Usage
from penstock.serve.registry.served_chain import ServedChain
from penstock.serve.streams.streams import Streams
from penstock.serve.websocket import frames
from penstock.serve.websocket.closing import IDLE, LINGER_S, code_of, reason_of
from penstock.serve.websocket.live_stream import LiveStream
from penstock.serve.websocket.paused_connection import PausedConnection
from penstock.serve.websocket.plain_streams import MANY, PlainStreams
from penstock.serve.websocket.shared_start import max_waiting_of, start_of

log = logging.getLogger(__name__)

# Entries that are taken in one iteration of the event loop.
ENTRIES = 64
# So many entries of plain streams take as long as one of others.
PLAIN = 8
# Longest message once a stream was open; longer if a stream may send longer messages.
MAX_BYTES = 1 << 20
# Results that a client may leave unread, for each open stream, beside `UNREAD_BYTES`.
UNREAD_BYTES_EACH = 1 << 16

SHUTTING_DOWN = "The server is shutting down; open another connection."

Make = Callable[[Streams, ServedChain | None], LiveStream]
# Admits a stream of a model by name, which the given function makes.
AdmitNamed = Callable[[str, Make], LiveStream]


@final
class SharedConnection(PausedConnection):
    """The connection of any number of live streams; see `StreamOwner`.

    Args:
        admit: Admits a stream.
        batch_loop: Runs the batches.
        clock_s: A monotonic clock in seconds.
        bounds: Bounds of messages that have not come whole.
    """

    def __init__(
        self, admit: AdmitNamed, batch_loop: BatchLoop, clock_s: Callable[[], float], bounds: RequestBounds
    ) -> None:
        super().__init__(clock_s)
        self.pushed = self.arrival_ns = 0
        self._admit = admit
        self._batch_loop, self._turns = batch_loop, batch_loop.turns
        self._bounds, self._held = bounds, HeldBytes(bounds)
        self.usage = Usage(self._turns)
        self._reader = frames.FrameReader(MAX_FIRST_BYTES)
        self._entries = EntryReader()
        # The open streams by id, and the largest id so far.
        self._streams: dict[int, LiveStream] = {}
        self._last_id = -1
        self._plain: dict[Streams, PlainStreams] = {}
        self._one_by_one = 0  # entries until `PlainStreams` are tried again
        # Entries that are not written yet, and their bytes.
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = 0
        self._flush_due = False
        self._pulling = False  # entries are being taken
        self._yielded = False  # entries wait until other connections were served
        self._draining = False
        self._closing = False  # the close frame is written
        self._closed_by_client = False  # or rejected: what comes now is dropped unread
        self._active_s = self._moved_s

    def take_over(self, transport: asyncio.Transport, rest: bytes, peers: set[Peer]) -> None:
        """Go on with a connection that was upgraded from HTTP, see `StreamConnection.take_over`."""
        self._transport, self._peers = transport, peers
        peers.add(self)
        self._held.hold(CONNECTION_BYTES, self)
        transport.set_protocol(cast(Any, self))
        if transport.is_closing():
            self.connection_lost(None)
        elif rest:
            self.data_received(rest)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""
        if self._closed_by_client:
            return
        now_ns = self._batch_loop.clock_ns()
        self._batch_loop.run_if_overdue(now_ns)
        self.arrival_ns = self._batch_loop.arrival_ns(now_ns)
        begin_cpu_ns = self.usage.begin()
        idle = not (self._yielded or self._closing or self._entries.left)
        if idle and (message := self._reader.next_alone(data)) is not None:
            self._entries.feed(message)
        else:
            self._reader.feed(data)
        if self.usage.waits and not self._yielded:
            self._yield()
            self._pause()
        self._pull()
        if begin_cpu_ns:
            self.usage.end(begin_cpu_ns)

    def connection_lost(self, exc: Exception | None) -> None:
        """End all streams: what waits need not run."""
        self._peers.discard(self)
        self._transport = None
        self._held.hold(0, self)
        self._leave_all()

    def sweep(self, now_s: float, idle_timeout_s: float, request_timeout_s: float) -> None:
        """Enforce the timeouts of the connection and of each stream, see `Peer`."""
        if self._transport is None:
            return
        unread = self._count_unread(self._transport, now_s)
        if self._closing:
            if now_s - self._moved_s > LINGER_S:
                self.abort()
            return
        if unread and now_s - self._moved_s > idle_timeout_s:
            self.abort()
            return
        for stream in list(self._streams.values()):
            stream.sweep(now_s, idle_timeout_s, request_timeout_s)
        if self._streams:
            self._active_s = now_s
        elif (silent_s := now_s - self._active_s) > (idle_timeout_s if self._last_id >= 0 else request_timeout_s):
            self._end(IDLE, f"No stream was open for {silent_s:.0f} s.")

    def close_after_next(self) -> None:
        """Do nothing: the streams go on until `close_when_idle`."""

    def close_when_idle(self) -> None:
        """End each stream once what came is answered, and then the connection."""
        self._draining = True
        for stream in list(self._streams.values()):
            stream.finish(CloseCode.SERVICE_RESTART, SHUTTING_DOWN)
        self._end_if_drained()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._end(CloseCode.SERVICE_RESTART, SHUTTING_DOWN)
            self._transport.abort()

    def reject(self, error: RequestError) -> None:
        """End the connection with a rejection, see `Unfinished`."""
        self._end(code_of(error), reason_of(error))
        # What came is dropped, and so is what comes: it must hold no bytes any more.
        self._reader, self._closed_by_client = frames.FrameReader(MAX_FIRST_BYTES), True
        self._held.hold(CONNECTION_BYTES, self)

    def stamp(self) -> None:
        """Let what is taken now arrive now, see `StreamOwner`."""
        self.arrival_ns = self._batch_loop.arrival_ns(self._batch_loop.clock_ns())

    def send(self, stream: LiveStream, payload: bytes, binary: bool) -> None:
        """Send a message of a stream, see `StreamOwner`."""
        self._add(stream.id, BINARY if binary else TEXT, payload)
        self._flush_later(stream.streams)

    def _send_plain(self, streams: Streams, entries: bytes) -> None:
        self._unwritten.append(entries)
        self._unwritten_bytes += len(entries)
        self._flush_later(streams)

    def end(self, stream: LiveStream, code: int, reason: str) -> None:
        """Send the end of a stream, see `StreamOwner`."""
        if self._streams.pop(stream.id, None) is None:
            return
        self._forget(stream)
        self._active_s = self._clock_s()
        self.usage.weight = max(1, len(self._streams))
        self._add(stream.id, CLOSE, close_payload(code, shortened(reason, frames.MAX_REASON_BYTES)))
        self._flush_later(stream.streams)

    def on_room(self, stream: LiveStream) -> None:
        """Do nothing: the entries of other streams did not wait, see `StreamOwner`."""

    def on_moved(self, stream: LiveStream, before: Streams) -> None:
        """Keep the stream among those of its new replica, see `StreamOwner`."""
        self._leave_plain(stream, before)
        self._plain_of(stream.streams).open(stream)

    def _add(self, stream_id: int, kind: int, payload: bytes) -> None:
        self._unwritten += (HEAD.pack(stream_id, kind, len(payload)), payload)
        self._unwritten_bytes += HEAD.size + len(payload)

    def _flush_later(self, streams: Streams) -> None:
        if not (self._pulling or self._flush_due):
            self._flush_due = True
            streams.writer.at_end(self._flush)

    def _flush(self) -> None:
        """Write what was sent since the last time, as one message."""
        self._flush_due = False
        parts, self._unwritten = self._unwritten, []
        size, self._unwritten_bytes = self._unwritten_bytes, 0
        if parts:
            self._write(b"".join((frames.frame_head(frames.BINARY, size), *parts)))
        self._end_if_drained()

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if self._closing or transport is None:
            return
        transport.write(data)
        if self._writing_paused and transport.get_write_buffer_size() > self._max_unread_bytes:
            log.info("a connection of %d streams reads no results; it is ended", len(self._streams))
            self._end(CloseCode.POLICY_VIOLATION, "Results wait unread; read them as they come.")
            self.abort()

    @property
    def _max_unread_bytes(self) -> int:
        return UNREAD_BYTES + UNREAD_BYTES_EACH * len(self._streams)

    def _pull(self) -> None:
        if self._pulling or self._yielded or self._transport is None:
            return
        self._pulling = True
        try:
            if self._take_some():
                self._yield()
        finally:
            self._pulling = False
        if self._unwritten or self._draining:
            self._flush()
        self._bound()
        if self._yielded and not self._closed_by_client:
            self._pause()
        else:
            self._resume()

    def _yield(self) -> None:
        self._yielded = True
        self._turns.add(self._go_on, self.usage)

    def _go_on(self) -> None:
        begin_cpu_ns, pushed = self._turns.cpu_ns(), self.pushed
        self._yielded = False
        self.stamp()
        self._pull()
        later_ns = (self.pushed - pushed) * CHUNK_BATCH_NS
        self._turns.charge_turn(self.usage, begin_cpu_ns, later_ns // self.usage.weight)

    def _take_some(self) -> bool:
        """Take some entries; True if others may be there."""
        entries = self._entries
        try:
            left = ENTRIES
            while left > 0:
                if self._plain and entries.left and (taken := self._take_plain()):
                    left -= taken // PLAIN + 1
                    continue
                left -= 1
                if (entry := entries.next()) is not None:
                    self._take(*entry)
                elif not self._next_message():
                    return False
        except RequestError as error:
            # An entry that cannot be read: where the next one begins is not known.
            self._end(CloseCode.INVALID_DATA, str(error))
        return True

    def _take_plain(self) -> int:
        """Take entries of plain streams that come next in the message; returns their number."""
        if self._one_by_one:
            self._one_by_one -= 1
            return 0
        entries = self._entries
        stream = self._streams.get(entries.next_id)
        if stream is None or stream.lane is None:
            return 0
        taken = self._plain[stream.streams].take(entries, self.arrival_ns)
        if not taken:
            self._one_by_one = MANY
            return 0
        self.pushed += taken
        self.usage.add_chunks(taken)
        return taken

    def _next_message(self) -> bool:
        """Read the next message of the WebSocket, or drop it after the close; False if there is none."""
        if self._closed_by_client:
            return False
        if not self._closing and (joined := self._reader.next_joined(MANY)) is not None:
            self._bounds.end(self)
            self._entries.feed(*joined)
            return True
        try:
            message = self._reader.next()
        except RequestError as error:
            self._closed_by_client = True
            self._end(
                CloseCode.MESSAGE_TOO_BIG if isinstance(error, TooLarge) else CloseCode.PROTOCOL_ERROR, str(error)
            )
            return False
        if message is None:
            return False
        opcode, payload = message
        # A fragment, or a ping between two, does not make a message whole.
        if opcode in (frames.BINARY, frames.TEXT):
            self._bounds.end(self)
        if opcode == frames.BINARY:
            if not self._closing:
                self._entries.feed(payload)
        elif opcode == frames.TEXT:
            self._end(CloseCode.UNSUPPORTED_DATA, "Text came where entries belong, which are binary.")
        elif opcode == frames.PING:
            self._write(frames.frame(frames.PONG, payload))
        elif opcode == frames.CLOSE:
            self._close_by_client(payload)
        return True

    def _close_by_client(self, payload: bytes) -> None:
        try:
            self._end(frames.close_code(payload), "")
        except InvalidInput as error:
            self._end(CloseCode.PROTOCOL_ERROR, str(error))
        self._closed_by_client = True
        if self._transport is not None:
            self._transport.close()

    def _take(self, stream_id: int, kind: int, payload: bytes) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            # Ids grow, so a smaller one is of a stream that has ended; its client may not have known.
            if stream_id > self._last_id:
                self._last_id = stream_id
                self._open(stream_id, kind, payload)
        elif kind == CLOSE:
            try:
                stream.end(frames.close_code(payload), "")
            except InvalidInput as error:
                stream.end(CloseCode.PROTOCOL_ERROR, str(error))
        elif len(payload) > stream.session.max_message_bytes:
            most = stream.session.max_message_bytes
            stream.fail(TooLarge(f"A message has {len(payload):,} bytes; at most {most:,} are taken."))
        elif stream.full and not stream.resuming and stream.waiting >= max_waiting_of(stream.streams):
            stream.end(
                CloseCode.POLICY_VIOLATION,
                f"{stream.waiting:,} chunks wait for the network; wait for results before more.",
            )
        elif kind == BINARY:
            stream.receive_binary(payload)
            # A message that is refused ends its stream.
            if stream_id in self._streams and len(self._entries.message) > MANY * len(payload):
                self._plain[stream.streams].join(stream)
        else:
            stream.receive_text(payload)

    def _open(self, stream_id: int, kind: int, payload: bytes) -> None:
        try:
            if kind != TEXT:
                raise UnsupportedContent(f'Stream {stream_id} has no start; it begins with text, {{"type":"start"}}.')
            name, start = start_of(payload)
            stream = self._admit(
                name, lambda streams, chain: LiveStream(streams, self, chain, id=stream_id, now_s=self._clock_s())
            )
        except RequestError as error:
            self._add(stream_id, CLOSE, close_payload(code_of(error), reason_of(error)))
            return
        self._streams[stream_id] = stream
        self._plain_of(stream.streams).open(stream)
        self.usage.weight = len(self._streams)
        stream.receive_text(start)
        self._reader.max_bytes = max(self._reader.max_bytes, MAX_BYTES, HEAD.size + stream.session.max_message_bytes)

    def _end_if_drained(self) -> None:
        if self._draining and not self._streams:
            self._end(CloseCode.SERVICE_RESTART, SHUTTING_DOWN)

    def _end(self, code: int, reason: str) -> None:
        if self._closing or self._transport is None:
            return
        # Ends of streams that were not written yet.
        parts, self._unwritten = self._unwritten, []
        head = (frames.frame_head(frames.BINARY, self._unwritten_bytes),) if parts else ()
        self._transport.write(b"".join((*head, *parts, frames.close_frame(code, reason))))
        self._closing = True
        log.info("a connection of %d streams ends with %d %s", len(self._streams), code, reason)
        self._entries.drop()
        self._moved_s = self._clock_s()
        self._leave_all()

    def _leave_all(self) -> None:
        streams, self._streams = self._streams, {}
        self.usage.weight = 1
        for stream in streams.values():
            stream.leave()
            self._forget(stream)

    def _forget(self, stream: LiveStream) -> None:
        self._leave_plain(stream, stream.streams)

    def _plain_of(self, streams: Streams) -> PlainStreams:
        plain = self._plain.get(streams)
        if plain is None:
            plain = self._plain[streams] = PlainStreams(streams, self._send_plain)
        return plain

    def _leave_plain(self, stream: LiveStream, streams: Streams) -> None:
        plain = self._plain[streams]
        plain.close(stream)
        if plain.empty:
            plain.end()
            del self._plain[streams]

    def _bound(self) -> None:
        """Count the bytes that wait here, and end the connection if there is no room for them."""
        if self._transport is None or self._closing:
            return
        held = CONNECTION_BYTES + self._reader.held_bytes + self._entries.left
        if held == self._held.count == CONNECTION_BYTES:
            return
        rejection = self._held.take(held, self, self._batch_loop.clock_ns())
        if rejection is not None:
            self.reject(rejection)
