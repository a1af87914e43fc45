"""An open load of clients that come and go, and that notice everything that becomes of their requests.

Requests are due at the random moments of a Poisson process. Each connection is used for a random number of them and
closed; nothing is kept of an answer but a count, so that this can run for as long as one likes.
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

from penstock.bench.client import REFUSED, Target

# Requests that a connection is used for, on average.
REQUESTS_EACH = 50
MOST_CONNECTIONS = 512
# Neither an answer nor a closed connection for so long is a hang.
HANGS_S = 5.0
SWEEP_S = 0.25
# uvloop's timers tick in milliseconds, and a batch of arrivals a tick is drawn at once.
TICK_S = 0.002
KEPT_ANSWERS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Churn:
    """What is asked of the server and for how long.

    Args:
        target: Where, what, and what must be answered.
        rate: Requests a second.
        seconds: How long.
        seed: Of the arrivals and of how long connections live.
    """

    target: Target
    rate: float
    seconds: float
    seed: int = 0


@dataclass(slots=True)
class Churned:
    """What became of the requests.

    Args:
        offered: Requests that were due.
        answered: Answered rightly.
        refused: Answered 503 or 504.
        failed: Any other status.
        wrong: Answered 200 with something else than the golden answer.
        hung: Neither answered nor closed within `HANGS_S` seconds.
        unsent: Due, but never sent: every connection was in use.
        opened: Connections.
        broken: When a connection broke while a request waited on it, on the monotonic clock, and its client's port.
    """

    offered: int = 0
    answered: int = 0
    refused: int = 0
    failed: int = 0
    wrong: int = 0
    hung: int = 0
    unsent: int = 0
    opened: int = 0
    broken: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])


def run_churn(churn: Churn) -> Churned:
    """Put the load on the server from this process."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        gc.freeze()
        return runner.run(_Crowd(churn).run())


@final
class _Crowd:
    def __init__(self, churn: Churn) -> None:
        self._churn = churn
        self._rng = np.random.default_rng(churn.seed)
        self._free: deque[_Client] = deque()
        self._queue: deque[int] = deque()
        self._clients: set[_Client] = set()
        self._opening = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._right: list[set[bytes]] = [set() for _ in churn.target.requests]
        self.counted = Churned()

    async def run(self) -> Churned:
        churn, counted = self._churn, self.counted
        sweeper = asyncio.create_task(self._sweep())
        start_s = time.monotonic()
        dues = self._dues()
        due_s = next(dues)
        while due_s < churn.seconds:
            now_s = time.monotonic() - start_s
            while due_s <= now_s and due_s < churn.seconds:
                self._offer(counted.offered % len(churn.target.requests))
                counted.offered += 1
                due_s = next(dues)
            await asyncio.sleep(TICK_S)
        end_s = time.monotonic() + HANGS_S + 1
        while (self._queue or any(client.which >= 0 for client in self._clients)) and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        counted.unsent = len(self._queue)
        sweeper.cancel()
        for client in list(self._clients):
            client.leave()
        return counted

    def _dues(self) -> Iterator[float]:
        due_s = 0.0
        while True:
            for gap_s in self._rng.exponential(1 / self._churn.rate, 4096).tolist():
                due_s += gap_s
                yield due_s

    def _offer(self, which: int) -> None:
        if self._free:
            self._free.popleft().send(which, self._churn.target.requests[which])
            return
        self._queue.append(which)
        if self._opening < len(self._queue) and len(self._clients) + self._opening < MOST_CONNECTIONS:
            self._opening += 1
            task = asyncio.get_running_loop().create_task(self._open())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open(self) -> None:
        target = self._churn.target
        uses = int(self._rng.geometric(1 / REQUESTS_EACH))
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: _Client(self, uses), target.host, target.port)
        except OSError:
            # Nobody listens, or a front-end died while it was connected; what waits is tried again.
            await asyncio.sleep(SWEEP_S)
        finally:
            self._opening -= 1

    def joined(self, client: "_Client") -> None:
        """A client has connected."""
        self.counted.opened += 1
        self._clients.add(client)
        self.free(client)

    def left(self, client: "_Client", port: int) -> None:
        """A client's connection has ended."""
        self._clients.discard(client)
        if client in self._free:
            self._free.remove(client)
        if client.which >= 0:
            self.counted.broken.append((time.monotonic(), port))

    def free(self, client: "_Client") -> None:
        """A client can ask again."""
        if self._queue:
            which = self._queue.popleft()
            client.send(which, self._churn.target.requests[which])
        else:
            self._free.append(client)

    def answered(self, which: int, status: int, content: bytes) -> None:
        """A request has its answer."""
        counted = self.counted
        if status in REFUSED:
            counted.refused += 1
        elif status != 200:
            counted.failed += 1
        elif self._is_right(which, content):
            counted.answered += 1
        else:
            counted.wrong += 1

    def _is_right(self, which: int, content: bytes) -> bool:
        if content in self._right[which]:
            return True
        target = self._churn.target
        assert target.answers is not None
        golden = target.answers[which]
        if len(content) != golden.nbytes:
            return False
        given = np.frombuffer(content, golden.dtype).reshape(golden.shape)
        # Written so that NaN counts as a difference.
        right = bool((np.abs(given.astype(np.float64) - golden) <= target.tolerance).all())
        if right and len(self._right[which]) < KEPT_ANSWERS:
            self._right[which].add(content)
        return right

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = time.monotonic()
            for client in list(self._clients):
                if client.which >= 0 and now_s - client.sent_s > HANGS_S:
                    self.counted.hung += 1
                    client.which = -1
                    client.leave()


@final
class _Client(asyncio.Protocol):
    def __init__(self, crowd: _Crowd, uses: int) -> None:
        self._crowd = crowd
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
        self._crowd.joined(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.left(self, self._port)
        self._transport = None
        self.which = -1

    def send(self, which: int, request: bytes) -> None:
        assert self._transport is not None
        self.which, self.sent_s = which, time.monotonic()
        self._uses -= 1
        self._transport.write(request)

    def leave(self) -> None:
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
        self._crowd.answered(which, int(head[9:12]), rest)
        if self._uses <= 0 or b"connection: close" in lines:
            self.leave()
        else:
            self._crowd.free(self)
