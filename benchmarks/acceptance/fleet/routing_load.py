"""A load that runs until it is stopped, for drills of unknown duration."""

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, final

import numpy as np

from penstock.bench.load.sender import Sender, SenderJob, SenderResult, Target

STRAGGLERS_S = 20.0
CONNECT_S = 0.5


@final
class _EndlessSender(Sender):
    """Sends the requests of a Poisson process until `over` is set."""

    def __init__(self, target: Target, rate: float, connections: int, over: threading.Event) -> None:
        start_s = time.monotonic() + CONNECT_S
        super().__init__(
            SenderJob(
                target=target,
                due_s=None,
                start_s=start_s,
                measured_from_s=start_s,
                end_s=math.inf,
                connections=connections,
                stragglers_s=STRAGGLERS_S,
                cpus=None,
            )
        )
        self._over = over
        self.closed_loop = False
        self.dues = self._arrivals(start_s, rate)
        self.next_due_s = next(self.dues)

    def _arrivals(self, now_s: float, rate: float) -> Iterator[float]:
        gaps = np.random.default_rng(0)
        while not self._over.is_set():
            now_s += gaps.exponential(1 / rate)
            yield now_s

    def send_all(self) -> None:
        """Connect, send until it is over, and wait for the last answers."""
        self._poll_until(lambda: self._over.is_set() and self.next_due_s == math.inf, math.inf)
        self._poll_until(self.all_answered, time.monotonic() + self.job.stragglers_s)
        self.close()


@final
class EndlessLoad:
    """Sends requests in a thread while its block runs.

    Args:
        target: The server or the proxy.
        rate: Requests a second.
        connections: Connections.
    """

    def __init__(self, target: Target, rate: float, connections: int = 16) -> None:
        self._over = threading.Event()
        self._sender = _EndlessSender(target, rate, connections, self._over)
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        self._result = self._pool.submit(self._sender.run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._pool.shutdown(wait=True)

    @property
    def result(self) -> SenderResult:
        """Outcomes of the requests, after the block."""
        return self._result.result()


def lost_of(result: SenderResult) -> int:
    """Count the requests without a right answer."""
    return result.offered - len(result.latency_s) + result.wrong
