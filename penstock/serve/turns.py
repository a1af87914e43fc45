"""Engine and front-end on one event loop: a turn after every poll in which something came.

A turn runs one batch and answers it. The loop then reads every socket that became readable meanwhile, and what came is
the next batch: no timers, no threads, no fixed wait.
"""

from collections.abc import Callable
from typing import final

from penstock.serve.engine import Engine
from penstock.serve.frontend import Frontend


@final
class Turns:
    """Takes a turn after each poll, as long as there is work.

    Args:
        engine: Runs the batches.
        frontend_of: Makes the front-end whose results each turn hands out, given what it calls to wake the engine.
        call_soon: The event loop's: calls a function after the next poll.
        clock_ns: The clock that deadlines are on.

    Attributes:
        frontend: The front-end.
    """

    def __init__(
        self,
        engine: Engine,
        frontend_of: Callable[[Callable[[], None]], Frontend],
        *,
        call_soon: Callable[[Callable[[], None]], object],
        clock_ns: Callable[[], int],
    ) -> None:
        self.frontend = frontend_of(self.wake)
        self._engine = engine
        self._call_soon = call_soon
        self._clock_ns = clock_ns
        self._due = False
        self._blind_since_ns: int | None = None
        self._ended_ns = 0
        self._offered = 0

    def wake(self) -> None:
        """Something is new in the table: take a turn after this poll."""
        if not self._due:
            self._due = True
            self._call_soon(self._turn)

    def arrival_ns(self) -> int:
        """The earliest moment at which what is being read now can have arrived.

        During a turn the sockets are not read. What is found right after it may have come at its very beginning, and
        its budget is counted from there: a deadline kept by this count is kept for the client.
        """
        return self._clock_ns() if self._blind_since_ns is None else self._blind_since_ns

    def _turn(self) -> None:
        engine, frontend = self._engine, self.frontend
        # First, so that a turn that fails, which the loop logs, does not keep the next one from being taken.
        self._due = False
        start_ns = self._clock_ns()
        chosen = engine.tick(start_ns)
        ticked_ns = self._clock_ns()
        frontend.collect()
        offered, self._offered = frontend.offered - self._offered, frontend.offered
        answered = chosen.run.size + chosen.expire.size
        if not answered:
            self._blind_since_ns = None
            return
        end_ns = self._clock_ns()
        if self._blind_since_ns is not None and offered:
            reading_ns = (start_ns - self._ended_ns) / offered
            engine.observe_handling(reading_ns + (end_ns - ticked_ns) / answered)
        frontend.refresh()
        self._blind_since_ns, self._ended_ns = start_ns, end_ns
        # One more turn follows always: it finds what is left, or that the loop is idle again.
        self.wake()
