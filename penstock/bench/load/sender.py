"""One process of the load generator: raw sockets and requests serialised ahead.

It is a plain loop over `epoll`: the transports of an event loop take as long for a request as a fast server does.
"""

import errno
import gc
import math
import multiprocessing
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError
from typing import final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import BenchError
from penstock.core.spec import Array

# n requests, g golden examples

Floats = npt.NDArray[np.float64]

REFUSED = (503, 504)
# Answers kept for checking after the run; above this size, every sixteenth is kept.
KEPT_BYTES = 256 << 20
# epoll waits in whole milliseconds; below this the loop polls without waiting.
NEAR_S = 0.001
MAX_WAIT_S = 0.01
# Events of one poll; due requests are sent between polls.
AT_ONCE = 256
READ_BYTES = 1 << 16
# Delay before another attempt where no server listens.
RECONNECT_S = 0.001
READY_S = 120.0
MAX_OPENING = 64
CONNECT_S = 5.0


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
    """

    host: str
    port: int
    requests: tuple[bytes, ...]
    answers: Array | None
    tolerance: float
    preamble_nbytes: int = 0


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
    """Outcomes of one process's requests; see `penstock.bench.load.generator.LoadResult`."""

    latency_s: Floats
    offered: int
    refused: int
    failed: int
    wrong: int
    lost: int
    checked: int


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
    if job.cpus is not None:
        os.sched_setaffinity(0, job.cpus)
    gc.disable()
    with select.epoll() as poll:
        return _Sender(job, poll).run()


@final
class _Sender:
    def __init__(self, job: SenderJob, poll: select.epoll) -> None:
        self.job = job
        self.poll = poll
        self.requests = job.target.requests
        # The first of several addresses that accepts.
        try:
            with socket.create_connection((job.target.host, job.target.port), timeout=CONNECT_S) as first:
                self.family, self.address = first.family, first.getpeername()
        except OSError as error:
            raise BenchError(f"{job.target.host}:{job.target.port} cannot be reached ({error}).") from None
        self.connections: dict[int, _Connection] = {}
        self.free: deque[_Connection] = deque()
        self.queue: deque[tuple[float, int]] = deque()
        self.finished: list[tuple[float, float, int, int, bytes]] = []
        self.closed_loop = job.due_s is None
        self.broken = 0
        self.started = 0
        self._missing = job.connections
        self._open_again_s = 0.0
        self.due_s = [] if job.due_s is None else job.due_s.tolist()
        self.next_due_s = self.due_s[0] if self.due_s else math.inf
        self._next = 0
        expected = len(self.due_s) or 1_000_000
        nbytes = job.target.answers[0].nbytes if job.target.answers is not None else 0
        self.keep_every = 1 if expected * nbytes < KEPT_BYTES else 16

    def run(self) -> SenderResult:
        job = self.job
        self._poll_until(lambda: len(self.free) == job.connections, job.start_s)
        time.sleep(max(0.0, job.start_s - time.monotonic()))
        if self.closed_loop:
            waiting, self.free = self.free, deque()
            for connection in waiting:
                self.next_of(connection)
        self._poll_until(lambda: False, job.end_s)
        given_up_s = time.monotonic() + job.stragglers_s
        self._poll_until(self._all_answered, given_up_s)
        for connection in list(self.connections.values()):
            connection.close()
        return self._sum()

    def _all_answered(self) -> bool:
        return self.next_due_s == math.inf and self.started + len(self.queue) <= len(self.finished) + self.broken

    def _poll_until(self, over: Callable[[], bool], end_s: float) -> None:
        connections, poll = self.connections, self.poll
        while (now := time.monotonic()) < end_s and not over():
            # Not at once when one breaks: a new socket could reuse its number within the events of the same poll.
            if self._missing and now >= self._open_again_s and now < self.job.end_s:
                self._open_some()
            if self.next_due_s <= now:
                self.send_due(now)
            wait_s = min(self.next_due_s, end_s) - now
            for number, events in poll.poll(min(wait_s - NEAR_S, MAX_WAIT_S) if wait_s > NEAR_S else 0, AT_ONCE):
                connection = connections.get(number)
                if connection is not None:
                    connection.handle(events)

    def send_due(self, now: float) -> None:
        """Send what is due by now."""
        while self.next_due_s <= now:
            due_s, which = self.next_due_s, self._next % len(self.requests)
            self._next += 1
            self.next_due_s = self.due_s[self._next] if self._next < len(self.due_s) else math.inf
            if self.free:
                self.started += 1
                self.free.popleft().send(due_s, which)
            else:
                self.queue.append((due_s, which))

    def next_of(self, connection: "_Connection") -> None:
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

    def lost(self, connection: "_Connection", unanswered: bool) -> None:
        """Replace a connection that broke or could not be opened."""
        self.broken += unanswered
        if connection in self.free:
            self.free.remove(connection)
        self._missing += 1

    def delay_opening(self) -> None:
        self._open_again_s = time.monotonic() + RECONNECT_S

    def _open_some(self) -> None:
        opening = sum(connection.opening for connection in self.connections.values())
        for _ in range(min(self._missing, MAX_OPENING - opening)):
            self._missing -= 1
            _Connection(self)

    def _sum(self) -> SenderResult:
        job = self.job
        counted = [entry for entry in self.finished if job.measured_from_s <= entry[0] < job.end_s]
        due, done = (np.array([entry[place] for entry in counted], np.float64) for place in (0, 1))
        status = np.array([entry[3] for entry in counted], np.int64)
        checked, wrong = self._checked([entry for entry in counted if entry[3] == 200 and entry[4]])
        if job.due_s is not None:
            offered = int(np.count_nonzero(job.due_s >= job.measured_from_s))
        else:
            offered = len(counted) + self.broken
        refused = int(np.isin(status, REFUSED).sum())
        right = status == 200
        return SenderResult(
            latency_s=(done - due)[right],
            offered=offered,
            refused=refused,
            failed=int((~right).sum()) - refused,
            wrong=wrong,
            lost=offered - len(counted),
            checked=checked,
        )

    def _checked(self, entries: list[tuple[float, float, int, int, bytes]]) -> tuple[int, int]:
        answers = self.job.target.answers
        if answers is None or not entries:
            return 0, 0
        start = self.job.target.preamble_nbytes
        nbytes = start + answers[0].nbytes
        short = sum(len(entry[4]) != nbytes for entry in entries)
        whole = [entry for entry in entries if len(entry[4]) == nbytes]
        given = np.frombuffer(b"".join(entry[4][start:] for entry in whole), answers.dtype)
        given = given.reshape(len(whole), answers[0].size)
        golden = answers.reshape(len(answers), -1)[[entry[2] for entry in whole]]
        # NaN counts as a difference.
        same = (np.abs(given.astype(np.float64) - golden) <= self.job.target.tolerance).all(1)
        return len(entries), short + int((~same).sum())


