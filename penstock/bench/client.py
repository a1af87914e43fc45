"""One process of the load generator: raw sockets, requests serialised ahead, nothing decided while it measures."""

import asyncio
import gc
import math
import os
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import cast, final

import numpy as np
import numpy.typing as npt
import uvloop

from penstock.core.spec import Array

# n requests, g golden examples

Floats = npt.NDArray[np.float64]

REFUSED = (503, 504)
# Kept for checking after the run; above this, every sixteenth answer is.
KEPT_BYTES = 256 << 20
CONNECT_AT_ONCE = 64
# uvloop's timers tick in milliseconds; nearer than this the loop polls instead.
NEAR_S = 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A server, what it is sent and what it must answer.

    Args:
        host: Its address.
        port: Its port.
        requests: Whole HTTP requests, one for each golden example.
        answers: `[g, ...]`, what each must be answered with as raw bytes; None to check nothing.
        tolerance: The largest difference of a right answer.
        preamble_nbytes: What precedes the raw bytes in every answer's body, where a server puts its own description.
    """

    host: str
    port: int
    requests: tuple[bytes, ...]
    answers: Array | None
    tolerance: float
    preamble_nbytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one process sends. Times are on the machine's monotonic clock, in seconds.

    Args:
        target: Where.
        due_s: When each request is due; None for the closed loop.
        start_s: When it begins.
        measured_from_s: Requests due from here on count.
        end_s: Nothing is due from here on.
        connections: How many are opened.
        stragglers_s: How long the last answers are waited for.
        cpus: The cores on which the process runs.
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
class Sent:
    """What became of one process's requests; see `penstock.bench.load.Measured`."""

    latency_s: Floats
    offered: int
    refused: int
    failed: int
    wrong: int
    lost: int
    checked: int


def meet(everybody: Barrier) -> None:
    """Wait until every process of the generator has started and imported what it needs."""
    everybody.wait()


def run_job(job: Job) -> Sent:
    """Send a job's requests in this process."""
    if job.cpus is not None:
        os.sched_setaffinity(0, job.cpus)
    gc.disable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Sender(job).run())


@final
class _Sender:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.requests = job.target.requests
        self.free: deque[_Connection] = deque()
        self.queue: deque[tuple[float, int]] = deque()
        self.finished: list[tuple[float, float, int, int, bytes]] = []
        self.closed_loop = job.due_s is None
        self.broken = 0
        self.begun = 0
        self.due_s: list[float] = []
        self.next_due_s = math.inf
        self._next = 0
        expected = len(job.due_s) if job.due_s is not None else 1_000_000
        nbytes = job.target.answers[0].nbytes if job.target.answers is not None else 0
        self.keep_every = 1 if expected * nbytes < KEPT_BYTES else 16

    async def run(self) -> Sent:
        job, loop = self.job, asyncio.get_running_loop()
        for first in range(0, job.connections, CONNECT_AT_ONCE):
            count = min(CONNECT_AT_ONCE, job.connections - first)
            await asyncio.gather(*(self._connect() for _ in range(count)))
        await asyncio.sleep(max(0.0, job.start_s - time.monotonic()))
        if job.due_s is None:
            for connection in list(self.free):
                self.next_of(connection)
            self.free.clear()
        else:
            over = asyncio.Event()
            self.due_s = job.due_s.tolist()
            self.next_due_s = self.due_s[0] if self.due_s else math.inf
            self._keep_sending(loop, over)
            await over.wait()
        await asyncio.sleep(max(0.0, job.end_s - time.monotonic()))
        given_up_s = time.monotonic() + job.stragglers_s
        while self.begun + len(self.queue) > len(self.finished) + self.broken and time.monotonic() < given_up_s:
            await asyncio.sleep(0.01)
        return self._sum()

    def _keep_sending(self, loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> None:
        now = time.monotonic()
        self.send_due(now)
        wait_s = self.next_due_s - now
        if wait_s == math.inf:
            over.set()
        elif wait_s > NEAR_S:
            loop.call_later(wait_s - NEAR_S / 2, self._keep_sending, loop, over)
        else:
            loop.call_soon(self._keep_sending, loop, over)

    def send_due(self, now: float) -> None:
        """Send what is due by now."""
        while self.next_due_s <= now:
            self._send_or_queue(self.next_due_s, self._next % len(self.requests))
            self._next += 1
            self.next_due_s = self.due_s[self._next] if self._next < len(self.due_s) else math.inf

    def _send_or_queue(self, due_s: float, which: int) -> None:
        if self.free:
            self.begun += 1
            self.free.popleft().send(due_s, which)
        else:
            self.queue.append((due_s, which))

    def next_of(self, connection: "_Connection") -> None:
        """A connection is free: give it what waits, or in the closed loop its next request."""
        if self.closed_loop:
            now = time.monotonic()
            if now < self.job.end_s:
                self.begun += 1
                connection.send(now, self.begun % len(self.requests))
        elif self.queue:
            self.begun += 1
            connection.send(*self.queue.popleft())
        else:
            self.free.append(connection)

    def lost(self, connection: "_Connection", unanswered: bool) -> None:
        """A connection broke: open another one."""
        self.broken += unanswered
        if connection in self.free:
            self.free.remove(connection)
        if time.monotonic() < self.job.end_s:
            task = asyncio.ensure_future(self._connect())
            task.add_done_callback(lambda done: done.exception())

    async def _connect(self) -> None:
        loop, target = asyncio.get_running_loop(), self.job.target
        _, connection = await loop.create_connection(lambda: _Connection(self), target.host, target.port)
        self.next_of(connection) if self.queue else self.free.append(connection)

    def _sum(self) -> Sent:
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
        return Sent(
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
        # Written so that NaN counts as a difference.
        same = (np.abs(given.astype(np.float64) - golden) <= self.job.target.tolerance).all(1)
        return len(entries), short + int((~same).sum())


@final
class _Connection(asyncio.Protocol):
    def __init__(self, sender: _Sender) -> None:
        self._sender = sender
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._due_s = 0.0
        self._which = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods without being of its class.
        self._transport = cast(asyncio.Transport, transport)
        # Sent at once: uvloop would keep it until every answer that is there now has been read, and send in bursts.
        self._transport.set_write_buffer_limits(0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._sender.lost(self, self._which >= 0)
        self._which = -1

    def send(self, due_s: float, which: int) -> None:
        self._due_s, self._which = due_s, which
        assert self._transport is not None
        self._transport.write(self._sender.requests[which])

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        head = buffer.find(b"\r\n\r\n")
        if head < 0:
            self._buffer = buffer
            return
        # From the line's start: there are headers whose names end like this one.
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
            assert self._transport is not None
            self._transport.close()
        else:
            sender.next_of(self)
        # Between the answers, of which a poll may bring a thousand: what is due meanwhile would go out in a burst.
        if sender.next_due_s <= now:
            sender.send_due(now)
