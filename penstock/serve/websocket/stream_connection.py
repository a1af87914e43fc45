"""WebSocket connection of one live stream, after the upgrade from HTTP."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import final

from websockets.frames import CloseCode

from penstock.core.errors import InvalidInput, RequestError, TooLarge
from penstock.core.segments import SegmentFinder
from penstock.core.spec import Array
from penstock.serve.exchange.peer import PIPELINED, UNREAD_BYTES, Peer
from penstock.serve.fair_turns import CHUNK_BATCH_NS, SAMPLED, Usage
from penstock.serve.registry.segment_runs import SegmentRuns
from penstock.serve.registry.served_chain import ServedChain
from penstock.serve.streams.actions import Actions, BeginSegment, Close, PushChunk, Send
from penstock.serve.streams.session import FLOWING, OVER, SETTLING, STARTING
from penstock.serve.streams.slot_feed import SlotFeed
from penstock.serve.streams.streams import Streams
from penstock.serve.table.slots import OK
from penstock.serve.websocket import frames
from penstock.serve.websocket.closing import IDLE, LINGER_S, code_of, reason_of
from penstock.serve.websocket.frames import BINARY, TEXT, frame

log = logging.getLogger(__name__)

SHUTTING_DOWN = "The server is shutting down; open another stream."


@final
class StreamConnection(asyncio.Protocol):
    """A live stream of one client, from its admission on; executes the actions of its `Session`.

    Args:
        streams: Those of its model.
        clock_s: A monotonic clock in seconds.
        chain: The chain that begins with the stream; None for the model alone.

    Raises:
        Overloaded: No slot is free.
    """

    def __init__(self, streams: Streams, clock_s: Callable[[], float], chain: ServedChain | None = None) -> None:
        self._streams = streams
        self._name = secrets.token_hex(8)
        self._segments: SegmentRuns | None = None
        if chain is None or chain.segments is None:
            self._session = session = streams.session(self._name)
        else:
            self._segments = SegmentRuns(chain, self._send_text, self._on_segment_ended)
            find = SegmentFinder(chain.name, chain.segments)
            self._session = session = streams.session(self._name, chain.name, find)
        self._receive_binary, self._receive_result = session.receive_binary, session.receive_result
        self._batch_loop, self._now_ns = streams.batch_loop, streams.now_ns
        self._turns = streams.batch_loop.turns
        self._usage = Usage(self._turns)
        self._pushed = 0  # chunks
        self._arrival_ns = 0  # of the bytes that were read last
        self._budget_ns = streams.budget_ns
        self._feed = SlotFeed(streams.writer, self._on_result, drained=self._on_room)
        self._put = self._feed.put
        self._reader = frames.FrameReader(self._session.max_message_bytes)
        self._transport: asyncio.Transport | None = None
        self._peers: set[Peer] = set()
        self._clock_s = clock_s
        self._full = False  # chunks wait for room in the slot: no message is taken
        self._pulling = False  # a message is being taken
        self._yielded = False  # messages wait until other connections were served
        self._closing = False  # the close frame is written
        self._closed_by_client = False  # what comes now is dropped unread
        self._reading_paused = self._writing_paused = False
        self._activity = 0  # of the session, at the last sweep
        self._active_s = self._moved_s = clock_s()
        self._unread_bytes = 0

    def take_over(self, transport: asyncio.Transport, rest: bytes, peers: set[Peer]) -> None:
        """Go on with a connection that was upgraded from HTTP.

        Args:
            transport: The connection's.
            rest: Bytes that came after the upgrade.
            peers: All connections of the server; this one adds and removes itself.
        """
        self._transport, self._peers = transport, peers
        peers.add(self)
        transport.set_protocol(self)
        if transport.is_closing():
            self.connection_lost(None)
        elif self._session.state is OVER:
            self._end(CloseCode.GOING_AWAY, SHUTTING_DOWN)  # finished while the upgrade waited for its turn
        if rest:
            self.data_received(rest)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""
        now_ns = self._now_ns()
        self._batch_loop.run_if_overdue(now_ns)
        self._arrival_ns = self._batch_loop.arrival_ns(now_ns)
        begin_cpu_ns = self._usage.begin()
        self._take_in(data)
        if begin_cpu_ns:
            self._usage.end(begin_cpu_ns)

    def _take_in(self, data: bytes) -> None:
        if self._usage.waits and not self._yielded and not self._full:
            self._yield()
            self._pause()
        if self._full or self._yielded or self._closing or (payload := self._reader.next_alone(data)) is None:
            if not self._closed_by_client:
                self._reader.feed(data)
                self._pull()
            return
        # The common case: one whole message of samples, and room for it.
        try:
            self._execute(self._receive_binary(payload))
        except RequestError as error:
            self._fail(error)
        if self._full:
            self._pause()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave: what waits need not run."""
        self._peers.discard(self)
        self._transport = None
        self._leave(aborted=not self._closing)

    def pause_writing(self) -> None:
        """Note that the client does not read fast enough."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        self._writing_paused = False

    def finish(self, code: int, reason: str) -> None:
        """Answer what came, release what the network holds back, and end."""
        self._stamp()
        self._execute(self._session.finish(code, reason))

    def sweep(self, now_s: float, idle_timeout_s: float, request_timeout_s: float) -> None:
        """Enforce the timeouts, see `Peer`."""
        if self._transport is None:
            return
        unread = self._transport.get_write_buffer_size()
        if unread != self._unread_bytes:
            self._unread_bytes, self._moved_s = unread, now_s
        if self._session.activity != self._activity:
            self._activity, self._active_s = self._session.activity, now_s
        state, silent_s = self._session.state, now_s - self._active_s
        if self._closing:
            if now_s - self._moved_s > LINGER_S:
                self.abort()
        elif state is STARTING:
            if silent_s > request_timeout_s:
                self._end(IDLE, f"No start came for {silent_s:.0f} s.")
        elif unread and now_s - self._moved_s > idle_timeout_s:
            self.abort()
        elif state is FLOWING and not self._full and silent_s > idle_timeout_s:
            self._end(IDLE, f"No samples came for {silent_s:.0f} s; open another stream.")

    def close_after_next(self) -> None:
        """Do nothing: a stream goes on until `close_when_idle`."""

    def close_when_idle(self) -> None:
        """End the stream once what came is answered."""
        self.finish(CloseCode.GOING_AWAY, SHUTTING_DOWN)

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._end(CloseCode.GOING_AWAY, SHUTTING_DOWN)
            self._transport.abort()

    def _execute(self, actions: Actions) -> None:
        for action in actions:
            if type(action) is PushChunk:
                self._full = not self._put(action, self._arrival_ns, self._arrival_ns + self._budget_ns)
                self._pushed += 1
                if self._usage.unusual or not self._pushed % SAMPLED:
                    self._usage.add_chunks(1 if self._usage.unusual else SAMPLED)
            elif type(action) is Send:
                self._write(frame(BINARY if action.binary else TEXT, action.payload))
            elif type(action) is Close:
                self._end(action.code, action.reason, aborted=action.code != CloseCode.NORMAL_CLOSURE)
            elif type(action) is BeginSegment:
                assert self._segments is not None, action
                if not self._closing:
                    self._segments.begin(action, self._now_ns())
            else:
                self._set_budget(int(action.latency_ms * 1e6))

    def _set_budget(self, budget_ns: int) -> None:
        if budget_ns < self._budget_ns:
            self._streams.admit(budget_ns, newcomers=0)
        self._budget_ns = budget_ns

    def _on_result(self, status: int, output: Array, last: bool) -> None:
        if status != OK:
            self._fail(self._streams.error_of_status(status, self._budget_ns))
            return
        try:
            self._execute(self._receive_result(output, last))
        except RequestError as error:
            self._fail(error)
        if self._session.state is SETTLING:
            # The segments that are under way need no slot.
            self._leave_slot(aborted=False)

    def _on_segment_ended(self) -> None:
        self._execute(self._session.segment_ended())

    def _send_text(self, payload: bytes) -> None:
        self._write(frame(TEXT, payload))

    def _on_room(self) -> None:
        self._full = False
        if self._usage.waits:
            if not self._yielded:
                self._yield()
            return
        self._stamp()
        self._pull()

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if self._closing or transport is None:
            return
        transport.write(data)
        if self._writing_paused and transport.get_write_buffer_size() > UNREAD_BYTES:
            log.info("stream %s: its client reads no results; it is ended", self._name)
            self._end(CloseCode.POLICY_VIOLATION, "Results wait unread; read them as they come.")
            self.abort()

    def _pull(self) -> None:
        # A result that comes while a message is taken must not have the next one taken before it.
        if self._pulling or self._yielded or self._transport is None:
            return
        self._pulling = True
        try:
            # After some messages other connections are served first.
            for _ in range(PIPELINED):
                if self._full or self._closed_by_client or not self._take():
                    break
            else:
                self._yield()
        finally:
            self._pulling = False
        if self._closed_by_client or not (self._full or self._yielded):
            self._resume()
        else:
            self._pause()

    def _yield(self) -> None:
        self._yielded = True
        self._turns.add(self._go_on, self._usage)

    def _go_on(self) -> None:
        begin_cpu_ns, pushed = self._turns.cpu_ns(), self._pushed
        self._yielded = False
        self._stamp()
        self._pull()
        later_ns = (self._pushed - pushed) * CHUNK_BATCH_NS
        self._turns.charge_turn(self._usage, begin_cpu_ns, later_ns)

    def _stamp(self) -> None:
        # A message that waited arrives, for its deadline, when it is taken.
        self._arrival_ns = self._batch_loop.arrival_ns(self._now_ns())

    def _take(self) -> bool:
        """Take the next message, or drop it if the stream is over; False if there is none."""
        reader = self._reader
        try:
            message = reader.next()
        except RequestError as error:
            self._closed_by_client = True
            code = CloseCode.MESSAGE_TOO_BIG if isinstance(error, TooLarge) else CloseCode.PROTOCOL_ERROR
            self._end(code, str(error))
            return False
        if message is None:
            return False
        opcode, payload = message
        if opcode >= frames.CLOSE:
            self._control(opcode, payload)
        elif message is not frames.FRAGMENT and not self._closing:
            try:
                if opcode == BINARY:
                    self._execute(self._receive_binary(payload))
                else:
                    self._execute(self._session.receive_text(payload))
                    reader.max_bytes = self._session.max_message_bytes
            except RequestError as error:
                self._fail(error)
        return True

    def _control(self, opcode: int, payload: bytes) -> None:
        if opcode == frames.PING:
            self._write(frame(frames.PONG, payload))
        elif opcode == frames.CLOSE:
            try:
                self._end(frames.close_code(payload), "")
            except InvalidInput as error:
                self._end(CloseCode.PROTOCOL_ERROR, str(error))
            self._closed_by_client = True
            if self._transport is not None:
                self._transport.close()

    def _fail(self, error: RequestError) -> None:
        self._end(code_of(error), reason_of(error))

    def _end(self, code: int, reason: str, *, aborted: bool = True) -> None:
        if self._closing or self._transport is None:
            return
        self._closing = True
        log.info("stream %s of %s ends with %d %s", self._name, self._streams.name, code, reason)
        self._transport.write(frames.close_frame(code, reason))
        self._moved_s = self._clock_s()
        self._leave(aborted=aborted)
        # What came and what still comes is dropped until the client closes too.
        self._full = False
        self._pull()

    def _leave(self, *, aborted: bool) -> None:
        if self._segments is not None:
            self._segments.cancel()
        self._leave_slot(aborted=aborted)

    def _leave_slot(self, *, aborted: bool) -> None:
        self._feed.leave()
        self._streams.left(self, aborted=aborted)

    def _pause(self) -> None:
        if not self._reading_paused and self._transport is not None and not self._transport.is_closing():
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._reading_paused and self._transport is not None and not self._transport.is_closing():
            self._reading_paused = False
            self._transport.resume_reading()
