"""Live streams without sockets: frames, sessions, a slot table and a real engine, on a clock of the test."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
from websockets.frames import Frame, Opcode

from penstock.core.application import Application
from penstock.core.errors import ComputeFailed, Overloaded, RequestError
from penstock.core.spec import Array, TensorSpec
from penstock.core.streams.live import Live
from penstock.runtime.executor import Executor, Rows, StepInput, StepOutput
from penstock.serve.engine.engine import Engine
from penstock.serve.exchange.peer import Peer
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.streams.stream_tickets import StreamTickets
from penstock.serve.streams.streams import Streams
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import ENGINE_LOST, SlotTable, TableLayout
from penstock.serve.websocket.stream_connection import StreamConnection
from tests.support.clock import idle_loop

MS = 1_000_000
FRAMES = 4
BUDGET_NS = 50 * MS
STATE_BYTES = 4
SOUND = TensorSpec(dtype="int16", shape=(FRAMES,), meaning="sound", name="sound")
SUMS = TensorSpec(dtype="float32", shape=(FRAMES + 1, 1), meaning="sums", name="sums")


class Sums(Executor):
    """The sum of a stream's frames so far, after each of them; its end says -1 once more. 13 raises, 17 gives NaN."""

    def __init__(self, slots: int) -> None:
        self.input, self.output, self.max_rows = SOUND, SUMS, slots
        self.state_bytes, self.state_layout = STATE_BYTES, "float32[]"
        self._state = np.zeros(slots, np.float32)

    def step(self, batch: StepInput) -> StepOutput:
        assert batch.last_B is not None
        valid_BT = np.arange(FRAMES) < batch.length_B[:, None]
        chunk_BT = np.where(valid_BT, batch.chunk_B, 0)
        if (chunk_BT == 13).any():
            raise ValueError("thirteen")
        before_B = np.where(batch.fresh_B, 0, self._state[batch.slots_B])
        sums_BT = before_B[:, None] + chunk_BT.cumsum(1)
        self._state[batch.slots_B] = sums_BT[:, -1]
        output = np.full((len(chunk_BT), FRAMES + 1, 1), -1, np.float32)
        output[:, :FRAMES, 0] = np.where((chunk_BT == 17).any(1)[:, None], np.nan, sums_BT)
        rows = np.arange(len(chunk_BT))
        output[rows, batch.length_B, 0] = -1
        return StepOutput(output_B=output, length_B=batch.length_B + batch.last_B)

    def begin_read(self, slots_B: Rows) -> Array:
        return self._state[slots_B].view(np.uint8).reshape(-1, STATE_BYTES)

    def write_states(self, slots_B: Rows, state_BS: Array) -> None:
        self._state[slots_B] = state_BS.copy().view(np.float32)[:, 0]


@dataclass
class Wire:
    """A transport whose client the test plays: it reads what was written when it likes."""

    unread: bytes = b""
    paused: bool = False
    ended: str = ""

    def set_protocol(self, protocol: asyncio.Protocol) -> None:
        pass

    def write(self, data: bytes) -> None:
        assert not self.ended
        self.unread += data

    def get_write_buffer_size(self) -> int:
        return len(self.unread)

    def pause_reading(self) -> None:
        assert not self.paused
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused
        self.paused = False

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = self.ended or "close"

    def abort(self) -> None:
        self.ended = "abort"


