"""The clients that behave well: a process whose connections stay, and which sends one load after another over them."""

import math
import multiprocessing
import select
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import final

import numpy as np

from penstock.bench.load.generator import Floats, Load, poisson
from penstock.bench.load.sender import Sender, SenderConnection, SenderJob, Target
from penstock.bench.socket_loop import AT_ONCE
from penstock.core.errors import BenchError

# Wait for the last answers of a load; what was not answered by then counts as refused.
STRAGGLERS_S = 5.0
CONNECT_S = 20.0
# A process that starts, and imports NumPy.
START_S = 60.0
# Below this the loop polls: a sleep is not more exact.
SPIN_S = 0.000_05
FOREVER_S = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A load.

    Args:
        rate: Requests a second; their arrivals are those of a Poisson process.
        begin_s: Its begin on the monotonic clock.
        seconds: Its duration.
        seed: Seed of the arrivals.
    """

    rate: float
    begin_s: float
    seconds: float
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """Latencies of a load, as the clients saw them.

    Args:
        due_s: When each request was due, `[n]`.
        latency_s: Its latency from there, `[n]`; infinite without a right answer.
        late_s: How late the process was to send it or to queue it for a free connection, `[n]`.
        busy: Share of the time in which the process worked.
    """

    due_s: Floats
    latency_s: Floats
    late_s: Floats
    busy: float

    @property
    def refused(self) -> int:
        """Requests refused, failed or never answered."""
        return int(np.isinf(self.latency_s).sum())

    @property
    def p99_ms(self) -> float:
        """99th percentile of the latency."""
        return percentile_ms(self.latency_s)

    @property
    def late_p99_ms(self) -> float:
        """99th percentile of the process's own lateness."""
        return percentile_ms(self.late_s)


def percentile_ms(seconds: Floats) -> float:
    """Return the 99th percentile of times in seconds, in milliseconds; one of the times, never between two."""
    return float(np.percentile(seconds, 99, method="higher")) * 1e3


@final
class WellBehaved:
    """The process, from `well_behaved` until its block ends.

    Args:
        pipe: The connection to it.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._seed = 0

    def send(self, rate: float, seconds: float, begin_s: float | None = None) -> Observed:
        """Send a load and wait for its answers.

        Raises:
            BenchError: An answer was wrong, or the process ended.
        """
        self.begin(rate, seconds, begin_s)
        return self.end(seconds)

    def begin(self, rate: float, seconds: float, begin_s: float | None = None) -> None:
        """Begin a load, at a time of the monotonic clock or now."""
        self._seed += 1
        begin_s = time.monotonic() if begin_s is None else begin_s
        self._pipe.send(Order(rate=rate, begin_s=begin_s, seconds=seconds, seed=self._seed))

    def end(self, seconds: float) -> Observed:
        """Wait for the load that was begun, see `send`."""
        observed = _received(self._pipe, seconds + 2 * STRAGGLERS_S + CONNECT_S)
        assert isinstance(observed, Observed), observed
        return observed


@contextmanager
def well_behaved(target: Target, connections: int, cpus: frozenset[int] | None, seed: int) -> Generator[WellBehaved]:
    """Start the process; it has connected when the block begins.

    Raises:
        BenchError: It cannot connect.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, target, connections, cpus, seed), daemon=True)
    process.start()
    theirs.close()
    try:
        _received(ours, START_S)
        yield WellBehaved(ours)
    finally:
        with suppress(OSError):
            ours.send(None)
        process.join(START_S)


def _received(pipe: Connection, seconds: float) -> object:
    try:
        found = pipe.recv() if pipe.poll(seconds) else BenchError(f"the clients hang for {seconds:.0f} s.")
    except EOFError:
        raise BenchError("the process of the clients ended; see its error above.") from None
    if isinstance(found, BenchError):
        raise found
    return found


