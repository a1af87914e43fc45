"""A process's work on its event loop: a turn after every poll in which something came.

Where engine and front-end share a process, a turn runs one batch and answers it. The loop then reads every socket that
became readable meanwhile, and what came is the next batch: no timers, no threads, no fixed wait. In a process of its
own, an engine's turn runs one batch, and a front-end's hands out what the engine has finished.
"""

from collections.abc import Callable
from typing import final


@final
class Turns:
    """Takes a turn after each poll, as long as there is work.

    Args:
        work: What a turn does; gives how much there was, 0 when the loop may rest.
        call_soon: The event loop's: calls a function after the next poll.
        clock_ns: The clock that deadlines are on.
    """

    def __init__(
        self,
        work: Callable[[], int],
        *,
        call_soon: Callable[[Callable[[], None]], object],
        clock_ns: Callable[[], int],
    ) -> None:
        self._work = work
        self._call_soon = call_soon
        self._clock_ns = clock_ns
        self._due = False
        self._blind_since_ns: int | None = None

    def wake(self) -> None:
        """Something is new: take a turn after this poll."""
        if not self._due:
            self._due = True
            self._call_soon(self._turn)

    @property
    def unbroken(self) -> bool:
        """Whether the turn before this one had work too, so that the loop did not rest between them."""
        return self._blind_since_ns is not None

    def arrival_ns(self) -> int:
        """The earliest moment at which what is being read now can have arrived.

        During a turn the sockets are not read. What is found right after it may have come at its very beginning, and
        its budget is counted from there: a deadline kept by this count is kept for the client.
        """
        return self._clock_ns() if self._blind_since_ns is None else self._blind_since_ns

    def _turn(self) -> None:
        # First, so that a turn that fails, which the loop logs, does not keep the next one from being taken.
        self._due = False
        start_ns = self._clock_ns()
        if not self._work():
            self._blind_since_ns = None
            return
        self._blind_since_ns = start_ns
        # One more turn follows always: it finds what is left, or that the loop is idle again.
        self.wake()
