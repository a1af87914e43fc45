"""Connections that many live streams share, without sockets, to the server of `tests.support.streams`."""

import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
from websockets.frames import Frame, Opcode

from penstock.core.errors import UnknownRoute
from penstock.core.streams.stream_entries import BINARY, CLOSE, HEAD, TEXT
from penstock.serve.exchange.request_bounds import RequestBounds
from penstock.serve.streams.quotas import StreamClient
from penstock.serve.websocket.live_stream import LiveStream
from penstock.serve.websocket.shared_connection import Make, SharedConnection
from tests.support.streams import BUDGET_NS, Caller, Wire, World


def entry(stream_id: int, kind: int, payload: bytes) -> bytes:
    return HEAD.pack(stream_id, kind, len(payload)) + payload


def start(stream_id: int, app: str = "sums", **fields: Any) -> bytes:
    return entry(stream_id, TEXT, json.dumps({"type": "start", "app": app} | fields).encode())


def chunk(stream_id: int, number: int, *samples: int) -> bytes:
    return entry(stream_id, BINARY, number.to_bytes(4, "little") + np.array(samples, np.int16).tobytes())


def flush(stream_id: int) -> bytes:
    return entry(stream_id, TEXT, b'{"type":"flush"}')


def end(stream_id: int) -> bytes:
    return entry(stream_id, TEXT, b'{"type":"end"}')


def cancel(stream_id: int) -> bytes:
    return entry(stream_id, CLOSE, b"\x03\xe8")


@dataclass(eq=False)
class SharedCaller:
    """A client of one connection, and what each of its streams received."""

    socket: SharedConnection
    wire: Wire
    now_s: list[float]
    said: dict[int, list[Any]] = field(default_factory=lambda: defaultdict[int, list[Any]](list))
    ends: dict[int, tuple[int, str]] = field(default_factory=dict[int, tuple[int, str]])
    closed: tuple[int, str] | None = None
    messages: int = 0
    held: bytes = b""

    def send(self, *entries: bytes) -> None:
        """Send entries in one message."""
        self.feed(Frame(Opcode.BINARY, b"".join(entries)).serialize(mask=True))

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
            if size >= 126:
                wide = 2 if size == 126 else 8
                size, at = int.from_bytes(data[2 : 2 + wide], "big"), 2 + wide
            payload, data = data[at : at + size], data[at + size :]
            if opcode == 8:
                self.closed = int.from_bytes(payload[:2], "big"), payload[2:].decode()
                assert not data
            elif opcode == 2:
                self.messages += 1
                self._take(payload)

    def _take(self, message: bytes) -> None:
        while message:
            stream_id, kind, size = HEAD.unpack_from(message)
            payload, message = message[HEAD.size : HEAD.size + size], message[HEAD.size + size :]
            assert stream_id not in self.ends, "nothing follows the end of a stream"
            if kind == CLOSE:
                self.ends[stream_id] = int.from_bytes(payload[:2], "big"), payload[2:].decode()
            else:
                self.said[stream_id].append(json.loads(payload) if kind == TEXT else payload)

    def events(self, stream_id: int) -> list[float]:
        """The events of a stream so far."""
        self.read()
        results = [said for said in self.said[stream_id] if said["type"] == "result"]
        assert [result["seq"] for result in results] == list(range(len(results)))
        return [value for result in results for (value,) in result["event"] or ()]


def share(world: World, bounds: RequestBounds | None = None) -> SharedCaller:
    """Open a connection to a server of running sums."""
    now_s, wire = [0.0], Wire()

    def admit(name: str, make: Make) -> LiveStream:
        if name != "sums":
            raise UnknownRoute(f"There is no model {name!r} here.")
        return world.streams.admit_stream(lambda streams: make(streams, None), BUDGET_NS, StreamClient("me"))

    socket = SharedConnection(admit, world.streams.batch_loop, lambda: now_s[0], bounds or RequestBounds())
    socket.take_over(cast(asyncio.Transport, wire), b"", world.peers)
    return SharedCaller(socket, wire, now_s)


class Ticking(Protocol):
    """A server on a clock of the test."""

    def tick(self) -> int:
        """Go on by a step; return how much moved."""
        ...


def settle(world: Ticking, *callers: Caller | SharedCaller) -> None:
    """Let a server and its clients go on until nothing moves."""
    for _ in range(10_000):
        moved = world.tick()
        for caller in callers:
            moved += bool(caller.held) and not caller.wire.paused
            caller.flow()
            caller.read()
        if not moved:
            return
    raise AssertionError("never idle")
