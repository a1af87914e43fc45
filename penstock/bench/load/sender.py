"""One process of the load generator: requests serialised ahead, over raw sockets."""

import math
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError
from typing import final

import numpy as np
import numpy.typing as npt

from penstock.bench.load.record_answers import RecordAnswers
from penstock.bench.socket_loop import PolledSocket, SocketLoop
from penstock.core.errors import BenchError
from penstock.core.spec import Array

# n requests, g golden examples

Floats = npt.NDArray[np.float64]

REFUSED = (503, 504)
# Answers kept for checking after the run; above this size, every sixteenth is kept.
KEPT_BYTES = 256 << 20
# Delay before another attempt where no server listens.
RECONNECT_S = 0.001
READY_S = 120.0
# A request that the sender comes to this long after it was due counts as sent late.
LATE_S = 0.005
MAX_OPENING = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A server, its requests and the expected answers.

    Args:
        host: Its address.
        port: Its port.
        requests: HTTP requests, one for each golden example.
        answers: `[g, ...]`, the expected outputs, sent as raw bytes; None to check nothing.
        tolerance: The largest difference of a right answer.
        preamble_nbytes: Bytes before the raw output in every answer's body, where a server adds its own description.
        record: The expected answers where they are several tensors; None for raw bytes of one.
    """

    host: str
    port: int
    requests: tuple[bytes, ...]
    answers: Array | None
    tolerance: float
    preamble_nbytes: int = 0
    record: RecordAnswers | None = None

    def count_wrong(self, given: Sequence[tuple[int, bytes]]) -> int:
        """Return how many bodies differ from the expected answer to the request whose index stands before each."""
        if self.answers is None or not given:
            return 0
        if self.record is not None:
            return self.record.count_wrong(given)
        start, nbytes = self.preamble_nbytes, self.preamble_nbytes + self.answers[0].nbytes
        whole = [(which, body[start:]) for which, body in given if len(body) == nbytes]
        outputs = np.frombuffer(b"".join(output for _, output in whole), self.answers.dtype)
        golden = self.answers.reshape(len(self.answers), -1)[[which for which, _ in whole]]
        # NaN counts as a difference.
        right = (np.abs(outputs.reshape(golden.shape).astype(np.float64) - golden) <= self.tolerance).all(1)
        return len(given) - int(right.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderJob:
    """One process's share of a load. Times are on the machine's monotonic clock, in seconds.

    Args:
        target: The server.
        due_s: Due time of each request; None for the closed loop.
        start_s: Start of the load.
        measured_from_s: Requests due from here on count.
        end_s: No request is due from here on.
        connections: Connections to open.
        stragglers_s: Wait for the last answers.
        cpus: The cores of the process.
    """

    target: Target
    due_s: Floats | None
    start_s: float
    measured_from_s: float
    end_s: float
    connections: int
    stragglers_s: float
    cpus: frozenset[int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderResult:
    """Outcomes of the requests that were due during the measurement.

    Args:
        latency_s: Latency of each right answer, `[n]`, from when its request was due.
        offered: Requests due.
        refused: Statuses 503 and 504.
        failed: Any other status.
        wrong: Status 200 with another body than the golden answer.
        lost: Never answered: the connection broke, or the wait for stragglers ended.
        checked: Answers compared with the golden ones.
        late: Requests that the sender came to `LATE_S` or more after they were due.
        queued: Requests that had to wait for a free connection.
    """

    latency_s: Floats
    offered: int
    refused: int
    failed: int
    wrong: int
    lost: int
    checked: int
    late: int = 0
    queued: int = 0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Every answer that came.

    Args:
        due_s: When its request was due, `[n]`.
        done_s: When it was complete, `[n]`.
        which: Index of the request, `[n]`.
        statuses: `[n]`.
    """

    due_s: Floats
    done_s: Floats
    which: npt.NDArray[np.int64]
    statuses: npt.NDArray[np.int64]


