"""One live stream between its slot and a connection: executes the actions of its `Session`.

It does not know whether other streams share the connection. What it sends, and its end, it gives to a `StreamOwner`.
"""

import logging
import secrets
from collections.abc import Callable
from typing import Protocol, final

from websockets.frames import CloseCode

from penstock.core.errors import RequestError
from penstock.core.spec import Array
from penstock.core.streams.segments import SegmentFinder
from penstock.serve.fair_turns import SAMPLED, Usage
from penstock.serve.registry.segment_runs import SegmentRuns
from penstock.serve.registry.served_chain import ServedChain
from penstock.serve.streams.actions import (
    Action,
    Actions,
    BeginSegment,
    Close,
    PushChunk,
    Redecode,
    Restore,
    Send,
    SetBudget,
)
from penstock.serve.streams.endpoint_queue import EndpointQueue
from penstock.serve.streams.protocol import FLOWING, SETTLING, STARTING, LiveProtocol
from penstock.serve.streams.slot_feed import SlotFeed
from penstock.serve.streams.streams import Streams
from penstock.serve.table.slots import OK
from penstock.serve.websocket.closing import IDLE, code_of, reason_of

log = logging.getLogger(__name__)


class StreamOwner:
    """The connection of one stream or of several; abstract.

    Attributes:
        usage: Its use of the event loop.
        arrival_ns: Arrival of the bytes that were read last.
        pushed: Chunks of all its streams.
    """

    usage: Usage
    arrival_ns: int
    pushed: int

    def stamp(self) -> None:
        """Let what is taken now arrive now."""
        raise NotImplementedError

    def send(self, stream: "LiveStream", payload: bytes, binary: bool) -> None:
        """Send a message of a stream."""
        raise NotImplementedError

    def end(self, stream: "LiveStream", code: int, reason: str) -> None:
        """Send the end of a stream; it has left its slot."""
        raise NotImplementedError

    def on_room(self, stream: "LiveStream") -> None:
        """Note that no chunk of a stream waits for room in its slot any more."""
        raise NotImplementedError

    def on_moved(self, stream: "LiveStream", before: Streams) -> None:
        """Note that a stream goes on in another replica than before."""
        raise NotImplementedError


class StreamLane(Protocol):
    """Takes messages and hands out results of streams that are alike, many at a time."""

    def update(self, stream: "LiveStream") -> None:
        """Give a stream's numbers to its session."""

    def leave(self, stream: "LiveStream") -> None:
        """Give a stream back, with all that came."""


# Makes the protocol of a stream of this name.
MakeProtocol = Callable[[str], LiveProtocol]


