"""A process's work on its event loop: a turn after every poll in which something came.

Where engine and front-end share a process, a turn runs one batch and answers it. The loop then reads every socket that
became readable meanwhile, and what came is the next batch: no timers, no threads, no fixed wait. In a process of its
own, an engine's turn runs one batch, and a front-end's hands out what the engine has finished.

A poll that finds a thousand readable sockets would keep those that it read first waiting for those that it reads last.
So a turn is also taken in the middle of a poll, once reading has gone on for long, and it may run several batches: as
long as was read.
"""

from collections.abc import Callable
from typing import final

# How far one turn moves what is known of the turns lately.
FOLLOW = 0.1


@final
class Turns:
    """Takes a turn after each poll, as long as there is work.

    Args:
        work: What a turn does; gives how much there was, 0 when the loop may rest.
        call_soon: The event loop's: calls a function after the next poll.
        clock_ns: The clock that deadlines are on.
        longest_read_ns: How long a poll may go on before a turn is taken in its middle.
    """

    def __init__(
        self,
        work: Callable[[], int],
        *,
        call_soon: Callable[[Callable[[], None]], object],
        clock_ns: Callable[[], int],
        longest_read_ns: int = 1 << 62,
    ) -> None:
        self._work = work
        self._call_soon = call_soon
        self._clock_ns = clock_ns
        self.longest_read_ns = longest_read_ns
        self._due = self._turning = False
        # When the poll began that is being read, the one before it, and when reading was begun or taken up again.
        self._began_ns: int | None = None
        self._before_ns: int | None = None
        self._reading_ns = 0
        # How long was read and how long was worked lately.
        self._read_ns = self._worked_ns = 0.0

    @property
    def reading_share(self) -> float:
        """What share of the time reading took lately, of the time in which there was work."""
        return self._read_ns / (self._read_ns + self._worked_ns + 1)

    def wake(self) -> None:
        """Something is new: take a turn after this poll."""
        if not self._due:
            self._due = True
            if self._began_ns is None:
                self._began_ns = self._reading_ns = self._clock_ns()
            self._call_soon(self._turn)

    def arrived(self, now_ns: int) -> int:
        """A request was read, and another turn may be due before anything is done about it.

        Returns:
            The earliest moment at which it can have come. What this poll found readable may have come right after the
            poll before looked, and its budget is counted from there: a deadline that is kept by this count is kept for
            the client.
        """
        if self._due and not self._turning and now_ns - self._reading_ns > self.longest_read_ns:
            self._take(self.longest_read_ns)
        if self._before_ns is not None:
            return self._before_ns
        return now_ns if self._began_ns is None else self._began_ns

    def _turn(self) -> None:
        # First, so that a turn that fails, which the loop logs, does not keep the next one from being taken.
        self._due = False
        began_ns, self._began_ns, self._before_ns = self._began_ns, None, None
        if not self._take():
            return
        self._before_ns, self._began_ns = began_ns, self._reading_ns
        # One more turn follows always: it finds what is left, or that the loop is idle again.
        self.wake()

    def _take(self, longest_ns: int = 0) -> int:
        self._turning = True
        start_ns = now_ns = self._clock_ns()
        done = 0
        try:
            while (more := self._work()) > 0:
                done += more
                now_ns = self._clock_ns()
                if now_ns - start_ns >= longest_ns:
                    break
        finally:
            self._turning = False
            self._read_ns += FOLLOW * (start_ns - self._reading_ns - self._read_ns)
            self._worked_ns += FOLLOW * (now_ns - start_ns - self._worked_ns)
            self._reading_ns = self._clock_ns()
        return done
