"""Live streams of one model in one front-end: each holds a slot; chunks go in as there is room."""

import secrets
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar, final

from penstock.core.application import Application
from penstock.core.errors import DeadlineImpossible, Overloaded, RequestError
from penstock.core.spec import Array
from penstock.serve.admission import admits, most_streams
from penstock.serve.costs import Costs
from penstock.serve.frontend import Frontend, Ticket
from penstock.serve.protocols.live import Session, State, Terms
from penstock.serve.slots import (
    CHUNKS,
    FIRST,
    LAST,
    OK,
    PATIENT,
    RESULTS,
    STREAMS,
    STREAMS_BROKEN,
    STREAMS_OPEN,
    STREAMS_REFUSED,
    SlotTable,
)

# When to come back where no stream has ended yet, and the limits of what is said once some have.
RETRY_S, SOONEST_S, LATEST_S = 5.0, 1.0, 60.0
# How far one end moves what is known of the time between them.
FOLLOW = 0.2


class Port(Protocol):
    """What carries a stream's messages."""

    def say(self, opcode: int, payload: bytes) -> None:
        """Send a message."""

    def close(self, code: int, reason: str) -> None:
        """End the connection once what was said is sent."""

    def fail(self, error: RequestError) -> None:
        """End the connection because of a refusal."""

    def resume(self) -> None:
        """There is room for more messages."""


class Member(Protocol):
    """One of a model's live streams, whatever carries it."""

    def finish(self, code: int, reason: str) -> None:
        """The server ends it: what came is answered, and nothing more is taken."""


M = TypeVar("M", bound=Member)


