"""HTTP servers in one process that decide by the scheduler's costs and sleep where an engine would compute."""

import asyncio
import multiprocessing
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, final

import httptools
import numpy as np
import uvloop

from penstock.serve.engine.scheduler import Columns, schedule
from penstock.serve.observe.load_report import HEADER, LoadReport
from penstock.serve.table.costs import Costs

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n%b\r\nok"
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n%b\r\nno"
# More rows than admission control lets in.
SLOTS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Times of a server.

    Args:
        rows: Batch sizes, ascending from 1.
        ms: Time of each.
        budget_ms: Latency budget.
        stretch: By how many times each server takes longer; every one is equal where it is empty.
        reports: Whether each answer carries a load report.
    """

    rows: Sequence[int]
    ms: Sequence[float]
    budget_ms: float
    stretch: Sequence[float] = ()
    reports: bool = False

    def costs(self, server: int = 0) -> Costs:
        """Return them as the scheduler's costs, of one of the servers."""
        stretch = self.stretch[server] if self.stretch else 1.0
        return Costs(self.rows, [value * stretch * 1e6 for value in self.ms])

    def row_s(self, server: int = 0) -> float:
        """Return the seconds of one row in the largest batch."""
        return self.costs(server).of(self.rows[-1]) / self.rows[-1] / 1e9


@final
class PacedServers:
    """Servers that run in another process.

    Args:
        pipe: The pipe to it.

    Attributes:
        ports: Their ports.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.ports: list[int] = pipe.recv()

    def late_ms(self) -> list[float]:
        """Return how late each batch since the last call ended, in milliseconds."""
        self._pipe.send(None)
        return self._pipe.recv()


@contextmanager
def paced_servers(count: int, pace: Pace) -> Generator[PacedServers]:
    """Run so many servers in a process of their own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(count, pace, theirs), daemon=True)
    process.start()
    try:
        yield PacedServers(ours)
    finally:
        process.terminate()
        process.join()


def _serve(count: int, pace: Pace, ready: Connection) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_listen(count, pace, ready))


async def _listen(count: int, pace: Pace, ready: Connection) -> None:
    loop = asyncio.get_running_loop()
    ports: list[int] = []
    servers: list[asyncio.Server] = []
    late_ms: list[float] = []
    for number in range(count):
        paced = PacedEngine(
            loop=loop,
            costs=pace.costs(number),
            budget_ns=round(pace.budget_ms * 1e6),
            late_ms=late_ms,
            row_s=pace.row_s(number) if pace.reports else None,
        )
        server = await loop.create_server(lambda paced=paced: _Connection(paced), "127.0.0.1", 0)
        servers.append(server)
        ports.append(server.sockets[0].getsockname()[1])
    ready.send(ports)

    def report() -> None:
        ready.recv()
        ready.send(late_ms)
        late_ms.clear()

    loop.add_reader(ready.fileno(), report)
    await asyncio.gather(*(server.serve_forever() for server in servers))


@final
@dataclass(slots=True, eq=False)
class PacedEngine:
    """Slots, admission and batches of one server.

    Args:
        loop: The event loop, whose clock is read.
        costs: The costs; a batch takes what they say.
        budget_ns: Latency budget.
        late_ms: Takes how late each batch ended.
        row_s: Seconds of one row at full load, for load reports; None for answers without.
    """

    loop: asyncio.AbstractEventLoop
    costs: Costs
    budget_ns: int
    late_ms: list[float]
    row_s: float | None = None
    _waiting: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(SLOTS, np.int64))
    _deadline_ns: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros((SLOTS, 1), np.int64))
    _zeros: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(SLOTS, np.int64))
    _clients: dict[int, "_Connection"] = field(default_factory=dict[int, "_Connection"])
    _free: list[int] = field(default_factory=lambda: list(range(SLOTS)))
    _due_s: float = 0.0
    _running: bool = False

    def submit(self, client: "_Connection") -> None:
        """Admit or refuse a request."""
        held = SLOTS - len(self._free)
        if held and self.costs.finish_ns(held) > self.budget_ns:
            client.reply(REFUSAL % self._report())
            return
        slot = self._free.pop()
        self._clients[slot] = client
        self._waiting[slot], self._deadline_ns[slot] = 1, time.monotonic_ns() + self.budget_ns
        if not self._running:
            self._due_s = self.loop.time()
            self._run()

    def _run(self) -> None:
        """Start the next batch when the last one was due to end, so that late timers do not add up."""
        zeros = self._zeros
        columns = Columns(self._waiting, zeros, zeros, zeros, zeros, self._deadline_ns, zeros[:, None])
        chosen = schedule(columns, time.monotonic_ns(), self.costs)
        self._answer(chosen.expire.tolist(), REFUSAL)
        run = chosen.run.tolist()
        self._waiting[chosen.run] = 0
        self._running = bool(run)
        if run:
            self._due_s = max(self._due_s, self.loop.time() - 0.005) + self.costs.of(len(run)) / 1e9
            self.loop.call_at(self._due_s, self._end, run)

    def _end(self, run: list[int]) -> None:
        self.late_ms.append((self.loop.time() - self._due_s) * 1e3)
        self._answer(run, ANSWER)
        self._run()

    def _answer(self, slots: list[int], answer: bytes) -> None:
        for slot in slots:
            self._waiting[slot] = 0
            self._free.append(slot)
            self._clients.pop(slot).reply(answer % self._report())

    def _report(self) -> bytes:
        """Return the line of a load report, which has the capacity, not the rate."""
        if self.row_s is None:
            return b""
        finish_ms = self.costs.finish_ns(SLOTS - len(self._free)) / 1e6
        report = LoadReport(utilisation=self.row_s, rows_s=1.0, finish_ms=finish_ms)
        return f"{HEADER}: {report.encode('text')}\r\n".encode()


@final
class _Connection(asyncio.Protocol):
    def __init__(self, engine: PacedEngine) -> None:
        self._engine, self._parser = engine, httptools.HttpRequestParser(self)
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._engine.submit(self)

    def reply(self, answer: bytes) -> None:
        self._transport.write(answer)
