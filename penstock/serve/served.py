"""What the front-end knows of one served application: how to take a chunk in, and what to say when its result comes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from penstock.core.application import Application, Reply, reply_of
from penstock.core.bundle import Manifest
from penstock.core.errors import ComputeFailed, RequestError, TooLate
from penstock.core.spec import Array
from penstock.serve.frontend import Frontend, Ticket
from penstock.serve.slots import EXPIRED, FAILED, OK, SlotTable

Finished = Callable[[Array | RequestError], None]


@dataclass(slots=True)
class Counts:
    """What this front-end counted itself, cumulative; the engine's own counts are in the table."""

    answered: int = 0
    refused: int = 0
    expired: int = 0
    failed: int = 0
    invalid: int = 0


@final
class Served:
    """One application behind the routes.

    Args:
        application: What it is.
        manifest: Of the bundle that is served.
        frontend: Puts chunks in and takes results out.
        table: For the statistics.
        budget_ns: The latency budget of a request that names none.
        arrival_ns: When what is being read now came, on the engine's clock.
    """

    def __init__(
        self,
        application: Application,
        manifest: Manifest,
        frontend: Frontend,
        table: SlotTable,
        *,
        budget_ns: int,
        arrival_ns: Callable[[], int],
        now_ns: Callable[[], int],
    ) -> None:
        self.application = application
        self.manifest = manifest
        self.frontend = frontend
        self.table = table
        self.budget_ns = budget_ns
        self.reply: Reply = reply_of(application)
        self.counts = Counts()
        self._arrival_ns = arrival_ns
        self._now_ns = now_ns

    def ask(self, chunk: Array | bytes, finished: Finished, budget_ns: int | None) -> Ticket:
        """Put in one chunk; `finished` gets its output, valid during the call only, or why there is none.

        Raises:
            RequestError: It is refused.
        """

        def done(status: int, output: Array, last: bool) -> None:
            if status == OK:
                finished(output.reshape(self.application.output.shape))
            else:
                finished(self._why(status, budget_ns or self.budget_ns))

        return self.frontend.submit(
            chunk, done=done, arrival_ns=self._arrival_ns(), now_ns=self._now_ns(), budget_ns=budget_ns
        )

    def ask_all(self, chunks: Array, finished: Finished, budget_ns: int | None) -> list[Ticket]:
        """Put in several chunks `[n, ...]` that are answered together, `[n, ...]`, or not at all.

        Raises:
            RequestError: They are refused.
        """
        outputs = np.empty((len(chunks), *self.application.output.shape), self.application.output.numpy_dtype)
        left, failure = len(chunks), None
        tickets: list[Ticket] = []

        def finish_one(index: int, result: Array | RequestError) -> None:
            nonlocal left, failure
            left -= 1
            if isinstance(result, RequestError):
                failure = failure or result
            else:
                outputs[index] = result
            if left == 0:
                finished(failure or outputs)

        try:
            for index, chunk in enumerate(chunks):
                tickets.append(self.ask(chunk, lambda result, index=index: finish_one(index, result), budget_ns))
        except RequestError:
            self.cancel(tickets)
            raise
        return tickets

    def cancel(self, tickets: list[Ticket]) -> None:
        """The client is gone: none of these needs to run."""
        for ticket in tickets:
            self.frontend.cancel(ticket)

    def _why(self, status: int, budget_ns: int) -> RequestError:
        if status == EXPIRED:
            return TooLate(f"No answer was possible within {budget_ns / 1e6:g} ms; come back later.", 1.0)
        if status == FAILED:
            return ComputeFailed("The application's network failed on this input; the server's log says how.")
        return ComputeFailed("The application's network answered with NaN or infinity; this input has no answer.")