@final
class Streams:
    """The live streams of one model.

    Args:
        name: What requests call it.
        application: A live one.
        frontend: Puts chunks in and takes results out.
        table: For the costs and the count of all front-ends' streams.
        budget_ns: The latency budget of a stream that names none.
        arrived: Told of each message that was read, and when; gives the earliest moment at which it can have come.
        now_ns: That clock.
        why: Gives the refusal that a result's status means.
    """

    def __init__(
        self,
        *,
        name: str,
        application: Application,
        frontend: Frontend,
        table: SlotTable,
        budget_ns: int,
        arrived: Callable[[int], int],
        now_ns: Callable[[], int],
        why: Callable[[int, int | None], RequestError],
    ) -> None:
        assert application.live is not None, application
        self.name = name
        self.application = application
        self.live = application.live
        self.frontend = frontend
        self.budget_ns = budget_ns
        self.arrived = arrived
        self.now_ns = now_ns
        self.why = why
        self.counts = frontend.counts
        self._table = table
        self._chunk_s = application.live.chunk_s(application.input)
        self._open: set[Member] = set()
        self._ended_ns = 0
        self._between_s: float | None = None
        # What a front-end that was here before left there.
        self.counts[STREAMS_OPEN] = 0

    def __contains__(self, stream: Member) -> bool:
        return stream in self._open

    @property
    def open_everywhere(self) -> int:
        """The streams that are open, of all front-ends."""
        return int(self._table.counts[:, STREAMS_OPEN].sum())

    @property
    def carried_everywhere(self) -> int:
        """The streams that are open, or that hold a slot still, of all front-ends: an engine that hangs frees none."""
        return max(self.open_everywhere, int(self._table.held.sum()))

    @property
    def least_ns(self) -> int:
        """The shortest time that the network took for one row, in nanoseconds."""
        return int(self._table.least_ns[0])

    @property
    def retry_after_s(self) -> float:
        """When to come back, in seconds: a place is free when somebody leaves it."""
        return min(max(self._between_s or RETRY_S, SOONEST_S), LATEST_S)

    def open(self) -> "Stream":
        """Take a stream of a WebSocket in, see `take_in`."""
        return self.take_in(Stream, self.budget_ns)

    def take_in(self, make: "Callable[[Streams], M]", budget_ns: int) -> M:
        """Take a stream in; it holds a slot until it leaves.

        Args:
            make: Makes it of these streams, once it is admitted; raises `Overloaded` where no slot is free.
            budget_ns: The latency budget that it must be carried under.

        Raises:
            Overloaded: The measured costs cannot carry one more, or no slot is free.
            DeadlineImpossible: Nobody can have that budget.
        """
        try:
            self.admit(budget_ns, newcomers=1)
            stream = make(self)
        except Overloaded as error:
            self.counts[STREAMS_REFUSED] += 1
            raise Overloaded(str(error), self.retry_after_s) from None
        self._open.add(stream)
        self.counts[STREAMS] += 1
        self.counts[STREAMS_OPEN] += 1
        return stream

    def refuse_replacement(self, before: Member, budget_ns: int, *, busy: bool) -> None:
        """See whether a stream could be taken in in the place of another one, before that is ended.

        Args:
            before: The other one, of these streams.
            budget_ns: As for `take_in`.
            busy: Whether the other one's slot is not free as soon as it is ended.

        Raises:
            Overloaded: It could not.
            DeadlineImpossible: Nobody can have that budget.
        """
        try:
            self.admit(budget_ns, newcomers=0)
            if busy and self.frontend.next_slot is None:
                raise Overloaded("All slots are in use; come back later.", self.retry_after_s)
        except Overloaded:
            self.counts[STREAMS_REFUSED] += 1
            raise

    def admit(self, budget_ns: int, *, newcomers: int) -> None:
        """See whether so many more streams can be carried under a budget.

        Raises:
            Overloaded: They cannot.
            DeadlineImpossible: Nobody can have that budget.
        """
        self.refuse_impossible(budget_ns)
        if not self.carries(budget_ns, newcomers):
            count = self.open_everywhere
            # What is here already stays on its engine, whatever others could carry.
            where = "" if newcomers else " on its engine"
            raise Overloaded(
                f"{count:,} streams are open{where}, as many as keep {budget_ns / 1e6:g} ms.", self.retry_after_s
            )

    def carries(self, budget_ns: int, newcomers: int = 1) -> bool:
        """Whether so many more streams can be carried under a budget."""
        streams = self.open_everywhere + newcomers
        # An idle server always tries: only what runs can show that a prediction was too dark.
        return streams <= 1 or admits(streams, self._chunk_s, Costs.published(self._table), budget_ns, self._share)

    def most(self, budget_ns: int) -> float:
        """About how many streams can be carried under a budget, those that are open included."""
        return most_streams(self._chunk_s, Costs.published(self._table), budget_ns, self._share)

    def refuse_impossible(self, budget_ns: int) -> None:
        """See whether anybody can have a budget.

        Raises:
            DeadlineImpossible: Nobody can.
        """
        least_ns = int(self._table.least_ns[0])
        if budget_ns < least_ns:
            raise DeadlineImpossible(
                f"A budget of {budget_ns / 1e6:g} ms is shorter than the network's own time of {least_ns / 1e6:.2f} ms."
            )

    def left(self, stream: Member, *, broken: bool) -> None:
        """A stream is over."""
        if stream not in self._open:
            return
        self._open.discard(stream)
        self.counts[STREAMS_OPEN] -= 1
        self.counts[STREAMS_BROKEN] += broken
        now_ns = self.now_ns()
        if self._ended_ns:
            last_s = (now_ns - self._ended_ns) / 1e9
            before_s = last_s if self._between_s is None else self._between_s
            self._between_s = before_s + FOLLOW * (last_s - before_s)
        self._ended_ns = now_ns

    def finish(self, code: int, reason: str) -> None:
        """End all streams: what came is answered, and what the network holds back is released."""
        for stream in list(self._open):
            stream.finish(code, reason)

    @property
    def _share(self) -> float:
        # The engine's other tables get no more of its time than this one.
        return 1 - min(int(self._table.rivals_share[0]), 500) / 1000


