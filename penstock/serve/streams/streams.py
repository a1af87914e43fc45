"""Live streams of one model in one front-end: admission, and the count of those that are open."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, final

from penstock.core.application import Application
from penstock.core.errors import DeadlineImpossible, Overloaded, QuotaExceeded, RequestError
from penstock.core.streams.segments import SegmentFinder
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.frontend.admission import admits, max_streams
from penstock.serve.frontend.beam_process import BeamModel, BeamOutcome
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.streams.quotas import UNKNOWN, StreamClient, StreamQuotas
from penstock.serve.streams.replay_ring import ReplayLimits, ReplayRing
from penstock.serve.streams.resumptions import Resumptions
from penstock.serve.streams.session import Session
from penstock.serve.streams.slot_feed import SlotFeed
from penstock.serve.streams.stream_tickets import StreamTickets
from penstock.serve.table import slots
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import SlotTable

# Retry time before any stream has ended, and its limits afterwards.
RETRY_S, SOONEST_S, LATEST_S = 5.0, 1.0, 60.0
# Weight of the latest interval in the mean interval between ends.
FOLLOW = 0.2
_BEAM_COLUMNS = {
    BeamOutcome.DECODED: slots.BEAM_DECODED,
    BeamOutcome.LATE: slots.BEAM_LATE,
    BeamOutcome.REFUSED: slots.BEAM_REFUSED,
    BeamOutcome.FAILED: slots.BEAM_FAILED,
}


class Member(Protocol):
    """One of a model's live streams, over any protocol."""

    def finish(self, code: int, reason: str) -> None:
        """End it from the server's side: answer the chunks received so far, and accept no more."""

    def resume(self, streams: "Streams") -> None:
        """Go on in another engine, after `Streams.wait_for_engine`."""

    def give_up(self, status: int) -> None:
        """End it with the error of a status: no engine goes on with it."""


M = TypeVar("M", bound=Member)


