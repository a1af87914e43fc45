"""Live streams of a model whose engines die and come back, without processes and sockets, on a clock of the test."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, final

from penstock.core.application import Application
from penstock.core.errors import RequestError
from penstock.core.streams.live import Live
from penstock.runtime.executor import StepInput, StepOutput
from penstock.serve.engine.engine import Engine
from penstock.serve.exchange.peer import Peer
from penstock.serve.exchange.request_bounds import RequestBounds
from penstock.serve.frontend.second_tries import SecondTries
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.registry.served_model import status_error
from penstock.serve.streams.quotas import StreamClient
from penstock.serve.streams.replay_ring import ReplayLimits, ReplayMemory
from penstock.serve.streams.resumptions import Resumptions
from penstock.serve.streams.sequences import Sequences
from penstock.serve.streams.stream_balancer import StreamBalancer, resume_waiting
from penstock.serve.streams.stream_tickets import StreamTickets
from penstock.serve.streams.streams import Member, Streams
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import ENGINE_LOST, ONE_ENGINE_LOST, SlotTable, TableLayout
from penstock.serve.websocket.live_stream import LiveStream
from penstock.serve.websocket.shared_connection import Make, SharedConnection
from penstock.serve.websocket.stream_connection import StreamConnection
from tests.support.clock import idle_loop
from tests.support.shared_streams import SharedCaller, settle
from tests.support.streams import BUDGET_NS, MS, SOUND, STATE_BYTES, SUMS, Caller, Sums, Wire

POISON = 19


class Died(BaseException):
    """The end of an engine's process while it runs a batch."""


@final
class MortalSums(Sums):
    """Running sums of a process that ends when it is told to, and at a sample of 19."""

    dies = False

    def step(self, batch: StepInput) -> StepOutput:
        if self.dies or (batch.chunk_B == POISON).any():
            raise Died
        return super().step(batch)


@dataclass(eq=False)
class Replica:
    """One engine with its table."""

    executor: MortalSums
    engine: Engine
    streams: Streams