@final
class LiveStream:
    """A live stream of one client, from its admission on.

    Args:
        streams: Those of its model.
        owner: Its connection.
        chain: The chain that begins with the stream; None for the model alone.
        id: Its number on its connection.
        now_s: The time of its admission, on the clock of sweeps.
        protocol: Makes its protocol; None for `Session`.
        client: Name of the client's API key, to which its tickets are bound; None where it may have none.

    Attributes:
        full: Whether chunks wait for room in the slot.
        over: Whether its end was sent, or its connection is gone.
        budget_ns: Its latency budget.
        lane: Takes its messages and results meanwhile; None if it does so itself.
        keep: Keeps a chunk that was put into the slot by its lane.

    Raises:
        Overloaded: No slot is free.
    """

    __slots__ = (
        "_active_s",
        "_activity",
        "_endpoints",
        "_feed",
        "_lane_answered",
        "_name",
        "_owner",
        "_receive_binary",
        "_receive_result",
        "_segments",
        "_take_state",
        "budget_ns",
        "full",
        "id",
        "keep",
        "lane",
        "over",
        "session",
        "streams",
    )

    def __init__(
        self,
        streams: Streams,
        owner: StreamOwner,
        chain: ServedChain | None = None,
        *,
        id: int = 0,
        now_s: float = 0.0,
        protocol: MakeProtocol | None = None,
        client: str | None = None,
    ) -> None:
        self.streams, self.id, self._owner = streams, id, owner
        self._name = secrets.token_hex(8)
        self._segments: SegmentRuns | None = None
        session: LiveProtocol
        self._take_state: Callable[[bytes], Actions] = _no_actions
        if protocol is not None:
            session = protocol(self._name)
        elif chain is None or chain.segments is None:
            session = streams.session(self._name, client=client)
            self._take_state = session.receive_state
        else:
            self._segments = SegmentRuns(chain, self._send_text, self._on_segment_ended)
            find = SegmentFinder(chain.name, chain.segments)
            session = streams.session(self._name, chain.name, find)
        self.session = session
        self._receive_binary, self._receive_result = session.receive_binary, session.receive_result
        self.budget_ns = streams.budget_ns
        self._feed = SlotFeed(
            streams.writer, self._on_result, drained=self._on_room, ring=streams.ring(), lost=self._on_lost
        )
        self.keep = self._feed.keep
        self._endpoints: EndpointQueue | None = None
        if streams.beam is not None:
            self._endpoints = EndpointQueue(
                streams.beam, self._execute_one, self.fail, lambda outcome: self.streams.count_utterance(outcome)
            )
        self._lane_answered = 0
        self.full = self.over = False
        self.lane: StreamLane | None = None
        self._activity, self._active_s = 0, now_s

    @property
    def name(self) -> str:
        """Its name in logs."""
        return self._name

    @property
    def slot(self) -> int | None:
        """Its slot; None if it has left, or chunks wait for room there."""
        return self._feed.slot

    @property
    def waiting(self) -> int:
        """Number of chunks that wait for room in the slot."""
        return self._feed.waiting

    @property
    def resuming(self) -> bool:
        """True while it waits for an engine, or its chunks run once more in another one."""
        return self._feed.resuming

    def join_lane(self, lane: StreamLane, answered: int) -> None:
        """Let a lane take its messages and results, from this result on."""
        self.lane, self._lane_answered = lane, answered

    def count_answered(self, answered: int) -> None:
        """Count the results that its lane has handed out."""
        self._feed.count_results(answered - self._lane_answered)
        self._lane_answered = answered

    def open(self) -> None:
        """Send what the protocol says first."""
        self._execute(self.session.open())

    def receive_binary(self, payload: bytes) -> None:
        """Take a binary message."""
        if self.lane is not None:
            self.lane.leave(self)
        try:
            self._execute(self._receive_binary(payload))
        except RequestError as error:
            self.fail(error)

    def receive_text(self, payload: bytes) -> None:
        """Take a text message."""
        if self.lane is not None:
            self.lane.leave(self)
        try:
            self._execute(self.session.receive_text(payload))
        except RequestError as error:
            self.fail(error)

    def finish(self, code: int, reason: str) -> None:
        """Answer what came, release what the network holds back, and end."""
        if self.lane is not None:
            self.lane.leave(self)
        self._owner.stamp()
        self._execute(self.session.finish(code, reason))

    def fail(self, error: RequestError) -> None:
        """End with an error."""
        self.end(code_of(error), reason_of(error))

    def end(self, code: int, reason: str, *, aborted: bool = True) -> None:
        """End, once: leave the slot, and send the reason."""
        if self._endpoints is not None and not self.over:
            # What waits for a better text goes before the end.
            self._endpoints.settle()
        if self.over:
            return
        messages, code, reason = self.session.ending(code, reason)
        for message in messages:
            self._owner.send(self, message.payload, message.binary)
        if self.over:
            return  # the client reads nothing, and was cut off
        log.info("stream %s of %s ends with %d %s", self._name, self.streams.name, code, reason)
        self.leave(aborted=aborted)
        self._owner.end(self, code, reason)

    def leave(self, *, aborted: bool = True) -> None:
        """Leave the slot: nothing more is sent, and what waits need not run."""
        if self.lane is not None:
            self.lane.leave(self)
        self.over, self.full = True, False
        if self._segments is not None:
            self._segments.cancel()
        if self._endpoints is not None:
            self._endpoints.cancel()
        self._leave_slot(aborted=aborted)

    def resume(self, streams: Streams) -> None:
        """Go on in another replica, see `Member`."""
        before, self.streams = self.streams, streams
        self._owner.on_moved(self, before)
        streams.take_over(self, self._feed, before)

    def give_up(self, status: int) -> None:
        """End with the error of a status, see `Member`."""
        self.fail(self.streams.error_of_status(status, self.budget_ns))

    def sweep(self, now_s: float, idle_timeout_s: float, request_timeout_s: float) -> None:
        """Enforce the timeouts, see `Peer`."""
        session = self.session
        if self.lane is not None:
            self.lane.update(self)
        # A client may wait for results of an engine that is gone: that is no silence.
        if session.activity != self._activity or self._feed.resuming:
            self._activity, self._active_s = session.activity, now_s
        state, silent_s = session.state, now_s - self._active_s
        if state is STARTING:
            if silent_s > request_timeout_s:
                self.end(IDLE, f"No start came for {silent_s:.0f} s.")
        elif state is FLOWING and not self.full and silent_s > min(idle_timeout_s, session.idle_s or idle_timeout_s):
            self.end(IDLE, f"No samples came for {silent_s:.0f} s; open another stream.")

    def _execute(self, actions: Actions) -> None:
        for action in actions:
            if type(action) is PushChunk:
                self._push(action)
            elif type(action) is Send and self._endpoints is None:
                self._send(action.payload, action.binary)
            elif type(action) is SetBudget:
                self._set_budget(int(action.latency_ms * 1e6))
            elif type(action) is Restore:
                self._feed.restore(action.state)
            elif self._endpoints is not None and (type(action) is Redecode or self._endpoints.busy):
                if not self.over:
                    self._endpoints.add(action)
            else:
                self._execute_one(action)

    def _push(self, chunk: PushChunk) -> None:
        owner = self._owner
        arrival_ns = owner.arrival_ns
        self.full = not self._feed.put(chunk, arrival_ns, arrival_ns + self.budget_ns)
        owner.pushed += 1
        usage = owner.usage
        if usage.unusual or not owner.pushed % SAMPLED:
            usage.add_chunks(1 if usage.unusual else SAMPLED)

    def _execute_one(self, action: Action) -> None:
        """Execute an action in the order of the stream."""
        if type(action) is Send:
            self._send(action.payload, action.binary)
        elif type(action) is Close:
            self.end(action.code, action.reason, aborted=action.code != CloseCode.NORMAL_CLOSURE)
        elif type(action) is BeginSegment:
            assert self._segments is not None, action
            if not self.over:
                self._segments.begin(action, self.streams.now_ns())
        else:
            assert type(action) is Redecode, action
            # There is no beam here: the greedy text stays.
            self._execute(action.then(None))

    def _set_budget(self, budget_ns: int) -> None:
        if budget_ns < self.budget_ns:
            self.streams.admit(budget_ns, newcomers=0)
        self.budget_ns = budget_ns

    def _on_result(self, status: int, output: Array, last: bool) -> None:
        if self.lane is not None:
            self.lane.leave(self)
        if status != OK:
            self.fail(self.streams.error_of_status(status, self.budget_ns))
            return
        try:
            self._execute(self._receive_result(output, last))
        except RequestError as error:
            self.fail(error)
        if self._feed.wanted is not None and (state := self._feed.take_state()) is not None:
            self._execute(self._take_state(state))
        if self.session.state is SETTLING:
            # The segments that are under way need no slot.
            self._leave_slot(aborted=False)

    def _on_lost(self, status: int) -> None:
        if self.lane is not None:
            self.lane.leave(self)
        self.streams.wait_for_engine(self, self._feed, status)

    def _on_segment_ended(self) -> None:
        self._execute(self.session.segment_ended())

    def _send(self, payload: bytes, binary: bool) -> None:
        if not self.over:
            self._owner.send(self, payload, binary)

    def _send_text(self, payload: bytes) -> None:
        self._send(payload, False)

    def _on_room(self) -> None:
        self.full = False
        self._owner.on_room(self)

    def _leave_slot(self, *, aborted: bool) -> None:
        self._feed.leave()
        self.streams.left(self, aborted=aborted)


def _no_actions(state: bytes) -> Actions:
    return ()