def _run(parent: Connection, target: Target, connections: int, cpus: frozenset[int] | None, seed: int) -> None:
    # A sleep may be longer by this; the default is 50 us.
    with suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1000")
    try:
        clients = SteadySender(target, connections, cpus, seed)
        clients.connect_all()
        parent.send("connected")
        while (order := parent.recv()) is not None:
            parent.send(clients.observe(order))
        clients.close()
    except BenchError as error:
        parent.send(error)


@final
class SteadySender(Sender):
    """Sends loads over connections that stay.

    Args:
        target: The server.
        connections: Number of connections.
        cpus: Cores of this process; None to leave them.
        seed: Seed of all arrivals.
    """

    def __init__(self, target: Target, connections: int, cpus: frozenset[int] | None, seed: int) -> None:
        now_s = time.monotonic()
        super().__init__(
            SenderJob(
                target=target,
                due_s=np.empty(0),
                start_s=now_s,
                measured_from_s=now_s,
                end_s=now_s + FOREVER_S,
                connections=connections,
                stragglers_s=STRAGGLERS_S,
                cpus=cpus,
            )
        )
        self._seed = seed
        # When requests that were due have been sent.
        self._turns_s: list[float] = []

    def connect_all(self) -> None:
        """Open the connections.

        Raises:
            BenchError: They do not open.
        """
        wanted = self.job.connections
        self._poll_until(lambda: len(self.free) == wanted, time.monotonic() + CONNECT_S)
        if len(self.free) < wanted:
            raise BenchError(f"only {len(self.free)} of {wanted} connections were accepted in {CONNECT_S:g} s.")

    def observe(self, order: Order) -> Observed:
        """Send a load, wait for its answers, and check them.

        Raises:
            BenchError: An answer was wrong.
        """
        load = Load(rate=order.rate, connections=1, seconds=order.seconds, warm_up_s=0.0, seed=order.seed)
        due_s = order.begin_s + poisson(order.rate, load, self._seed)
        self.finished, self._turns_s = [], []
        self.started = self.broken = 0
        self.dues = iter(due_s.tolist())
        time.sleep(max(0.0, order.begin_s - time.monotonic()))
        cpu_s, begun_s = time.process_time(), time.monotonic()
        self.next_due_s = next(self.dues, math.inf)
        self._poll_until(lambda: False, order.begin_s + order.seconds)
        busy = (time.process_time() - cpu_s) / (time.monotonic() - begun_s)
        self._poll_until(self.all_answered, time.monotonic() + STRAGGLERS_S)
        self._give_up()
        turns_s = np.array(self._turns_s)
        late_s = turns_s[np.searchsorted(turns_s, due_s)] - due_s
        return Observed(due_s=due_s, latency_s=self._latencies(due_s), late_s=late_s, busy=busy)

    def send_due(self, now: float) -> None:
        """Send what is due by now, and note when that was."""
        self._turns_s.append(now)
        super().send_due(now)

    def handle_events(self, wait_s: float) -> None:
        """Wait until an event or the time, and handle the events."""
        # `epoll` waits in whole milliseconds, and polling instead would take the attacker's processor from it.
        if wait_s > SPIN_S:
            select.select((self.poll.fileno(),), (), (), wait_s)
        by_number = self.by_number
        for number, events in self.poll.poll(0, AT_ONCE):
            connection = by_number.get(number)
            if connection is not None:
                connection.handle(events)

    def _give_up(self) -> None:
        """Replace the connections whose requests were not answered."""
        self.queue.clear()
        for each in list(self.by_number.values()):
            if isinstance(each, SenderConnection) and each.which >= 0:
                each.lost("no answer came")

    def _latencies(self, due_s: Floats) -> Floats:
        given = [(which, body) for _, _, which, status, body in self.finished if status == 200 and body]
        if wrong := self.job.target.count_wrong(given):
            raise BenchError(f"{wrong:,} answers are wrong; a wrong answer has no latency.")
        latency_s = np.full(len(due_s), np.inf)
        right = np.array([(due, done) for due, done, _, status, _ in self.finished if status == 200])
        if len(right):
            latency_s[np.searchsorted(due_s, right[:, 0])] = right[:, 1] - right[:, 0]
        return latency_s
