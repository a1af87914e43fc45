"""Threads for a chain's own work on one request: decoding, preparing, functions. None of it blocks the event loop."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from penstock.core.errors import ComputeFailed, Overloaded, RequestError
from penstock.core.machine.priority import lower_priority
from penstock.serve.fair_turns import Usage
from penstock.serve.moving_average import MovingAverage

log = logging.getLogger(__name__)

# For each chain in each front-end.
THREADS = 2
MAX_WAITING = 64
# Weight of the newest call in the moving average of the time.
FOLLOW = 0.1
NO_LIMIT_NS = 1 << 62

# `done(result, own_ns)`: the value or the error, and the time spent on it.
FunctionDone = Callable[[Any, int], None]


@dataclass(slots=True, eq=False)
class FunctionJob:
    """A function to call in a thread.

    Args:
        kind: Key under which times are averaged.
        function: Without arguments.
        done: Called in the event loop; None once nobody waits.
        limit_ns: A longer time counts as this one in the average.
        usage: What the connection took lately for which it is; None where that is not known.

    Attributes:
        begun: Whether the function was called.
        charged_ns: What the connection was charged when the job was submitted.
    """

    kind: object
    function: Callable[[], Any]
    done: FunctionDone | None
    limit_ns: int = NO_LIMIT_NS
    usage: Usage | None = None
    begun: bool = field(init=False, default=False)
    charged_ns: int = field(init=False, default=0)

    def cancel(self) -> None:
        """Skip the job if it has not begun, and drop its result."""
        self.done = None


@final
@dataclass(slots=True, eq=False)
class FunctionPool:
    """Threads of one chain in one front-end.

    Args:
        name: Name of the chain, for the log.
        now_ns: The clock of deadlines.

    Attributes:
        waiting: Number of unfinished jobs.
    """

    name: str
    now_ns: Callable[[], int]
    waiting: int = field(init=False, default=0)
    _usual_ns: dict[object, MovingAverage] = field(init=False, default_factory=dict[object, MovingAverage])
    _pool: ThreadPoolExecutor = field(
        init=False, default_factory=partial(ThreadPoolExecutor, THREADS, "chain", lower_priority)
    )

    def usual_ns(self, kind: object) -> int:
        """Usual time of a job of this kind; 0 before the second, since the first may load what the others use."""
        usual_ns = self._usual_ns.get(kind)
        return 0 if usual_ns is None else int(usual_ns.value)

    def submit(self, job: FunctionJob) -> None:
        """Call a function in a thread, and `done` in the calling event loop.

        Raises:
            Overloaded: Too many jobs wait.
        """
        if self.waiting >= MAX_WAITING:
            usual_ns = max((each.value for each in self._usual_ns.values()), default=0.0) * self.waiting / THREADS
            raise Overloaded(f"{self.waiting} calls wait for a thread; come back later.", max(0.1, usual_ns / 1e9))
        self.waiting += 1
        if job.usage is not None:
            job.charged_ns = job.usage.begin_thread(self.usual_ns(job.kind))
        self._pool.submit(self._work, job, asyncio.get_running_loop())

    def close(self) -> None:
        """Start no further jobs; those that began are finished."""
        self._pool.shutdown(wait=False)

    def _work(self, job: FunctionJob, loop: asyncio.AbstractEventLoop) -> None:
        start_ns = self.now_ns()
        found: Any = None
        try:
            if job.done is not None:
                job.begun = True
                found = job.function()
        except RequestError as error:
            log_cause(self.name, error)
            found = error
        except BaseException:  # sys.exit too: somebody waits for what it gives
            log.exception("a function of %r raised; that request alone fails", self.name)
            found = ComputeFailed(f"A function of {self.name!r} failed on this input; the server's log says how.")
        # The event loop may be closed by now.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._finished, job, found, self.now_ns() - start_ns)

    def _finished(self, job: FunctionJob, found: Any, own_ns: int) -> None:
        self.waiting -= 1
        if job.usage is not None:
            job.usage.end_thread(own_ns, job.charged_ns)
        if job.begun and not isinstance(found, RequestError):
            self._observe(job.kind, min(own_ns, job.limit_ns))
        if job.done is not None:
            job.done(found, own_ns)

    def _observe(self, kind: object, own_ns: int) -> None:
        if kind not in self._usual_ns:
            self._usual_ns[kind] = MovingAverage(FOLLOW)
            return
        self._usual_ns[kind].add(own_ns)


def log_cause(name: str, error: RequestError) -> None:
    """Log the exception of an application's own code; a client gets one sentence only."""
    if error.__cause__ is not None:
        log.error("%s: %s", name, error, exc_info=error.__cause__)