@contextmanager
def sender_pool(processes: int) -> Generator[ProcessPoolExecutor]:
    """Start a pool of sender processes; the block begins when every one has finished its imports.

    Raises:
        BenchError: They did not start in time.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes + 1)
    with ProcessPoolExecutor(processes, context, initializer=_wait, initargs=(barrier,)) as pool:
        for _ in range(processes):
            pool.submit(abs, 0)  # the pool starts a process for each task
        try:
            barrier.wait(READY_S)
        except BrokenBarrierError:
            raise BenchError(f"the load generator's processes did not start within {READY_S:g} s.") from None
        yield pool


def _wait(barrier: Barrier) -> None:
    # A function of this module, so that its imports are finished before the barrier opens.
    barrier.wait()


def run_sender(job: SenderJob) -> SenderResult:
    """Send the requests of a job in this process."""
    return Sender(job).run()


class Sender(SocketLoop):
    """Sends the requests of a job by the clock, or in the closed loop as answers come.

    Args:
        job: The job.

    Attributes:
        free: Connections without a request.
        queue: Due time and index of each request that waits for a connection.
        dues: The due times that follow `next_due_s`.
        missing: Connections that are to be opened.
        open_until_s: No connection is opened from here on.
    """

    def __init__(self, job: SenderJob) -> None:
        super().__init__(job.target.host, job.target.port, job.cpus)
        self.job = job
        self.requests = job.target.requests
        self.free: deque[SenderConnection] = deque()
        self.queue: deque[tuple[float, int]] = deque()
        self.finished: list[tuple[float, float, int, int, bytes]] = []
        self.closed_loop = job.due_s is None
        self.broken = 0
        self.started = 0
        self.missing = job.connections
        self.open_until_s = job.end_s
        self._open_again_s = 0.0
        self._late = self._queued = 0
        due_s: list[float] = [] if job.due_s is None else job.due_s.tolist()
        self.dues = iter(due_s)
        self.next_due_s = next(self.dues, math.inf)
        self._which = cycle(range(len(self.requests)))
        self.keep_every = keep_every(job)

    def run(self) -> SenderResult:
        """Connect, send, wait for the last answers, and check them."""
        self.send_all()
        return self._sum()

    def send_all(self) -> None:
        """Connect, send, and wait for the last answers."""
        job = self.job
        self._poll_until(lambda: len(self.free) == job.connections, job.start_s)
        time.sleep(max(0.0, job.start_s - time.monotonic()))
        if self.closed_loop:
            waiting, self.free = self.free, deque()
            for connection in waiting:
                self.send_next(connection)
        self._poll_until(lambda: False, job.end_s)
        given_up_s = time.monotonic() + job.stragglers_s
        self._poll_until(self.all_answered, given_up_s)
        self.close()

    def all_answered(self) -> bool:
        """Return whether no answer is awaited any more."""
        return self.next_due_s == math.inf and self.started + len(self.queue) <= len(self.finished) + self.broken

    def _poll_until(self, over: Callable[[], bool], end_s: float) -> None:
        while (now := time.monotonic()) < end_s and not over():
            # Not at once when one breaks: a new socket could reuse its number within the events of the same poll.
            if self.missing and now >= self._open_again_s and now < self.open_until_s:
                self._open_some()
            if self.next_due_s <= now:
                self.send_due(now)
            self.handle_events(min(self.next_due_s, end_s) - now)

    def send_due(self, now: float) -> None:
        """Send what is due by now."""
        while self.next_due_s <= now:
            due_s, which = self.next_due_s, next(self._which)
            self.next_due_s = next(self.dues, math.inf)
            if due_s >= self.job.measured_from_s:
                self._late += now - due_s > LATE_S
                self._queued += not self.free
            if self.free:
                self.started += 1
                self.free.popleft().send(due_s, which)
            else:
                self.queue.append((due_s, which))

    def send_next(self, connection: "SenderConnection") -> None:
        """Send the next queued request, or in the closed loop the connection's next request."""
        if self.closed_loop:
            now = time.monotonic()
            if self.job.start_s <= now < self.job.end_s:
                self.started += 1
                connection.send(now, self.started % len(self.requests))
            else:
                self.free.append(connection)
        elif self.queue:
            self.started += 1
            connection.send(*self.queue.popleft())
        else:
            self.free.append(connection)

    def lost(self, connection: "SenderConnection", unanswered: bool) -> None:
        """Replace a connection that broke or could not be opened."""
        if connection.opening:
            self._open_again_s = time.monotonic() + RECONNECT_S
        self.broken += unanswered
        if connection in self.free:
            self.free.remove(connection)
        self.missing += 1

    def _open_some(self) -> None:
        opening = sum(connection.opening for connection in self.by_number.values())
        for _ in range(min(self.missing, MAX_OPENING - opening)):
            self.missing -= 1
            self.connect()

    def connect(self) -> None:
        """Open a connection."""
        SenderConnection(self)

    def answered(self, due_s: float, now: float, which: int, status: int, body: bytes) -> None:
        """Record an answer; its body is checked after the run."""
        kept = body if len(self.finished) % self.keep_every == 0 else b""
        self.finished.append((due_s, now, which, status, kept))

    def _sum(self) -> SenderResult:
        due, done = (np.array([entry[place] for entry in self.finished], np.float64) for place in (0, 1))
        which, statuses = (np.array([entry[place] for entry in self.finished], np.int64) for place in (2, 3))
        finished = Finished(due_s=due, done_s=done, which=which, statuses=statuses)
        bodies, unanswered = [entry[4] for entry in self.finished], self.started - len(self.finished)
        return sum_outcome(self.job, finished, bodies, unanswered, late=self._late, queued=self._queued)


