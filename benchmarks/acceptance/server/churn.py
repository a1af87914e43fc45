"""An open-loop load of clients that come and go and record the outcome of every request.

Requests are due at the times of a Poisson process. Each connection is used for a random number of requests and closed.
Only counts are kept, so that memory does not grow with the duration.
"""

import asyncio
import gc
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast, final

import numpy as np
import uvloop

from penstock.bench.load.sender import REFUSED, Target

# Requests of a connection, on average.
REQUESTS_EACH = 50
MAX_CONNECTIONS = 512
# Without an answer or a closed connection for this long, a request hangs.
HANG_S = 5.0
SWEEP_S = 0.25
# uvloop's timers have a resolution of a millisecond; the arrivals of a tick are sent together.
TICK_S = 0.002
KEPT_ANSWERS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ChurnLoad:
    """Target, rate and duration.

    Args:
        target: The server, its requests and golden answers.
        rate: Requests a second.
        seconds: Duration.
        seed: Seed of the arrivals and of the connections' lengths.
    """

    target: Target
    rate: float
    seconds: float
    seed: int = 0


@dataclass(slots=True)
class ChurnResult:
    """Outcomes of the requests.

    Args:
        offered: Requests due.
        answered: Right answers.
        rejected: Statuses 503 and 504.
        failed: Any other status.
        wrong: Status 200 with another body than the golden answer.
        hung: Neither answered nor closed within `HANG_S` seconds.
        unsent: Due, but never sent: every connection was in use.
        opened: Connections opened.
        broken: Monotonic time and client port of each connection that broke while a request waited on it.
    """

    offered: int = 0
    answered: int = 0
    rejected: int = 0
    failed: int = 0
    wrong: int = 0
    hung: int = 0
    unsent: int = 0
    opened: int = 0
    broken: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])


def run_churn(load: ChurnLoad) -> ChurnResult:
    """Send the load from this process."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        gc.freeze()
        return runner.run(_ClientPool(load).run())


@final
class _ClientPool:
    def __init__(self, load: ChurnLoad) -> None:
        self._load = load
        self._rng = np.random.default_rng(load.seed)
        self._free: deque[_ChurnClient] = deque()
        self._queue: deque[int] = deque()
        self._clients: set[_ChurnClient] = set()
        self._opening = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._right: list[set[bytes]] = [set() for _ in load.target.requests]
        self.counted = ChurnResult()

    async def run(self) -> ChurnResult:
        load, counted = self._load, self.counted
        sweeper = asyncio.create_task(self._sweep())
        start_s = time.monotonic()
        dues = self._dues()
        due_s = next(dues)
        while due_s < load.seconds:
            now_s = time.monotonic() - start_s
            while due_s <= now_s and due_s < load.seconds:
                self._offer(counted.offered % len(load.target.requests))
                counted.offered += 1
                due_s = next(dues)
            await asyncio.sleep(TICK_S)
        end_s = time.monotonic() + HANG_S + 1
        while (self._queue or any(client.which >= 0 for client in self._clients)) and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        counted.unsent = len(self._queue)
        sweeper.cancel()
        for client in list(self._clients):
            client.close()
        return counted

    def _dues(self) -> Iterator[float]:
        due_s = 0.0
        while True:
            for gap_s in self._rng.exponential(1 / self._load.rate, 4096).tolist():
                due_s += gap_s
                yield due_s

    def _offer(self, which: int) -> None:
        if self._free:
            self._free.popleft().send(which, self._load.target.requests[which])
            return
        self._queue.append(which)
        if self._opening < len(self._queue) and len(self._clients) + self._opening < MAX_CONNECTIONS:
            self._opening += 1
            task = asyncio.get_running_loop().create_task(self._open())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open(self) -> None:
        target = self._load.target
        uses = int(self._rng.geometric(1 / REQUESTS_EACH))
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: _ChurnClient(self, uses), target.host, target.port)
        except OSError:
            # No listener, or a front-end died during the handshake; the queue is tried again.
            await asyncio.sleep(SWEEP_S)
        finally:
            self._opening -= 1

    def connected(self, client: "_ChurnClient") -> None:
        self.counted.opened += 1
        self._clients.add(client)
        self.idle(client)

    def disconnected(self, client: "_ChurnClient", port: int) -> None:
        self._clients.discard(client)
        if client in self._free:
            self._free.remove(client)
        if client.which >= 0:
            self.counted.broken.append((time.monotonic(), port))

    def idle(self, client: "_ChurnClient") -> None:
        if self._queue:
            which = self._queue.popleft()
            client.send(which, self._load.target.requests[which])
        else:
            self._free.append(client)

    def answered(self, which: int, status: int, content: bytes) -> None:
        counted = self.counted
        if status in REFUSED:
            counted.rejected += 1
        elif status != 200:
            counted.failed += 1
        elif self._is_right(which, content):
            counted.answered += 1
        else:
            counted.wrong += 1

    def _is_right(self, which: int, content: bytes) -> bool:
        if content in self._right[which]:
            return True
        target = self._load.target
        assert target.answers is not None
        golden = target.answers[which]
        if len(content) != golden.nbytes:
            return False
        given = np.frombuffer(content, golden.dtype).reshape(golden.shape)
        # NaN counts as a difference.
        right = bool((np.abs(given.astype(np.float64) - golden) <= target.tolerance).all())
        if right and len(self._right[which]) < KEPT_ANSWERS:
            self._right[which].add(content)
        return right

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = time.monotonic()
            for client in list(self._clients):
                if client.which >= 0 and now_s - client.sent_s > HANG_S:
                    self.counted.hung += 1
                    client.which = -1
                    client.close()


@final
class _ChurnClient(asyncio.Protocol):
    def __init__(self, pool: _ClientPool, uses: int) -> None:
        self._pool = pool
        self._uses = uses
        self._transport: asyncio.Transport | None = None
        self._port = 0
        self._buffer = b""
        self.which = -1
        self.sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods without being of its class.
        self._transport = cast(asyncio.Transport, transport)
        self._port = transport.get_extra_info("sockname")[1]
        self._pool.connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.disconnected(self, self._port)
        self._transport = None
        self.which = -1

    def send(self, which: int, request: bytes) -> None:
        assert self._transport is not None
        self.which, self.sent_s = which, time.monotonic()
        self._uses -= 1
        self._transport.write(request)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.lower()
        length_at = lines.find(b"content-length: ") + 16
        assert length_at >= 16, head
        length = int(lines[length_at:].partition(b"\r")[0])
        if len(rest) < length or self.which < 0:
            return
        self._buffer = b""
        which, self.which = self.which, -1
        self._pool.answered(which, int(head[9:12]), rest)
        if self._uses <= 0 or b"connection: close" in lines:
            self.close()
        else:
            self._pool.idle(self)
