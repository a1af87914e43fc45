"""The loop that runs batches: one iteration after each poll of the event loop that brought something.

In a single process an iteration runs one batch and answers it; the poll after it reads every socket that became
readable meanwhile, and those requests are the next batch. There are no threads and no fixed waits; a batch of live
streams may wait for more of them, see `penstock.serve.engine.batch_hold`. In a process of its own, an engine's
iteration runs one batch and a front-end's hands out finished results.

A poll can find a thousand readable sockets. `run_if_overdue` then runs batches in the middle of the poll, so that the
requests that were read first do not wait for the last. Only the code that reads a socket calls it, before it handles
what it read.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from penstock.serve.fair_turns import FairTurns

log = logging.getLogger(__name__)

# Weight of the newest iteration in the moving averages.
FOLLOW = 0.1
# One in so many requests that are read after one another, within a time, has its arrival asked of the kernel.
SAMPLED, SAMPLED_NS = 16, 500_000
# A poll whose rows are worth a larger batch is read for so many times `max_read_ns`.
GATHERING = 4


@final
@dataclass(eq=False, slots=True)
class BatchLoop:
    """Owner of a process's batches: nothing else runs them.

    Args:
        work: Does one iteration; returns how many rows or results it handled, 0 when the loop may rest.
        call_soon: `call_soon` of the event loop: calls a function after the next poll.
        clock_ns: The clock of deadlines.
        cpu_ns: Processor time of the loop's thread.
        max_read_ns: Reading time after which a batch is overdue.

    Attributes:
        turns: Who has the time of the event loop.
    """

    work: Callable[[], int]
    call_soon: Callable[[Callable[[], None]], object]
    clock_ns: Callable[[], int] = time.monotonic_ns
    cpu_ns: Callable[[], int] = time.thread_time_ns
    max_read_ns: int = 1 << 62
    turns: FairTurns = field(init=False)
    _scheduled: bool = field(init=False, default=False)
    _running: bool = field(init=False, default=False)
    # Start of the poll that is being read, start of the poll before it, and when reading began or was resumed.
    _poll_ns: int | None = field(init=False, default=None)
    _previous_poll_ns: int | None = field(init=False, default=None)
    _reading_ns: int = field(init=False, default=0)
    # Moving averages of the time spent reading and running.
    _read_ns: float = field(init=False, default=0.0)
    _run_ns: float = field(init=False, default=0.0)
    # How long the next batch may wait, and the timer; processor time when the wait began, -1 where none waits.
    _hold_ns: Callable[[], int] | None = field(init=False, default=None)
    _call_later: Callable[[float, Callable[[], None]], object] | None = field(init=False, default=None)
    _held_cpu_ns: int = field(init=False, default=-1)
    # Whether the next batch is worth a longer poll, and how long this one may be read.
    _gathers: Callable[[], bool] | None = field(init=False, default=None)
    _read_limit_ns: int = field(init=False, default=0)
    # The arrival that was asked last, when, and how many requests may still take it for theirs.
    _sample_ns: int = field(init=False, default=0)
    _sampled_at_ns: int = field(init=False, default=0)
    _sample_left: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.turns = FairTurns(self.clock_ns)
        self._read_limit_ns = self.max_read_ns

    @property
    def reading_share(self) -> float:
        """Share of the busy time that reading took lately."""
        return self._read_ns / (self._read_ns + self._run_ns + 1)

    def hold(
        self,
        hold_ns: Callable[[], int],
        gathers: Callable[[], bool],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """Let batches wait for more rows.

        Args:
            hold_ns: Computes how long the next batch may wait, in nanoseconds; 0 where it runs at once.
            gathers: Tells whether the next batch should have more of the rows of a long poll.
            call_later: `call_later` of the event loop.
        """
        self._hold_ns, self._gathers, self._call_later = hold_ns, gathers, call_later

    def wake(self) -> None:
        """Schedule an iteration after this poll."""
        if not self._scheduled:
            self._scheduled = True
            if self._poll_ns is None:
                self._poll_ns = self._reading_ns = self.clock_ns()
            self.call_soon(self._iterate)

    def run_if_overdue(self, now_ns: int) -> bool:
        """Run batches now if this poll has been read for longer than `max_read_ns`, for about as long.

        Returns:
            Whether any were run. Their results have been handed out; one that raised is in the log.
        """
        held = self._held_cpu_ns >= 0
        if not self._scheduled or self._running or held or now_ns - self._reading_ns <= self._read_limit_ns:
            return False
        if self._gathers is not None and self._read_limit_ns == self.max_read_ns and self._gathers():
            self._read_limit_ns = GATHERING * self.max_read_ns
            return False
        self._run(self.max_read_ns)
        return True

    def arrival_ns(self, now_ns: int) -> int:
        """Earliest time at which a request that is read now can have arrived.

        A socket that this poll found readable may have become so right after the previous poll. A deadline counted from
        there is kept for the client as well.
        """
        if self._previous_poll_ns is not None:
            return self._previous_poll_ns
        return now_ns if self._poll_ns is None else self._poll_ns

    def sampled_arrival_ns(self, now_ns: int, age: Callable[[], int]) -> int:
        """Return when a request that is read now arrived: by its age, or as one that was read just before it.

        A poll gives sockets in the order in which they became readable, but for those that became so again since the
        last poll. Asking for each takes a good part of the time of a refusal.

        Args:
            now_ns: The current time.
            age: Age of its bytes, asked of the kernel.
        """
        if self._sample_left and now_ns - self._sampled_at_ns < SAMPLED_NS:
            self._sample_left -= 1
            return self._sample_ns
        self._sample_ns = self.clock_ns() - age()
        self._sampled_at_ns, self._sample_left = now_ns, SAMPLED - 1
        return self._sample_ns

    def _iterate(self) -> None:
        if self._hold_ns is not None and self._call_later is not None and (hold_ns := self._hold_ns()) > 0:
            # What is read meanwhile has just come, and is read at once.
            self._poll_ns = self._previous_poll_ns = None
            self._held_cpu_ns = self.cpu_ns()
            self._call_later(hold_ns / 1e9, self._end_hold)
            return
        self._run_batches()

    def _end_hold(self) -> None:
        # Not at once: a batch of a timer would be followed by the next one without a poll between them.
        self.call_soon(self._run_held)

    def _run_held(self) -> None:
        # Reading took this much of the time of the wait.
        now_ns = self.clock_ns()
        self._reading_ns = now_ns - (self.cpu_ns() - self._held_cpu_ns)
        self._held_cpu_ns = -1
        self._poll_ns = now_ns
        self._run_batches()

    def _run_batches(self) -> None:
        self._scheduled = False
        poll_ns, self._poll_ns, self._previous_poll_ns = self._poll_ns, None, None
        if self._run():
            self._previous_poll_ns, self._poll_ns = poll_ns, self._reading_ns
            # The next iteration runs the remaining batches, or finds that the loop is idle again.
            self.wake()

    def _run(self, min_ns: int = 0) -> int:
        self._running = True
        start_ns = now_ns = self.clock_ns()
        done = 0
        try:
            while (count := self.work()) > 0:
                done += count
                now_ns = self.clock_ns()
                if now_ns - start_ns >= min_ns:
                    break
        except Exception:
            # The top of an iteration: a failure belongs to its batch, never to the request that is being read.
            log.exception("a batch failed")
        finally:
            self._running = False
            self._read_ns += FOLLOW * (start_ns - self._reading_ns - self._read_ns)
            self._run_ns += FOLLOW * (now_ns - start_ns - self._run_ns)
            self._reading_ns = self.clock_ns()
            self._read_limit_ns = self.max_read_ns
        return done