@dataclass(eq=False)
class Caller:
    """A client and the messages that it received."""

    socket: StreamConnection
    wire: Wire
    now_s: list[float]
    said: list[Any] = field(default_factory=list[Any])
    closed: tuple[int, str] | None = None
    held: bytes = b""

    def send(self, opcode: int, payload: bytes) -> None:
        self.feed(Frame(Opcode(opcode), payload).serialize(mask=True))

    def start(self, **fields: Any) -> None:
        self.send(1, json.dumps({"type": "start"} | fields).encode())

    def chunk(self, number: int, *samples: int) -> None:
        self.send(2, number.to_bytes(4, "little") + np.array(samples, np.int16).tobytes())

    def flush(self) -> None:
        self.send(1, b'{"type":"flush"}')

    def end(self) -> None:
        self.send(1, b'{"type":"end"}')

    def feed(self, data: bytes) -> None:
        """Send bytes; as many as fit while the server does not read."""
        self.held += data
        self.flow()

    def flow(self) -> None:
        if not self.wire.paused and not self.wire.ended and self.held:
            data, self.held = self.held, b""
            self.socket.data_received(data)

    def read(self) -> None:
        """Take what the server wrote."""
        data, self.wire.unread = self.wire.unread, b""
        while data:
            opcode, size, at = data[0] & 15, data[1], 2
            if size == 126:
                size, at = int.from_bytes(data[2:4], "big"), 4
            payload, data = data[at : at + size], data[at + size :]
            if opcode == 8:
                self.closed = int.from_bytes(payload[:2], "big"), payload[2:].decode()
                assert not data
            else:
                self.said.append(json.loads(payload) if opcode == 1 else payload)


class World:
    """A server of running sums."""

    def __init__(
        self,
        slots: int = 8,
        chunks: int = 2,
        curve: Costs | None = None,
        tickets: StreamTickets | None = None,
        live: Live | None = None,
        executor: Sums | None = None,
    ) -> None:
        self.now_ns = 1_000 * MS
        state_bytes = 0 if tickets is None else STATE_BYTES
        layout = TableLayout(slots=slots, chunks=chunks, input=SOUND, output=SUMS, state_bytes=state_bytes)
        self.table = SlotTable.private(layout)
        self.engine = Engine(
            executor or Sums(slots),
            self.table,
            budget_ns=BUDGET_NS,
            clock_ns=self.clock,
            costs=curve or Costs([1, max(slots, 2)], [1000.0, 1000.0]),
        )
        self.frontend = TableWriter(self.table, budget_ns=BUDGET_NS, wake=lambda: None)
        application = Application(
            name="sums", input=SOUND, output=SUMS, live=live or Live(rate_hz=1000), chunks=chunks, model="nobody:asks"
        )
        self.streams = Streams(
            name="sums",
            application=application,
            writer=self.frontend,
            table=self.table,
            budget_ns=BUDGET_NS,
            batch_loop=idle_loop(self.clock),
            now_ns=self.clock,
            error_of_status=_error_of_status,
            tickets=tickets,
        )
        self.peers: set[Peer] = set()
        self.soon: list[Callable[[], None]] = []
        self.streams.batch_loop.turns.loop = self.loop

    def loop(self) -> Any:
        """The running loop, or where there is none, this world as one."""
        try:
            return asyncio.get_running_loop()
        except RuntimeError:
            return self

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call in the next tick, as an event loop does in its next iteration."""
        self.soon.append(call)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Let the time pass at once."""
        self.now_ns += int(seconds * 1e9)
        self.soon.append(call)

    def clock(self) -> int:
        self.now_ns += 1_000
        return self.now_ns

    def call(self) -> Caller:
        wire = Wire()
        now_s = [0.0]
        admit = partial(self.streams.admit_stream, budget_ns=BUDGET_NS)
        socket = StreamConnection(admit, lambda: now_s[0], client="me")
        socket.take_over(cast(asyncio.Transport, wire), b"", self.peers)
        return Caller(socket, wire, now_s)

    def tick(self) -> int:
        soon, self.soon = self.soon, []
        for call in soon:
            call()
        chosen = self.engine.tick(self.clock())
        self.frontend.collect()
        return len(soon) + chosen.run.size + chosen.expire.size

    def settle(self) -> None:
        for _ in range(10_000):
            if not self.tick():
                return
        raise AssertionError("never idle")


def _error_of_status(status: int, budget_ns: int | None) -> RequestError:
    return Overloaded("The engine stopped.", 3.0) if status == ENGINE_LOST else ComputeFailed("The network failed.")
