"""A front-end under overload on a simulated clock: the real connections, lanes, table, engine and admission control.

Only the clock, the sockets and the network are simulated, with fixed costs, so that a result does not depend on the
machine. Every client has one connection and one request at a time.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast, final

import numpy as np

from penstock.core.spec import TensorSpec
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.engine.engine import Engine
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Handlers, rejected
from penstock.serve.fair_turns import FairTurns
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.http.connection import Connection
from penstock.serve.http.lane import Lane
from penstock.serve.http.parser import HeadCache, RequestParser
from penstock.serve.http.plain_body import RAW
from penstock.serve.http.refusals import SHARE, Refusals
from penstock.serve.http.response_date import ResponseDate
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import SlotTable, TableLayout

US, MS = 1_000, 1_000_000
BUDGET_NS = 50 * MS
POLL_NS = 5 * US
# Events of a poll, and polls of an iteration at most: those of libuv.
EVENTS, POLLS = 1_024, 48
SLOTS = 4_096
REQUEST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Type: application/octet-stream\r\nContent-Length: 4\r\n\r\n" + bytes(
    4
)
INPUT = TensorSpec(dtype="uint8", shape=(4,), meaning="bytes")
OUTPUT = TensorSpec(dtype="float32", shape=(1,), meaning="a number", name="output")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Processor time of the parts of a request.

    Args:
        read_ns: Of what is read.
        write_ns: Of what is written.
        admit_ns: Of an admitted request.
        batch_ns: Of a batch, beside its rows.
        row_ns: Of a row.
    """

    read_ns: int = 6 * US
    write_ns: int = 10 * US
    admit_ns: int = 8 * US
    batch_ns: int = 150 * US
    row_ns: int = 7 * US

    @property
    def capacity(self) -> float:
        """Answers a second at most, in large batches."""
        return 1e9 / (self.read_ns + self.write_ns + self.admit_ns + self.row_ns)


CAPACITY = Spent().capacity


@final
class _Clock:
    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def ns(self) -> int:
        return self.now_ns

    def spend(self, ns: int) -> None:
        self.now_ns += ns


@final
class _Network(Executor):
    def __init__(self, clock: _Clock, spent: Spent) -> None:
        self.input, self.output, self.max_rows = INPUT, OUTPUT, SLOTS
        self._spent = spent
        self._clock, self._answer = clock, np.zeros((SLOTS, 1), np.float32)

    def step(self, batch: StepInput) -> StepOutput:
        self._clock.spend(self._spent.batch_ns + self._spent.row_ns * batch.slots_B.size)
        return StepOutput(output_B=self._answer[: batch.slots_B.size])


@dataclass(eq=False, slots=True)
class Client:
    """A client with one connection.

    Args:
        simulation: The simulation.
        connection: The server's side.
        due_ns: When its request was due; -1 without one.
        sent_ns: When it was sent.
    """

    simulation: "Simulation"
    connection: Any = None
    due_ns: int = -1
    sent_ns: int = -1

    def write(self, data: bytes) -> None:
        """Take an answer."""
        self.simulation.clock.spend(self.simulation.spent.write_ns)
        self.simulation.answered(self, int(data[9:12]))

    def get_extra_info(self, name: str) -> None:
        """Nothing is known of the socket."""

    def set_write_buffer_limits(self, high: int) -> None:
        """All is read at once."""

    def get_write_buffer_size(self) -> int:
        """All is read at once."""
        return 0

    def is_closing(self) -> bool:
        """It never closes."""
        return False

    def pause_reading(self) -> None:
        """It has one request at a time."""

    resume_reading = pause_reading


@dataclass(slots=True)
class Outcome:
    """What became of the requests that were due after the warm-up.

    Args:
        good: Answered within the budget, from when they were due.
        late: Answered later.
        refused: Refused.
        longest_refusal_ms: Longest time from sending a request to its refusal.
        spent_ns: Busy time of the loop.
    """

    good: int = 0
    late: int = 0
    refused: int = 0
    longest_refusal_ms: float = 0.0
    spent_ns: int = 0