@final
class _Connection:
    """A connection that is being opened, is free, or waits for the answer to its request."""

    def __init__(self, sender: _Sender) -> None:
        self._sender = sender
        self._buffer = b""
        self._unsent = b""
        self._due_s = 0.0
        self._which = -1
        self._socket = socket.socket(sender.family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reason = self._socket.connect_ex(sender.address)
        if reason not in (0, errno.EINPROGRESS):
            # No route or no free port: a fault of the measuring machine.
            raise BenchError(f"no connection to {sender.address} can be opened ({os.strerror(reason)}).")
        self.opening = True
        sender.connections[self._socket.fileno()] = self
        sender.poll.register(self._socket, select.EPOLLOUT)

    def send(self, due_s: float, which: int) -> None:
        self._due_s, self._which = due_s, which
        self._write(self._sender.requests[which])

    def handle(self, events: int) -> None:
        if self.opening:
            self._opened()
        elif events & select.EPOLLIN:
            # First: a server may answer and close before it has read everything.
            self._read()
        elif events & select.EPOLLOUT:
            self._sender.poll.modify(self._socket, select.EPOLLIN)
            self._write(self._unsent)
        else:
            self._lost()

    def close(self) -> None:
        del self._sender.connections[self._socket.fileno()]
        self._socket.close()

    def _opened(self) -> None:
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._sender.delay_opening()
            self._lost()
            return
        self.opening = False
        self._sender.poll.modify(self._socket, select.EPOLLIN)
        self._sender.next_of(self)

    def _write(self, data: bytes) -> None:
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lost()
            return
        if sent < len(data):
            self._unsent = data[sent:]
            self._sender.poll.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._received(data)
        else:
            self._lost()

    def _lost(self) -> None:
        self.close()
        self._sender.lost(self, self._which >= 0)

    def _received(self, data: bytes) -> None:
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
        sender, which = self._sender, self._which
        self._which = -1
        kept = buffer[head + 4 : whole] if len(sender.finished) % sender.keep_every == 0 else b""
        now = time.monotonic()
        sender.finished.append((self._due_s, now, which, int(buffer[9:12]), kept))
        if b"Connection: close" in buffer[:head]:
            self._lost()
        else:
            sender.next_of(self)
        # Between answers, because a poll may bring a thousand: requests due meanwhile would go out in a burst.
        if sender.next_due_s <= now:
            sender.send_due(now)
