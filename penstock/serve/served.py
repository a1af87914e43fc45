"""What a front-end knows of one served model: how to put a chunk in, and what to say when its result comes."""

from collections.abc import Callable
from typing import final

import numpy as np

from penstock.core.application import Application, Reply, reply_of
from penstock.core.bundle import Manifest
from penstock.core.errors import ComputeFailed, Overloaded, RequestError, TooLate
from penstock.core.spec import Array
from penstock.serve.connection import refused
from penstock.serve.frontend import Done, Frontend, Ticket
from penstock.serve.heard import Heard
from penstock.serve.sequences import Finished, Sequences
from penstock.serve.slots import (
    BROKEN,
    ENGINE_LOST,
    EXPIRED,
    FAILED,
    INVALID,
    OFFERED,
    OK,
    REFUSED,
    TOO_LATE,
    SlotTable,
)
from penstock.serve.streams import Streams
from penstock.serve.wire import serialised

# Where a request may have come longer ago than this, the kernel is asked.
VAGUE_NS = 5_000_000
# An engine that was lost is back after about this time: what torch takes to import.
RESTART_S = 3.0


@final
class Served:
    """One model behind the routes.

    Args:
        name: What requests call it.
        version: Of the model directory; `"1"` where there is none.
        application: What it is.
        manifest: Of the bundle that is served.
        frontend: Puts chunks in and takes results out.
        table: For the statistics.
        budget_ns: The latency budget of a request that names none.
        idle_ns: For so long nothing may come of a sequence.
        arrived: Told of each request that was read, and when; gives the earliest moment at which it can have come.
        now_ns: That clock.

    Attributes:
        counts: Of this front-end's requests, by what became of them.
        engine_lost: Whether its engine is gone, and a new table comes with the next one.
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
        frontend: Frontend,
        table: SlotTable,
        budget_ns: int,
        idle_ns: int,
        arrived: Callable[[int], int],
        now_ns: Callable[[], int],
    ) -> None:
        self.name = name
        self.version = version
        self.application = application
        self.manifest = manifest
        self.frontend = frontend
        self.table = table
        self.budget_ns = budget_ns
        self.reply: Reply = reply_of(application)
        self.counts = frontend.counts
        self.engine_lost = False
        self._refused: Overloaded | None = None
        self._refusal = b""
        self._shape = application.output.shape
        self._arrived = arrived
        self._now_ns = now_ns
        self.streams: Streams | None = None
        self.sequences: Sequences | None = None
        if application.live is not None:
            self.streams = Streams(
                name=name,
                application=application,
                frontend=frontend,
                table=table,
                budget_ns=budget_ns,
                arrived=arrived,
                now_ns=now_ns,
                why=self.why,
            )
            self.sequences = Sequences(self.streams, idle_ns=idle_ns)

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
    ) -> Ticket:
        """Put in one chunk; `done` is called as `penstock.serve.frontend.Ticket` says, `heard` for how long it is here.

        Raises:
            RequestError: It is refused.
        """
        self.refuse_lost()
        read_ns = self._now_ns()
        arrival_ns = self._arrived(read_ns)
        if heard is not None and read_ns - arrival_ns > VAGUE_NS:
            arrival_ns = max(arrival_ns, read_ns - heard())
        # Once more, since a batch may have been run meanwhile.
        now_ns = self._now_ns()
        return self.frontend.submit(
            chunk, done=done, arrival_ns=arrival_ns, budget_ns=budget_ns, now_ns=now_ns, background=background
        )

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

                tickets.append(self.put(chunk, done, budget_ns, background, heard))
        except RequestError:
            self.cancel(tickets)
            raise
        return tickets

    def cancel(self, tickets: list[Ticket]) -> None:
        """The client is gone: none of these needs to run."""
        for ticket in tickets:
            self.frontend.cancel(ticket)

    def lose_engine(self) -> None:
        """The engine is gone: whoever waits is told, and nobody else is taken in."""
        self.engine_lost = True
        self.frontend.fail(ENGINE_LOST)

    def refuse_lost(self) -> None:
        """Say that nothing can be put in, where that is so.

        Raises:
            Overloaded: The engine is gone.
        """
        if self.engine_lost:
            raise Overloaded("The engine stopped and is being started again; come back later.", RESTART_S)

    @property
    def most_rows(self) -> int:
        """The most rows that one request may have."""
        return max(1, self.table.layout.slots_each // 4)

    def total(self, column: int) -> int:
        """What all front-ends counted."""
        return int(self.table.counts[:, column].sum())

    def count_refusal(self, error: RequestError) -> None:
        """Count a request that got no result by what was the matter."""
        self.counts[column_of(error)] += 1

    def why(self, status: int, budget_ns: int | None) -> RequestError:
        """The refusal that a result's status means."""
        if status == EXPIRED:
            budget_ms = (self.budget_ns if budget_ns is None else budget_ns) / 1e6
            return TooLate(f"No answer was possible within {budget_ms:g} ms; come back later.", 1.0)
        if status == ENGINE_LOST:
            return Overloaded("The engine stopped before it answered and is being started again.", RESTART_S)
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
