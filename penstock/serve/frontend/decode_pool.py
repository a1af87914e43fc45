"""Threads that decode bodies and prepare raw arrays, so that a large picture does not block the event loop.

Pillow and ONNX Runtime both release the interpreter's lock while they work.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from penstock.core.application import Decode
from penstock.core.decode import decoded_pixels, text_fault
from penstock.core.errors import ComputeFailed, Overloaded, RequestError, TooLate
from penstock.core.machine.priority import lower_priority
from penstock.core.spec import Array
from penstock.serve.fair_turns import Usage
from penstock.serve.moving_average import MovingAverage

log = logging.getLogger(__name__)

# For each model in each front-end: one large picture does not block all small ones, and memory stays bounded.
THREADS = 2
# Maximum jobs that wait or run.
MAX_WAITING = 64
# In the event loop, a progressive picture of four million pixels would hold up all other requests for 200 ms.
MAX_QUICK_PIXELS, MAX_QUICK_BYTES = 1 << 18, 1 << 19
# Of a small picture: bytes a pixel, and others.
MAX_PIXEL_BYTES, MAX_OTHER_BYTES = 4, 8_192
# Weight of the newest job in the moving average of the time.
FOLLOW = 0.1

# `done(found, own_ns)`: the chunk, what `read` gave or the error, and the time spent on it.
DecodeDone = Callable[[Any, int], None]


@dataclass(slots=True, eq=False)
class DecodeJob:
    """A body to make a chunk from.

    Args:
        body: The body.
        content_type: Its media type.
        arrival_ns: Arrival time of the request.
        budget_ns: Maximum time that it may wait.
        done: Called in the event loop; None once the client is gone.
        usage: What its connection took lately; None where that is not known.
        read: Makes what is submitted instead of the pool's `decode` and `prepare`; None for these.

    Attributes:
        raw_shape: Shape of the decoded array, once there is one.
        charged_ns: What the connection was charged when the job was submitted.
    """

    body: bytes
    content_type: str
    arrival_ns: int
    budget_ns: int
    done: DecodeDone | None
    usage: Usage | None = None
    read: Callable[[], Any] | None = None
    raw_shape: tuple[int, ...] = field(init=False, default=())
    charged_ns: int = field(init=False, default=0)

    def cancel(self) -> None:
        """Skip the job if it has not begun."""
        self.done = None


@final
@dataclass(slots=True, eq=False)
class DecodePool:
    """Decoding threads of one model in one front-end.

    Args:
        name: Name of the model, for the log.
        decode: The application's `decode`: bytes to one raw array.
        prepare: Makes one chunk from a raw array.
        now_ns: The clock of deadlines.
        is_quick: True for a body that the event loop decodes sooner than a thread is woken.

    Attributes:
        waiting: Number of unfinished jobs.
    """

    name: str
    decode: Decode
    prepare: Callable[[Array], Array]
    now_ns: Callable[[], int]
    is_quick: Callable[[bytes], bool] = lambda body: False
    waiting: int = field(init=False, default=0)
    _usual_ns: MovingAverage = field(init=False, default_factory=partial(MovingAverage, FOLLOW))
    _pool: ThreadPoolExecutor = field(
        init=False, default_factory=partial(ThreadPoolExecutor, THREADS, "prepare", lower_priority)
    )

    def submit(self, job: DecodeJob) -> None:
        """Make a chunk from a body; call its `done` in the calling event loop.

        Raises:
            Overloaded: The predicted wait is longer than the budget.
        """
        rounds = max(0, self.waiting - THREADS + 1) / THREADS
        wait_ns = rounds * self._usual_ns.value
        if wait_ns > job.budget_ns or self.waiting >= MAX_WAITING:
            raise Overloaded(
                f"{self.waiting} requests are queued for decoding, about {wait_ns / 1e6:,.0f} ms; come back later.",
                max(0.1, wait_ns / 1e9),
            )
        self.waiting += 1
        if job.usage is not None:
            job.charged_ns = job.usage.begin_thread(self._usual_ns.value)
        self._pool.submit(self._work, job, asyncio.get_running_loop())

    def close(self) -> None:
        """Start no further jobs; those that began are finished."""
        self._pool.shutdown(wait=False)

    def _work(self, job: DecodeJob, loop: asyncio.AbstractEventLoop) -> None:
        start_ns = self.now_ns()
        try:
            if job.done is None or start_ns - job.arrival_ns > job.budget_ns:
                raise TooLate(f"It was not prepared within {job.budget_ns / 1e6:g} ms; come back later.")
            if job.read is not None:
                found = job.read()
            else:
                raw: Any = self.decode(job.body, job.content_type)
                found = self.prepare(raw)
                # Several tensors by name have none.
                job.raw_shape = getattr(raw, "shape", ())
        except RequestError as error:
            # The tracebacks of both hold this frame, and with it body and error: the garbage collector alone would free
            # them, after thousands of bodies.
            error.__cause__ = error.__context__ = None
            found = error.with_traceback(None)
        except BaseException as error:  # noqa: BLE001 - the user's code, sys.exit too: somebody waits for what it gives
            found = decode_failure(error, job.body, self.name)
        # The event loop may be closed by now.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._finished, job, found, self.now_ns() - start_ns)

    def _finished(self, job: DecodeJob, found: Any, own_ns: int) -> None:
        self.waiting -= 1
        if job.usage is not None:
            job.usage.end_thread(own_ns, job.charged_ns)
        if not isinstance(found, TooLate):
            self._usual_ns.add(own_ns)
        # A `done` that knows its job is a cycle too.
        done, job.done = job.done, None
        if done is not None:
            done(found, own_ns)


def is_small_picture(body: bytes) -> bool:
    """True for a PNG or JPEG that is decoded within a few milliseconds at worst."""
    if len(body) > MAX_QUICK_BYTES:
        return False
    pixels = decoded_pixels(body)
    # Where the bytes are no pixels, they are thousands of chunks, or texts that are unpacked.
    return pixels is not None and pixels <= MAX_QUICK_PIXELS and len(body) <= MAX_OTHER_BYTES + MAX_PIXEL_BYTES * pixels


def is_no_large_picture(body: bytes) -> bool:
    """True for anything else than a PNG or JPEG that may take long."""
    return decoded_pixels(body) is None or is_small_picture(body)


def decode_failure(error: BaseException, body: bytes, name: str) -> RequestError:
    """Return the error for a body on which an application's `decode` raised; log it where the client is not at fault.

    Call it in the `except` block.

    Args:
        error: What was raised, no `RequestError`.
        body: The body.
        name: The model.
    """
    fault = text_fault(error, body)
    if fault is not None:
        return fault
    log.exception("the decode of %r raised; that request alone fails", name)
    return ComputeFailed("The application's decode failed on this body; the server's log says how.")