class MortalWorld:
    """A server of running sums in several engines."""

    def __init__(
        self,
        engines: int = 2,
        *,
        chunks: int = 2,
        slots: int = 8,
        ring_s: float = 60.0,
        max_bytes: int = 1 << 20,
        wait_s: float = 30.0,
        curve: Costs | None = None,
        headroom: float = 0.0,
        live: Live | None = None,
        tickets: StreamTickets | None = None,
    ) -> None:
        self.now_ns = 1_000 * MS
        self._tickets = tickets
        self._slots, self._curve, self._headroom = slots, curve or Costs([1, slots], [1000.0, 1000.0]), headroom
        self.application = Application(
            name="sums",
            input=SOUND,
            output=SUMS,
            live=live or Live(rate_hz=1000),
            chunks=chunks,
            model="nobody:asks",
        )
        self.bounds = RequestBounds(max_bytes=max_bytes)
        self.memory = ReplayMemory(self.bounds)
        self._limits = ReplayLimits(self.memory, ring_s, wait_s)
        self.waiting: Resumptions[Member] = Resumptions(self.clock, wait_s)
        self.tries = SecondTries(self.clock)
        self.batch_loop = idle_loop(self.clock)
        self.batch_loop.turns.loop = lambda: cast(Any, self)
        self.replicas: dict[int, Replica] = {}
        # Shared with the balancer, as in `ServedModel`.
        self._streams: list[Streams] = []
        for index in range(engines):
            self.restart(index)
        self.balancer = StreamBalancer(self._streams)
        self.sequences = Sequences(self.balancer, idle_ns=10**15)
        self.peers: set[Peer] = set()
        self.soon: list[Callable[[], None]] = []

    def clock(self) -> int:
        self.now_ns += 1_000
        return self.now_ns

    def count(self, column: int) -> int:
        """A count of all tables there were since the last one died."""
        return sum(replica.streams.counts[column] for replica in self.replicas.values())

    def restart(self, index: int) -> None:
        """Start an engine, if it does not run."""
        if index in self.replicas:
            return
        layout = TableLayout(
            slots=self._slots,
            chunks=self.application.chunks,
            input=SOUND,
            output=SUMS,
            state_bytes=0 if self._tickets is None else STATE_BYTES,
        )
        table = SlotTable.private(layout)
        executor = MortalSums(self._slots)
        engine = Engine(executor, table, budget_ns=BUDGET_NS, clock_ns=self.clock, costs=self._curve)
        streams = Streams(
            name="sums",
            application=self.application,
            writer=TableWriter(table, budget_ns=BUDGET_NS, wake=lambda: None),
            table=table,
            budget_ns=BUDGET_NS,
            batch_loop=self.batch_loop,
            now_ns=self.clock,
            error_of_status=_error_of_status,
            resumptions=self.waiting,
            replay=self._limits,
            headroom=self._headroom,
            tickets=self._tickets,
        )
        self.replicas[index] = Replica(executor, engine, streams)
        self._list()
        resume_waiting(self._streams)

    def kill(self, index: int) -> None:
        """End an engine, as a front-end sees it."""
        if index not in self.replicas:
            return
        lost = self.replicas.pop(index)
        if self.replicas:
            self._list()
        lost.streams.lose()
        lost.streams.writer.collect()
        others = [replica.streams.writer for replica in self.replicas.values()]
        self.tries.settle(lost.streams.writer, others, ONE_ENGINE_LOST if others else ENGINE_LOST)
        if self.replicas:
            resume_waiting(self._streams)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call in the next tick, as an event loop does in its next iteration."""
        self.soon.append(call)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Let the time pass at once."""
        self.now_ns += int(seconds * 1e9)
        self.soon.append(call)

    def call(self) -> Caller:
        """Open a stream on a connection of its own."""
        wire, now_s = Wire(), [0.0]
        socket = StreamConnection(self._admit, lambda: now_s[0], client="me")
        socket.take_over(cast(asyncio.Transport, wire), b"", self.peers)
        return Caller(socket, wire, now_s)

    def share(self) -> SharedCaller:
        """Open a connection for many streams."""
        wire, now_s = Wire(), [0.0]

        def admit(name: str, make: Make) -> LiveStream:
            return self._admit(lambda streams: make(streams, None))

        socket = SharedConnection(admit, self.batch_loop, lambda: now_s[0], self.bounds)
        socket.take_over(cast(asyncio.Transport, wire), b"", self.peers)
        return SharedCaller(socket, wire, now_s)

    def step(self, index: int) -> int:
        """Let one engine run a batch, whose results are not handed out yet."""
        replica = self.replicas.get(index)
        if replica is None:
            return 0
        try:
            chosen = replica.engine.tick(self.clock())
        except Died:
            self.kill(index)
            return 1
        return chosen.run.size + chosen.expire.size

    def tick(self) -> int:
        """Let everything go on by one step; returns what moved."""
        soon, self.soon = self.soon, []
        for call in soon:
            call()
        moved = len(soon)
        for index in list(self.replicas):
            moved += self.step(index)
        for replica in list(self.replicas.values()):
            replica.streams.writer.collect()
        if self.replicas and self.waiting.waiting:
            moved += resume_waiting(self._streams)
        return moved

    def settle(self, *callers: Caller | SharedCaller) -> None:
        """Let all go on until nothing moves."""
        settle(self, *callers)

    def _admit(self, make: Callable[[Streams], LiveStream]) -> LiveStream:
        return self.balancer.admit_stream(make, BUDGET_NS, StreamClient("me"))

    def _list(self) -> None:
        self._streams[:] = [self.replicas[index].streams for index in sorted(self.replicas)]


def _error_of_status(status: int, budget_ns: int | None) -> RequestError:
    return status_error(status, BUDGET_NS)