@final
@dataclass(kw_only=True, eq=False)
class Streams:
    """The live streams of one model.

    Args:
        name: Name of the application in requests.
        application: A live application.
        writer: Puts chunks in and takes results out.
        table: For the costs and the count of all front-ends' streams.
        budget_ns: Latency budget of a stream that names none.
        batch_loop: Runs the batches, and has the arrival time of the bytes read now.
        now_ns: That clock.
        error_of_status: Makes the error of a result's status.
        quotas: Limits the streams of one client, over all models.
        resumptions: Streams of this model that wait for an engine, of all replicas; None for those of this one alone.
        replay: Limits of replays; None where the death of the engine ends the streams.
        headroom: Share of what can be carried that is kept for the streams of other engines that die.
        beam: Decodes utterances again at their ends; None where the application declares no beam.
        tickets: Their tickets; None where there are none.

    Attributes:
        chunk_s: Duration of a chunk, in seconds.
    """

    name: str
    application: Application
    writer: TableWriter
    table: SlotTable
    budget_ns: int
    batch_loop: BatchLoop
    now_ns: Callable[[], int]
    error_of_status: Callable[[int, int | None], RequestError]
    quotas: StreamQuotas = field(default_factory=StreamQuotas)
    resumptions: Resumptions[Member] | None = None
    replay: ReplayLimits | None = None
    headroom: float = 0.0
    beam: BeamModel | None = None
    tickets: StreamTickets | None = None
    _open: dict[Member, StreamClient] = field(default_factory=dict[Member, StreamClient], init=False)
    _ended_ns: int = field(default=0, init=False)
    _interval_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        assert self.application.live is not None, self.application
        self.live = self.application.live
        self.counts: memoryview[int] | list[int] = self.writer.counts
        self.waiting: Resumptions[Member] = self.resumptions or Resumptions(self.now_ns, 0.0)
        self.chunk_s = self.live.chunk_s(self.application.input_tensor)
        # An earlier front-end process may have left a count there.
        self.counts[slots.STREAMS_OPEN] = 0

    def __contains__(self, stream: Member) -> bool:
        return stream in self._open

    @property
    def open_everywhere(self) -> int:
        """Number of open streams of all front-ends."""
        return int(self.table.counts[:, slots.STREAMS_OPEN].sum())

    @property
    def carried_everywhere(self) -> int:
        """Number of streams of all front-ends that are open or still hold a slot: an engine that hangs frees none."""
        return max(self.open_everywhere, int(self.table.held.sum()))

    @property
    def min_compute_ns(self) -> int:
        """Shortest measured time of the network for one row, in nanoseconds."""
        return int(self.table.min_compute_ns[0])

    @property
    def retry_after_s(self) -> float:
        """Retry time in seconds: the mean interval between ends of streams."""
        return min(max(self._interval_s or RETRY_S, SOONEST_S), LATEST_S)

    def session(
        self, stream: str, chain: str = "", find_segments: SegmentFinder | None = None, client: str | None = None
    ) -> Session:
        """Make the protocol of a stream.

        Args:
            stream: Its name.
            chain: The chain that begins with it; empty for the model alone.
            find_segments: Finds the chain's segments.
            client: Name of the client's API key, to which its tickets are bound; None where it may have none.
        """
        return Session(
            self.application,
            name=chain or self.name,
            stream=stream,
            latency_ms=self.budget_ns / 1e6,
            find_segments=find_segments,
            tickets=None if self.tickets is None or client is None else self.tickets.of_stream(client),
        )

    def ring(self) -> ReplayRing | None:
        """Make the ring of a new stream; None where nothing is kept."""
        if self.replay is None:
            return None
        spec = self.application.input_tensor
        frame_bytes = spec.nbytes // spec.shape[0]
        return ReplayRing.of_signal(
            self.replay, rate_hz=self.live.rate_hz, frame_bytes=frame_bytes, chunk_bytes=spec.nbytes
        )

    def count_utterance(self, outcome: BeamOutcome) -> None:
        """Count what became of an utterance at its end."""
        self.counts[_BEAM_COLUMNS[outcome]] += 1

    def lose(self) -> None:
        """Note that the engine has died: from now on the table counts nothing."""
        self.counts = self.waiting.uncounted

    def wait_for_engine(self, stream: Member, feed: SlotFeed, status: int) -> None:
        """Let another engine go on with a stream whose engine has died, or end the stream.

        Args:
            stream: The stream.
            feed: Its feed.
            status: The status that it ends with.
        """
        column = feed.lose()
        if column is None:
            self.waiting.add(stream, status)
            return
        if column >= 0:
            self.waiting.uncounted[column] += 1
        stream.give_up(slots.LOST_OFTEN if column == slots.LOST_REPEATED else status)

    def take_over(self, stream: Member, feed: SlotFeed, before: "Streams") -> None:
        """Go on with a stream of another replica, whose engine has died; a slot is free."""
        self.waiting.discard(stream)
        self._open[stream] = before._open.pop(stream)
        self.counts[slots.STREAMS_OPEN] += 1
        self.counts[slots.RESUMED] += 1
        feed.resume(self.writer, self.now_ns, self.budget_ns)

    def has_place(self, budget_ns: int) -> bool:
        """True if a stream of another replica can go on here."""
        return self.writer.next_slot is not None and self.has_capacity(budget_ns, resumed=True)

    def admit_stream(self, make: "Callable[[Streams], M]", budget_ns: int, client: StreamClient = UNKNOWN) -> M:
        """Admit a stream; it holds a slot until it leaves.

        Args:
            make: Makes the stream once it is admitted; raises `Overloaded` if no slot is free.
            budget_ns: Its latency budget.
            client: The client whose stream it is.

        Raises:
            QuotaExceeded: The client holds as many as it may.
            Overloaded: The measured costs do not allow one more, or no slot is free.
            DeadlineImpossible: The budget is shorter than the network's own time.
        """
        try:
            self.quotas.admit(client)
        except QuotaExceeded:
            self.counts[slots.STREAMS_REFUSED] += 1
            raise
        try:
            self.admit(budget_ns, newcomers=1)
            stream = make(self)
        except RequestError as error:
            self.quotas.leave(client)
            if not isinstance(error, Overloaded):
                raise
            self.counts[slots.STREAMS_REFUSED] += 1
            raise Overloaded(str(error), self.retry_after_s) from None
        self._open[stream] = client
        self.counts[slots.STREAMS] += 1
        self.counts[slots.STREAMS_OPEN] += 1
        return stream

    def reject_replacement(self, before: Member, budget_ns: int, *, busy: bool) -> None:
        """Check that a stream can replace an open one, before that is ended.

        Args:
            before: The open stream.
            budget_ns: As for `admit_stream`.
            busy: Whether the open stream's slot stays in use when it is ended.

        Raises:
            Overloaded: It cannot.
            DeadlineImpossible: The budget is shorter than the network's own time.
        """
        try:
            self.admit(budget_ns, newcomers=0)
            if busy and self.writer.next_slot is None:
                raise Overloaded("All slots are in use; come back later.", self.retry_after_s)
        except Overloaded:
            self.counts[slots.STREAMS_REFUSED] += 1
            raise

    def admit(self, budget_ns: int, *, newcomers: int) -> None:
        """Check that the costs allow so many more streams under a budget.

        Raises:
            Overloaded: They do not.
            DeadlineImpossible: The budget is shorter than the network's own time.
        """
        self.reject_impossible(budget_ns)
        if not self.has_capacity(budget_ns, newcomers):
            if newcomers and self.waiting.waiting:
                raise waiting_error(self.waiting.waiting, self.retry_after_s)
            count = self.open_everywhere
            # An open stream stays on its engine, even if others have room.
            where = "" if newcomers else " on its engine"
            raise Overloaded(
                f"{count:,} streams are open{where}, as many as keep {budget_ns / 1e6:g} ms.", self.retry_after_s
            )

    def has_capacity(self, budget_ns: int, newcomers: int = 1, *, resumed: bool = False) -> bool:
        """True if the costs allow so many more streams under a budget.

        Args:
            budget_ns: The budget.
            newcomers: Their number.
            resumed: Whether they are streams of another engine, which go before new ones and need no headroom.
        """
        streams = self.open_everywhere + newcomers
        if newcomers and not resumed:
            if self.waiting.waiting:
                return False
            if self.headroom and streams > 1:
                streams = math.ceil(streams / (1 - self.headroom))
        # An idle server always admits: only running batches can correct a prediction that is too high.
        return streams <= 1 or admits(streams, self.chunk_s, Costs.published(self.table), budget_ns, self._share)

    def most(self, budget_ns: int) -> float:
        """Estimated capacity in streams under a budget, with those that are open."""
        return max_streams(self.chunk_s, Costs.published(self.table), budget_ns, self._share)

    def reject_impossible(self, budget_ns: int) -> None:
        """Check that a budget is possible at all.

        Raises:
            DeadlineImpossible: The budget is shorter than the network's own time.
        """
        if budget_ns < self.min_compute_ns:
            raise DeadlineImpossible(
                f"A budget of {budget_ns / 1e6:g} ms is shorter than the network's own time of "
                f"{self.min_compute_ns / 1e6:.2f} ms."
            )

    def left(self, stream: Member, *, aborted: bool) -> None:
        """Remove a stream that is over."""
        self.waiting.discard(stream)
        if stream not in self._open:
            return
        self.quotas.leave(self._open.pop(stream))
        self.counts[slots.STREAMS_OPEN] -= 1
        self.counts[slots.STREAMS_ABORTED] += aborted
        now_ns = self.now_ns()
        if self._ended_ns:
            last_s = (now_ns - self._ended_ns) / 1e9
            before_s = last_s if self._interval_s is None else self._interval_s
            self._interval_s = before_s + FOLLOW * (last_s - before_s)
        self._ended_ns = now_ns

    def finish(self, code: int, reason: str) -> None:
        """End all streams: answer the chunks received so far, and flush the network's delayed outputs."""
        for stream in list(self._open):
            stream.finish(code, reason)

    @property
    def _share(self) -> float:
        # The engine's other tables get no more of its time than this one.
        return 1 - min(int(self.table.other_tables_share[0]), 500) / 1000


def waiting_error(count: int, retry_after_s: float) -> Overloaded:
    """Make the error of a new stream while others wait for an engine."""
    return Overloaded(f"{count:,} streams of an engine that stopped go first; come back later.", retry_after_s)