def keep_every(job: SenderJob) -> int:
    """Return of how many answers one is kept for checking."""
    expected = 1_000_000 if job.due_s is None or not len(job.due_s) else len(job.due_s)
    nbytes = job.target.answers[0].nbytes if job.target.answers is not None else 0
    return 1 if expected * nbytes < KEPT_BYTES else 16


def sum_outcome(
    job: SenderJob, finished: Finished, bodies: Sequence[bytes], unanswered: int, *, late: int, queued: int
) -> SenderResult:
    """Count the outcomes of a job, and check the answers.

    Args:
        job: The job.
        finished: Every answer that came.
        bodies: Their bodies; empty where not kept.
        unanswered: Requests that were sent and never answered: their connection broke, or the wait for stragglers was
            over.
        late: See `SenderResult`.
        queued: See `SenderResult`.
    """
    counted = (finished.due_s >= job.measured_from_s) & (finished.due_s < job.end_s)
    statuses = finished.statuses[counted]
    right = statuses == 200
    checkable = counted & (finished.statuses == 200)
    kept = [(int(finished.which[place]), bodies[place]) for place in checkable.nonzero()[0] if bodies[place]]
    if job.due_s is not None:
        offered = int(np.count_nonzero(job.due_s >= job.measured_from_s))
    else:
        offered = len(statuses) + unanswered
    refused = int(np.isin(statuses, REFUSED).sum())
    return SenderResult(
        latency_s=(finished.done_s - finished.due_s)[counted][right],
        offered=offered,
        refused=refused,
        failed=int((~right).sum()) - refused,
        wrong=job.target.count_wrong(kept),
        lost=offered - len(statuses),
        checked=len(kept) if job.target.answers is not None else 0,
        late=late,
        queued=queued,
    )


class SenderConnection(PolledSocket):
    """A connection that is being opened, is free, or waits for the answer to its request.

    Args:
        sender: Its sender.

    Attributes:
        which: Index of the request that waits; -1 for none.
    """

    def __init__(self, sender: Sender) -> None:
        super().__init__(sender)
        self._sender = sender
        self._buffer = b""
        self._due_s = 0.0
        self.which = -1

    def send(self, due_s: float, which: int) -> None:
        """Send a request."""
        self._due_s, self.which = due_s, which
        self.write(self._sender.requests[which])

    def opened(self) -> None:
        """Take the first request."""
        self._sender.send_next(self)

    def lost(self, reason: str) -> None:
        """Close the connection, and let the sender replace it."""
        self.close()
        self._sender.lost(self, self.which >= 0)

    def received(self, data: bytes) -> None:
        """Collect an answer."""
        buffer = self._buffer + data if self._buffer else data
        head = buffer.find(b"\r\n\r\n")
        if head < 0:
            self._buffer = buffer
            return
        # From the start of the line: other header names end like this one.
        length_at = buffer.find(b"\r\nContent-Length: ", 0, head)
        if length_at < 0:
            length_at = buffer.lower().find(b"\r\ncontent-length: ", 0, head)
        assert length_at >= 0, buffer[:head]
        end = buffer.find(b"\r", length_at + 2)
        whole = head + 4 + int(buffer[length_at + 18 : end])
        if len(buffer) < whole:
            self._buffer = buffer
            return
        self._buffer = b""
        sender, which = self._sender, self.which
        self.which = -1
        now = time.monotonic()
        sender.answered(self._due_s, now, which, int(buffer[9:12]), buffer[head + 4 : whole])
        if b"Connection: close" in buffer[:head]:
            self.lost("the server closed the connection")
        else:
            sender.send_next(self)
        # Between answers, because a poll may bring a thousand: requests due meanwhile would go out in a burst.
        if sender.next_due_s <= now:
            sender.send_due(now)