@final
class Stream:
    """One live stream.

    Args:
        streams: Those of its model.

    Attributes:
        backlog: Chunks that came while the slot's ring was full: of one message at most, since no more is to be taken
            while there are any.
        received: Takes a message, see `Session`.

    Raises:
        Overloaded: No slot is free.
    """

    def __init__(self, streams: Streams) -> None:
        frontend, application = streams.frontend, streams.application
        self._streams = streams
        self._frontend = frontend
        self._arrived, self._now_ns = streams.arrived, streams.now_ns
        self._budget_ns = streams.budget_ns
        self._counts = streams.counts
        self._port: Port | None = None
        self._flags = PATIENT | FIRST
        self.backlog: deque[tuple[bytes | memoryview, int, bool]] = deque()
        self.name = secrets.token_hex(8)
        self._session = Session(
            Terms(
                app=streams.name,
                stream=self.name,
                live=streams.live,
                input=application.input,
                output=application.output,
                latency_ms=streams.budget_ns / 1e6,
                window=application.chunks,
            ),
            put=self._put,
            say=self._say,
            close=self._close,
            allow=self._allow,
        )
        self._ticket: Ticket | None = frontend.open(self._done)
        self.received = self._session.received

    @property
    def application(self) -> str:
        """Of what application it is."""
        return self._streams.name

    @property
    def most_bytes(self) -> int:
        """The longest message that may come now."""
        return self._session.most_bytes

    @property
    def heard(self) -> int:
        """How many messages came that say something, see `Session`."""
        return self._session.heard

    @property
    def state(self) -> State:
        """Where it is."""
        return self._session.state

    def attach(self, port: Port) -> None:
        """Say where its messages go."""
        self._port = port

    def finish(self, code: int, reason: str) -> None:
        """The server ends it: as if the client had, but for the close."""
        self._session.finish(code, reason)

    def leave(self, *, broken: bool) -> None:
        """It is over: the slot is free once the engine has let go of it, and nothing more comes."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self.backlog.clear()
            self._frontend.cancel(ticket)
            self._streams.left(self, broken=broken)

    def _put(self, chunk: bytes | memoryview, frames: int, last: bool) -> None:
        if self._ticket is not None and (self.backlog or not self._pushed(chunk, frames, last)):
            self.backlog.append((chunk, frames, last))

    def _pushed(self, chunk: bytes | memoryview, frames: int, last: bool) -> bool:
        """Put a chunk in, or drop it where the stream is over; False where there is no room."""
        # First of all: a batch may be run here, and its results handed out.
        arrival_ns = self._arrived(self._now_ns())
        if self._ticket is None:
            return True
        pushed = self._frontend.push(
            self._ticket,
            chunk,
            deadline_ns=arrival_ns + self._budget_ns,
            arrival_ns=arrival_ns,
            flags=self._flags | LAST if last else self._flags,
            length=frames,
        )
        if pushed:
            self._flags = PATIENT
            self._counts[CHUNKS] += 1
        return pushed

    def _done(self, status: int, output: Array, last: bool) -> None:
        port = self._port
        assert port is not None, self
        if status != OK:
            port.fail(self._streams.why(status, self._budget_ns))
            return
        self._counts[RESULTS] += 1
        try:
            self._session.answer(output, last)
        except RequestError as error:
            port.fail(error)
            return
        backlog = self.backlog
        if backlog:
            while backlog:
                chunk = backlog.popleft()
                if not self._pushed(*chunk):
                    backlog.appendleft(chunk)
                    break
            if not backlog:
                port.resume()

    def _say(self, opcode: int, payload: bytes) -> None:
        if self._port is not None:
            self._port.say(opcode, payload)

    def _close(self, code: int, reason: str) -> None:
        if self._port is not None:
            self._port.close(code, reason)

    def _allow(self, latency_ms: float) -> None:
        budget_ns = int(latency_ms * 1e6)
        if budget_ns < self._budget_ns:
            self._streams.admit(budget_ns, newcomers=0)
        self._budget_ns = budget_ns
