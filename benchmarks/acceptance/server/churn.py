"""An open-loop load of clients that come and go and record the outcome of every request.

Requests are due at the times of a Poisson process. Each connection is used for a random number of requests and closed.
Only counts are kept, so that memory does not grow with the duration.
"""

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

import numpy as np

from penstock.bench.load.sender import REFUSED, Sender, SenderConnection, SenderJob, Target

# Requests of a connection, on average.
REQUESTS_EACH = 50
MAX_CONNECTIONS = 512
# Without an answer or a closed connection for this long, a request hangs.
HANG_S = 5.0
SWEEP_S = 0.25
KEPT_ANSWERS = 64


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


def run_churn(target: Target, rate: float, seconds: float, seed: int) -> ChurnResult:
    """Send a load from this process.

    Args:
        target: The server, its requests and golden answers.
        rate: Requests a second.
        seconds: Duration.
        seed: Seed of the arrivals and of the connections' lengths.
    """
    start_s = time.monotonic()
    job = SenderJob(
        target=target,
        due_s=np.empty(0),
        start_s=start_s,
        measured_from_s=start_s,
        end_s=start_s + seconds,
        connections=0,
        stragglers_s=HANG_S + 1,
        cpus=None,
    )
    sender = _ChurnSender(job, rate, seed)
    # The sender turns the collector off, which is for seconds, not for half an hour.
    gc.freeze()
    gc.enable()
    sender.send_all()
    sender.counted.unsent = len(sender.queue)
    return sender.counted


@final
class _ChurnSender(Sender):
    """Opens a connection where a request waits for one, and closes it after its last request."""

    def __init__(self, job: SenderJob, rate: float, seed: int) -> None:
        super().__init__(job)
        self.open_until_s = job.end_s + HANG_S
        self.counted = ChurnResult()
        self.rng = np.random.default_rng(seed)
        self.dues = self._arrivals(rate)
        self.next_due_s = next(self.dues, math.inf)
        self._sweep_s = 0.0
        self._right: list[set[bytes]] = [set() for _ in job.target.requests]

    def _arrivals(self, rate: float) -> Iterator[float]:
        due_s = self.job.start_s
        while True:
            for gap_s in self.rng.exponential(1 / rate, 4096).tolist():
                due_s += gap_s
                if due_s >= self.job.end_s:
                    return
                self.counted.offered += 1
                yield due_s

    def all_answered(self) -> bool:
        return (
            self.next_due_s == math.inf
            and not self.queue
            and all(connection.which < 0 for connection in self._clients())
        )

    def send_due(self, now: float) -> None:
        super().send_due(now)
        self.open_for_queue()

    def send_next(self, connection: SenderConnection) -> None:
        assert isinstance(connection, _ChurnConnection)
        if connection.uses:
            connection.uses -= 1
            super().send_next(connection)
        else:
            connection.close()
            self.open_for_queue()

    def lost(self, connection: SenderConnection, unanswered: bool) -> None:
        super().lost(connection, unanswered)
        self.open_for_queue()
        if unanswered:
            assert isinstance(connection, _ChurnConnection)
            self.counted.broken.append((time.monotonic(), connection.port))

    def connect(self) -> None:
        _ChurnConnection(self)

    def open_for_queue(self) -> None:
        """Open as many connections as there are queued requests without one."""
        if not self.queue:
            self.missing = 0
            return
        opening = sum(connection.opening for connection in self.by_number.values())
        self.missing = max(0, min(len(self.queue) - opening, MAX_CONNECTIONS - len(self.by_number)))

    def answered(self, due_s: float, now: float, which: int, status: int, body: bytes) -> None:
        counted = self.counted
        if status in REFUSED:
            counted.rejected += 1
        elif status != 200:
            counted.failed += 1
        elif self._is_right(which, body):
            counted.answered += 1
        else:
            counted.wrong += 1

    def handle_events(self, wait_s: float) -> None:
        super().handle_events(wait_s)
        now_s = time.monotonic()
        if now_s < self._sweep_s:
            return
        self._sweep_s = now_s + SWEEP_S
        for connection in self._clients():
            if connection.which >= 0 and now_s - connection.sent_s > HANG_S:
                self.counted.hung += 1
                connection.close()

    def _clients(self) -> "list[_ChurnConnection]":
        return [connection for connection in self.by_number.values() if isinstance(connection, _ChurnConnection)]

    def _is_right(self, which: int, content: bytes) -> bool:
        if content in self._right[which]:
            return True
        right = not self.job.target.count_wrong([(which, content)])
        if right and len(self._right[which]) < KEPT_ANSWERS:
            self._right[which].add(content)
        return right


@final
class _ChurnConnection(SenderConnection):
    def __init__(self, sender: _ChurnSender) -> None:
        super().__init__(sender)
        self.uses = int(sender.rng.geometric(1 / REQUESTS_EACH))
        self.port = 0
        self.sent_s = 0.0
        self._counted = sender.counted

    def opened(self) -> None:
        self._counted.opened += 1
        self.port = self._socket.getsockname()[1]
        super().opened()

    def send(self, due_s: float, which: int) -> None:
        self.sent_s = time.monotonic()
        super().send(due_s, which)
