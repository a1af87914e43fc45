"""The clients' side of a connection that many live streams share, without a server."""

import asyncio
import threading
from typing import cast

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import ClientConnection

from penstock.client.calls import Calls
from penstock.client.retry import ClientConfig
from penstock.client.shared_parts import SharedParts
from penstock.client.shared_streams import AsyncSharedStreams, SharedStreams
from penstock.core.errors import InvalidInput
from penstock.core.streams.stream_entries import CLOSE, HEAD, TEXT, EntryReader, entry_of

CONFIG = ClientConfig(url="http://localhost:1", retries=0)
CALLS = Calls(CONFIG, clock_s=lambda: 0.0, random=lambda: 0.0)
# Bytes alone may be of any number of frames, so that one message may wait for its answer.
CHUNK = np.zeros(1, np.float32)
READY = b'{"type":"ready","encoding":"raw","rate_hz":1,"chunk_frames":1,"chunk_ms":1000,"window":4}'
UNREADABLE = [
    entry_of(0, CLOSE, b"\3"),
    entry_of(0, CLOSE, b"\3\xe8\xff"),
    entry_of(0, TEXT, b"[]"),
    entry_of(0, TEXT, b"{"),
    entry_of(0, 7, b""),
    b"abc",
]


def nothing() -> None:
    pass


@pytest.mark.parametrize("message", UNREADABLE)
def test_what_cannot_be_read_is_one_error(message: bytes) -> None:
    parts = SharedParts()
    parts.begin(nothing)
    with pytest.raises(InvalidInput):
        parts.receive(message)


class Wire:
    """A connection whose server says what the test puts into it."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.said: list[bytes] = []
        self.closed = False
        self.changed = threading.Condition()

    def say(self, message: bytes) -> None:
        with self.changed:
            self.said.append(message)
            self.changed.notify_all()

    def send(self, message: bytes) -> None:
        self.sent.append(message)
        if b'"start"' in message:
            self.say(entry_of(HEAD.unpack_from(message)[0], TEXT, READY))

    def recv(self) -> bytes:
        with self.changed:
            self.changed.wait_for(lambda: self.said or self.closed)
            if not self.said:
                raise ConnectionClosedError(None, None)
            return self.said.pop(0)

    def close(self, code: int = 1000) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class AsyncWire:
    """A connection whose server says nothing, for asyncio."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.gone = asyncio.Event()

    async def send(self, message: bytes) -> None:
        self.sent.append(message)

    async def recv(self) -> bytes:
        await self.gone.wait()
        raise ConnectionClosedError(None, None)

    async def close(self, code: int = 1000) -> None:
        self.gone.set()


def shared_of(wire: Wire) -> SharedStreams:
    return SharedStreams(CONFIG, CALLS, cast(ClientConnection, wire), lambda seconds: None)


def test_streams_of_a_server_that_cannot_be_read_end() -> None:
    wire = Wire()
    with shared_of(wire) as shared:
        stream = shared.open("hark")
        wire.say(entry_of(0, TEXT, b"[]"))
        with pytest.raises(InvalidInput, match="holds no entries"):
            list(stream)
        assert wire.closed


def test_what_is_sent_together_within_together_goes_once() -> None:
    wire = Wire()
    with shared_of(wire) as shared:
        stream = shared.open("hark")
        before = len(wire.sent)
        with shared.together():
            stream.send(CHUNK)
            with shared.together():
                stream.send(CHUNK)
            assert len(wire.sent) == before
        assert len(wire.sent) == before + 1
        stream.send(CHUNK)
        assert len(wire.sent) == before + 2


def test_a_stream_whose_opening_is_cancelled_is_closed_at_the_server() -> None:
    async def talk() -> list[bytes]:
        wire = AsyncWire()

        async def sleep(seconds: float) -> None:
            pass

        shared = AsyncSharedStreams(CONFIG, CALLS, cast(AsyncConnection, wire), sleep)
        opening = asyncio.create_task(shared.open("hark"))
        while not wire.sent:
            await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        while len(wire.sent) < 2:
            await asyncio.sleep(0)
        await shared.close()
        return wire.sent

    reader = EntryReader()
    reader.feed(b"".join(asyncio.run(asyncio.wait_for(talk(), 20))))
    kinds: list[tuple[int, int]] = []
    while (entry := reader.next()) is not None:
        kinds.append(entry[:2])
    assert kinds == [(0, TEXT), (0, CLOSE)]
