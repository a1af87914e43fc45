"""What a front-end knows of one served model: how to put a chunk in, and what to say when its result comes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from penstock.core.application import Application, Reply, reply_of
from penstock.core.bundle import Manifest
from penstock.core.errors import ComputeFailed, Overloaded, RequestError, TooLate
from penstock.core.spec import Array
from penstock.serve.connection import refused
from penstock.serve.frontend import Done, Frontend, Ticket
from penstock.serve.heard import Heard
from penstock.serve.preparing import Preparing
from penstock.serve.sequences import Finished, Sequences
from penstock.serve.slots import (
    BROKEN,
    ENGINE_LOST,
    EXPIRED,
    FAILED,
    INVALID,
    OFFERED,
    OK,
    ONE_ENGINE_LOST,
    REFUSED,
    STREAMS_OPEN,
    TOO_LATE,
    SlotTable,
)
from penstock.serve.spread import SpreadRequests, SpreadStreams
from penstock.serve.streams import Streams
from penstock.serve.wire import serialised

# Where a request may have come longer ago than this, the kernel is asked.
VAGUE_NS = 5_000_000
# An engine that was lost is back after about this time: what torch takes to import.
RESTART_S = 3.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replica:
    """A model as one engine serves it.

    Args:
        engine: Which engine.
        device: Where that runs networks.
        frontend: Puts chunks in and takes results out.
        table: For the statistics.
        streams: The live streams there; None where the model is not live.
    """

    engine: int
    device: str
    frontend: Frontend
    table: SlotTable
    streams: Streams | None


@final
class Served:
    """One model behind the routes.

    Args:
        name: What requests call it.
        version: Of the model directory; `"1"` where there is none.
        application: What it is.
        manifest: Of the bundle that is served.
        replica: The first engine's.
        several: Whether there are more engines.
        budget_ns: The latency budget of a request that names none.
        idle_ns: For so long nothing may come of a sequence.
        arrived: Told of each request that was read, and when; gives the earliest moment at which it can have come.
        now_ns: That clock.
        preparing: Makes chunks of bodies where the application prepares its inputs; None where it does not.

    Attributes:
        replicas: Those that take something in; at the end the last one that did.
        frontend: Takes requests: of the only engine there can be, or of all, and then chooses.
        counts: Of this front-end's requests, by what became of them.
        most_rows: The most rows that one request may have.
        engine_lost: Whether no engine is left, and a new table comes with the next one.
        streams: Its live streams; None where it is not live.
        sequences: Those of them whose chunks are requests; None where it is not live.
    """

    def __init__(
        self,
        *,
        name: str,
        version: str,
        application: Application,
        manifest: Manifest,
        replica: Replica,
        several: bool,
        budget_ns: int,
        idle_ns: int,
        arrived: Callable[[int], int],
        now_ns: Callable[[], int],
        preparing: Preparing | None = None,
    ) -> None:
        self.name = name
        self.preparing = preparing
        self.version = version
        self.application = application
        self.manifest = manifest
        self.budget_ns = budget_ns
        self.reply: Reply = reply_of(application)
        self.engine_lost = False
        self._refused: Overloaded | None = None
        self._refusal = b""
        self._shape = application.output.shape
        self._arrived = arrived
        self._now_ns = now_ns
        # Of each replica; what chooses looks at these.
        self._frontends: list[Frontend] = []
        self._streams: list[Streams] = []
        self._use((replica,))
        self.frontend = SpreadRequests(self._frontends, budget_ns) if several else replica.frontend
        self.streams = replica.streams
        if several and replica.streams is not None:
            self.streams = SpreadStreams(self._streams)
        self.sequences = None if self.streams is None else Sequences(self.streams, idle_ns=idle_ns)

    def join(self, replica: Replica) -> None:
        """Another engine serves it too."""
        assert isinstance(self.frontend, SpreadRequests), self.name
        self._use(tuple(sorted((*self.replicas, replica), key=lambda each: each.engine)))

    def part(self, replica: Replica) -> bool:
        """Put nothing more into a replica, if there is another one; gives whether there is."""
        left = tuple(each for each in self.replicas if each is not replica)
        if left:
            self._use(left)
        return bool(left)

    def refusal(self, heard: Heard | None) -> bytes | None:
        """The whole answer to a request with the usual budget, where one that had no less time was just refused.

        It is counted as refused. Under overload most requests are, and what that takes is taken from those that could
        be answered.
        """
        now_ns, standing = self._now_ns(), self.frontend.standing
        # A batch that is due now may make room: with its results, no refusal stands any more.
        left_ns = self._arrived(now_ns) + self.budget_ns - now_ns
        error = standing(now_ns, left_ns)
        if error is not None and heard is not None:
            # As late as can be: only for those to whom it matters is the kernel asked.
            error = standing(now_ns, max(left_ns, self.budget_ns - heard()))
        if error is None:
            return None
        if error is not self._refused:
            self._refused, self._refusal = error, serialised(refused(error), None, close=False)
        self.counts[OFFERED] += 1
        self.counts[REFUSED] += 1
        return self._refusal

    def put(
        self,
        chunk: Array | bytes,
        done: Done,
        budget_ns: int | None = None,
        background: bool = False,
        heard: Heard | None = None,
        frontend: Frontend | None = None,
        alone: bool = True,
        arrival_ns: int | None = None,
    ) -> Ticket:
        """Put in one chunk; `done` is called as `penstock.serve.frontend.Ticket` says, `heard` for how long it is here.

        Where `frontend` is given, it is put in there; unless `alone`, it is a row of a larger request. `arrival_ns` is
        when it came, where that is known already.

        Raises:
            RequestError: It is refused.
        """
        self.refuse_lost()
        if arrival_ns is None:
            arrival_ns = self.arrival_ns(heard)
        # Once more, since a batch may have been run meanwhile.
        now_ns = self._now_ns()
        return (frontend or self.frontend).submit(
            chunk,
            done=done,
            arrival_ns=arrival_ns,
            budget_ns=budget_ns,
            now_ns=now_ns,
            background=background,
            alone=alone,
        )

    @property
    def is_preparing(self) -> bool:
        """Whether there are bodies that will be put in when they are prepared."""
        return self.preparing is not None and self.preparing.waiting > 0

    def arrival_ns(self, heard: Heard | None) -> int:
        """When the request came that was just read; `heard` is asked for how long it is here."""
        read_ns = self._now_ns()
        arrival_ns = self._arrived(read_ns)
        if heard is not None and read_ns - arrival_ns > VAGUE_NS:
            arrival_ns = max(arrival_ns, read_ns - heard())
        return arrival_ns

    def ask_all(
        self,
        chunks: Array,
        finished: Finished,
        budget_ns: int | None,
        background: bool = False,
        heard: Heard | None = None,
    ) -> list[Ticket]:
        """Put in several chunks `[n, ...]` that are answered together, `[n, ...]`, or not at all.

        Raises:
            RequestError: They are refused.
        """
        frontend = self.frontend
        if isinstance(frontend, SpreadRequests):
            now_ns = self._now_ns()
            left_ns = self._arrived(now_ns) + (budget_ns or self.budget_ns) - now_ns
            frontend = frontend.chosen(left_ns, budget_ns, rows=len(chunks), background=background)
        outputs = np.empty((len(chunks), *self._shape), self.application.output.numpy_dtype)
        left, failure = len(chunks), OK
        tickets: list[Ticket] = []

        def finish_one(index: int, status: int, output: Array) -> None:
            nonlocal left, failure
            left -= 1
            if status == OK:
                outputs[index] = output.reshape(self._shape)
            else:
                failure = failure or status
            if left == 0:
                finished(self.why(failure, budget_ns) if failure != OK else outputs)

        try:
            for index, chunk in enumerate(chunks):

                def done(status: int, output: Array, last: bool, index: int = index) -> None:
                    finish_one(index, status, output)

                tickets.append(self.put(chunk, done, budget_ns, background, heard, frontend, len(chunks) == 1))
        except RequestError:
            self.cancel(tickets)
            raise
        return tickets

    def cancel(self, tickets: list[Ticket]) -> None:
        """The client is gone: none of these needs to run."""
        for ticket in tickets:
            ticket.frontend.cancel(ticket)

    def lose(self, replica: Replica) -> None:
        """An engine is gone: whoever waits for it is told, and nobody else is taken in there."""
        self.engine_lost = not self.part(replica)
        replica.frontend.fail(ENGINE_LOST if self.engine_lost else ONE_ENGINE_LOST)
        if not self.engine_lost:
            # What was counted there would be missing in the sum.
            for column, count in enumerate(replica.frontend.counts):
                self.counts[column] += count if column != STREAMS_OPEN else 0

    def refuse_lost(self) -> None:
        """Say that nothing can be put in, where that is so.

        Raises:
            Overloaded: The engine is gone.
        """
        if self.engine_lost:
            raise Overloaded("The engine stopped and is being started again; come back later.", RESTART_S)

    def total(self, column: int) -> int:
        """What all front-ends counted."""
        return sum(int(replica.table.counts[:, column].sum()) for replica in self.replicas)

    def _use(self, replicas: tuple[Replica, ...]) -> None:
        self.replicas = replicas
        self._frontends[:] = [replica.frontend for replica in replicas]
        self._streams[:] = [replica.streams for replica in replicas if replica.streams is not None]
        self.counts = replicas[0].frontend.counts
        self.most_rows = max(1, min(replica.table.layout.slots_each for replica in replicas) // 4)

    def count_refusal(self, error: RequestError) -> None:
        """Count a request that got no result by what was the matter."""
        self.counts[column_of(error)] += 1

    def why(self, status: int, budget_ns: int | None) -> RequestError:
        """The refusal that a result's status means."""
        return refusal_of(status, self.budget_ns if budget_ns is None else budget_ns)


def refusal_of(status: int, budget_ns: int) -> RequestError:
    """The refusal that the status of a result means which was asked for within a budget."""
    if status == EXPIRED:
        return TooLate(f"No answer was possible within {budget_ns / 1e6:g} ms; come back later.", 1.0)
    if status == ENGINE_LOST:
        return Overloaded("The engine stopped before it answered and is being started again.", RESTART_S)
    if status == ONE_ENGINE_LOST:
        return Overloaded("The engine that it was on stopped; send it again.", 1.0)
    if status == FAILED:
        return ComputeFailed("The application's network failed on this input; the server's log says how.")
    return ComputeFailed("The application's network answered with NaN or infinity; this input has no answer.")


def column_of(error: RequestError) -> int:
    """As what a request that got no result is counted, by what was the matter."""
    if isinstance(error, TooLate):
        return TOO_LATE
    if error.status in (503, 504):
        return REFUSED
    return BROKEN if error.status >= 500 else INVALID
