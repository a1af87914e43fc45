"""Bodies decoded and raw arrays prepared in threads beside a front-end's loop, which a large picture would hold up.

Pillow and ONNX Runtime both let go of the interpreter's lock while they work.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from penstock.core.application import Decode
from penstock.core.errors import ComputeFailed, Overloaded, RequestError, TooLate
from penstock.core.spec import Array

log = logging.getLogger(__name__)

# Of each model in each front-end: one large picture shall not hold up all small ones, nor many fill the memory.
THREADS = 2
# That may wait or be worked on, whatever was measured.
MOST_WAITING = 64
# How much of what is known of the usual time is learned from one.
FOLLOW = 0.1

# `done(chunk, own_ns)`: one chunk or why there is none, and how long was worked on it.
Done = Callable[[Array | RequestError, int], None]


@dataclass(slots=True, eq=False)
class Job:
    """A body that is to become a chunk.

    Args:
        body: Of a request.
        content_type: That it came with.
        arrival_ns: When it came.
        budget_ns: For so long it may wait.
        done: Called in the loop; None once the client is gone.
    """

    body: bytes
    content_type: str
    arrival_ns: int
    budget_ns: int
    done: Done | None

    def cancel(self) -> None:
        """The client is gone: what has not begun is not done."""
        self.done = None


@final
class Preparing:
    """Of one model in one front-end.

    Args:
        name: The model's, for the log.
        decode: The application's; bytes to one raw array.
        prepare: Makes one chunk of a raw array.
        now_ns: The clock of arrivals.

    Attributes:
        waiting: How many are not done.
    """

    def __init__(self, name: str, decode: Decode, prepare: Callable[[Array], Array], now_ns: Callable[[], int]) -> None:
        self._name = name
        self._decode = decode
        self._prepare = prepare
        self._now_ns = now_ns
        self._pool = ThreadPoolExecutor(THREADS, "prepare")
        self._usual_ns = 0.0
        self.waiting = 0

    def begin(self, job: Job) -> None:
        """Make a chunk of a body; its `done` is called from the loop that this is called in.

        Raises:
            Overloaded: It would wait for longer than its budget.
        """
        rounds = max(0, self.waiting - THREADS + 1) / THREADS
        wait_ns = rounds * self._usual_ns
        if wait_ns > job.budget_ns or self.waiting >= MOST_WAITING:
            raise Overloaded(
                f"{self.waiting} others are prepared before, in about {wait_ns / 1e6:,.0f} ms; come back later.",
                max(0.1, wait_ns / 1e9),
            )
        self.waiting += 1
        self._pool.submit(self._work, job, asyncio.get_running_loop())

    def close(self) -> None:
        """Begin no more; what was begun is done."""
        self._pool.shutdown(wait=False)

    def _work(self, job: Job, loop: asyncio.AbstractEventLoop) -> None:
        start_ns = self._now_ns()
        try:
            found = self._made(job, start_ns)
        except RequestError as error:
            found = error
        except Exception:
            log.exception("the decode of %r raised; that request alone fails", self._name)
            found = ComputeFailed("The application's decode failed on this body; the server's log says how.")
        # Nobody waits any more where the loop is closed.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._finished, job, found, self._now_ns() - start_ns)

    def _made(self, job: Job, start_ns: int) -> Array | RequestError:
        if job.done is None or start_ns - job.arrival_ns > job.budget_ns:
            return TooLate(f"It was not prepared within {job.budget_ns / 1e6:g} ms; come back later.")
        return self._prepare(self._decode(job.body, job.content_type))

    def _finished(self, job: Job, found: Array | RequestError, own_ns: int) -> None:
        self.waiting -= 1
        if not isinstance(found, TooLate):
            self._usual_ns += (own_ns - self._usual_ns) * (FOLLOW if self._usual_ns else 1.0)
        if job.done is not None:
            job.done(found, own_ns)