@final
@dataclass(eq=False)
class Simulation:
    """One front-end and its clients.

    Args:
        connections: Clients.
        rate: Requests a second that are due, at the times of a Poisson process; None for clients that send at once
            when they are answered, and again at once when they are refused.
        seconds: Duration after the warm-up.
        share: Share of the time for refusals.
        warm_up_s: Duration before it.
        seed: Of the arrivals.
        retry_ns: A client that was refused sends again after this time, if there is no rate.
        spent: What each part of a request costs.
    """

    connections: int
    rate: float | None
    seconds: float = 0.5
    share: float = SHARE
    warm_up_s: float = 0.3
    seed: int = 0
    retry_ns: int = 50 * US
    spent: Spent = field(default_factory=Spent)
    outcome: Outcome = field(default_factory=Outcome)

    def __post_init__(self) -> None:
        self.clock = clock = _Clock()
        self._ready: deque[Callable[[], None]] = deque()
        table = SlotTable.private(TableLayout(slots=SLOTS, chunks=1, input=INPUT, output=OUTPUT))
        rows = [1, 8, 64, 256, 1024]
        costs = Costs(rows, [float(self.spent.batch_ns + self.spent.row_ns * each) for each in rows])
        self.engine = Engine(_Network(clock, self.spent), table, budget_ns=BUDGET_NS, clock_ns=clock.ns, costs=costs)
        call_soon = self._ready.append
        self.batch_loop = BatchLoop(self._work, call_soon=call_soon, clock_ns=clock.ns, max_read_ns=BUDGET_NS // 10)
        self.batch_loop.turns = FairTurns(clock.ns, clock.ns, lambda: SimpleNamespace(call_soon=call_soon))
        self.writer = TableWriter(
            table, budget_ns=BUDGET_NS, wake=self.batch_loop.wake, margin_ns=self.batch_loop.max_read_ns // 2
        )
        self.refusals = Refusals(BUDGET_NS, call_soon, clock.ns, self.share)
        self._make_clients()
        self._start_ns = clock.now_ns + int(self.warm_up_s * 1e9)
        self._end_ns = self._start_ns + int(self.seconds * 1e9)
        rng = np.random.default_rng(self.seed)
        self._due: deque[int] = deque()
        if self.rate is not None:
            length_s = self.warm_up_s + self.seconds
            times_s = rng.exponential(1 / self.rate, int(self.rate * length_s * 1.2)).cumsum()
            self._due.extend((clock.now_ns + (times_s[times_s < length_s] * 1e9).astype(int)).tolist())
        self._free = deque(self.clients)
        # Requests that have come, in order, and clients that wait before they send again.
        self._arrived: deque[Client] = deque()
        self._later: list[tuple[int, int, Client]] = []
        self._queue: deque[int] = deque()

    def _make_clients(self) -> None:
        head = Head("POST", "/", {"content-type": RAW, "content-length": "4"})
        cache = HeadCache()
        cache.learn(REQUEST, Request(head, bytes(4)))
        writer = self.writer
        served = SimpleNamespace(
            writer=writer, engine_lost=False, counts=writer.counts, budget_ns=BUDGET_NS, name="simulated"
        )
        call: Any = SimpleNamespace(
            served=served,
            raw_bytes=4,
            content_type=RAW,
            raw_reply=True,
            headers=(),
            budget_ns=None,
            low_priority=False,
            rejects_early=True,
            finish=lambda answer, status, output, last: answer(rejected(served_error(status))),
        )
        lane = head.lane = Lane(call, head, cast(Any, SimpleNamespace(epoch=0)), ResponseDate())
        admit = lane.submit

        class Charged:
            """The lane, with the cost of a request that is admitted."""

            answering = lane
            reject = staticmethod(lane.reject)

            @staticmethod
            def submit(data: bytes, done: Any, arrival_ns: int, now_ns: int) -> Any:
                taken = admit(data, done, arrival_ns, now_ns)
                if not isinstance(taken, bytes):
                    self.clock.spend(self.spent.admit_ns)
                return taken

        head.lane = Charged
        handlers = Handlers(handle=cast(Any, None), reject=cast(Any, None))
        self.clients: list[Client] = []
        for _ in range(self.connections):
            client = Client(self)
            client.connection = Connection(
                handlers,
                set(),
                RequestParser(lambda head: 4, cache),
                self.batch_loop,
                self.clock.ns,
                lambda: False,
                # The kernel's time of the newest bytes.
                lambda client=client: self.clock.now_ns - client.sent_ns,
                refusals=self.refusals,
            )
            client.connection.connection_made(cast(asyncio.Transport, client))
            usage = client.connection.usage
            usage.young = usage.unusual = False
            self.clients.append(client)

    def _work(self) -> int:
        batch = self.engine.tick(self.clock.now_ns)
        rows = batch.run.size + batch.expire.size
        if rows:
            begin_ns = self.clock.now_ns
            self.writer.collect()
            self.engine.costs.observe_handling((self.clock.now_ns - begin_ns) / rows)
            self.writer.refresh(self.batch_loop.reading_share, self.clock.now_ns)
        return rows

    def answered(self, client: Client, status: int) -> None:
        """Count an answer, and let the client send its next request."""
        now_ns, counted = self.clock.now_ns, self.outcome
        if self._start_ns <= client.due_ns < self._end_ns:
            if status == 200:
                counted.good += now_ns - client.due_ns <= BUDGET_NS
                counted.late += now_ns - client.due_ns > BUDGET_NS
            else:
                counted.refused += 1
                counted.longest_refusal_ms = max(counted.longest_refusal_ms, (now_ns - client.sent_ns) / 1e6)
        client.due_ns = -1
        if self.rate is None:
            heapq.heappush(self._later, (now_ns + self.retry_ns, id(client), client))
        elif self._queue:
            self._send(client, self._queue.popleft(), now_ns)
        else:
            self._free.append(client)

    def _send(self, client: Client, due_ns: int, now_ns: int) -> None:
        client.due_ns, client.sent_ns = due_ns, now_ns
        self._arrived.append(client)

    def _send_due(self) -> None:
        now_ns = self.clock.now_ns
        while self._due and self._due[0] <= now_ns:
            due_ns = self._due.popleft()
            if self._free:
                self._send(self._free.popleft(), due_ns, due_ns)
            else:
                self._queue.append(due_ns)
        while self._later and self._later[0][0] <= now_ns:
            due_ns, _, client = heapq.heappop(self._later)
            self._send(client, due_ns, due_ns)

    def run(self) -> Outcome:
        """Simulate until all that was due is answered, or a budget has passed."""
        if self.rate is None:
            for place, client in enumerate(self._free):
                heapq.heappush(self._later, (self.clock.now_ns + place * US, id(client), client))
        clock = self.clock
        while clock.now_ns < self._end_ns + 5 * BUDGET_NS:
            begin_ns = clock.now_ns
            for _ in range(len(self._ready)):
                self._ready.popleft()()
            # libuv polls again at once, without other callbacks, where a poll was full.
            for _ in range(POLLS):
                self._send_due()
                clock.spend(POLL_NS)
                events = min(EVENTS, len(self._arrived))
                for _ in range(events):
                    client = self._arrived.popleft()
                    clock.spend(self.spent.read_ns)
                    client.connection.data_received(REQUEST)
                    # What comes meanwhile is for the next poll.
                if events < EVENTS:
                    break
            busy_ns = clock.now_ns - begin_ns
            if self._start_ns <= begin_ns < self._end_ns:
                self.outcome.spent_ns += busy_ns
            if not self._ready and not self._arrived:
                nexts = [waiting[0][0] for waiting in (self._later,) if waiting]
                nexts += [self._due[0]] if self._due else []
                if not nexts:
                    break
                clock.now_ns = max(clock.now_ns, min(nexts))
        return self.outcome


def served_error(status: int) -> Any:
    """Return the error of a row without a result."""
    from penstock.serve.registry.served_model import status_error

    return status_error(status, BUDGET_NS)
