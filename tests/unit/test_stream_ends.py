"""A client's stream whose server is silent, and how its closes become errors, without sockets."""

import asyncio
import json
import threading
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection as AsyncConnection
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Close

from penstock.client.retry import Attempt, Call, ClientConfig
from penstock.client.stream import AsyncClientStream, ClientStream, StreamOptions, StreamProtocol
from penstock.client.web_socket import _connect_options, translated
from penstock.core.errors import Overloaded, TimedOut, Unreachable

CONFIG = ClientConfig(url="http://server", timeout_s=0.2)
READY = {"type": "ready", "encoding": "pcm_s16le", "rate_hz": 16000, "chunk_frames": 4, "chunk_ms": 80.0, "window": 8}


def protocol() -> StreamProtocol:
    options = StreamOptions(rate_hz=None, encoding=None, events="json", latency_ms=None)
    return StreamProtocol(CONFIG, options, json.dumps(READY))


class Silent:
    """A connection of a server that says nothing."""

    def __init__(self) -> None:
        self.waits, self.never = threading.Event(), threading.Event()

    def send(self, message: str | bytes, /) -> None:
        pass

    def recv(self, timeout: float | None = None, /) -> str | bytes:
        self.waits.set()
        if not self.never.wait(timeout):
            raise TimeoutError
        raise ConnectionClosedError(None, None)

    def close(self) -> None:
        self.never.set()


class AsyncSilent:
    """`Silent` for asyncio."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()

    async def send(self, message: str | bytes, /) -> None:
        pass

    async def recv(self) -> str | bytes:
        self.waits.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None:
        pass


def test_a_thread_that_reads_already_when_another_one_ends_the_stream_does_not_wait_for_ever() -> None:
    wire, ends = Silent(), list[BaseException]()
    stream = ClientStream(wire, protocol())

    def read() -> None:
        try:
            list(stream)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            ends.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert wire.waits.wait(10)
    stream.send(np.zeros(4, np.int16))
    stream.end()
    reader.join(10)
    stream.close()
    assert [type(error) for error in ends] == [TimedOut]


def test_a_thread_that_reads_waits_as_long_as_the_stream_has_not_ended() -> None:
    wire = Silent()
    stream = ClientStream(wire, protocol())

    def read() -> None:
        with pytest.raises(Unreachable):
            list(stream)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(3 * CONFIG.timeout_s)
    assert reader.is_alive()
    stream.close()
    reader.join(10)
    assert not reader.is_alive()


def test_a_task_that_reads_already_when_another_one_ends_the_stream_does_not_wait_for_ever() -> None:
    async def talk() -> None:
        wire = AsyncSilent()
        stream = AsyncClientStream(wire, protocol())

        async def read() -> None:
            async for _ in stream:
                pass

        reader = asyncio.create_task(read())
        await wire.waits.wait()
        await asyncio.sleep(2 * CONFIG.timeout_s)
        assert not reader.done()
        await stream.end()
        with pytest.raises(TimedOut):
            await asyncio.wait_for(reader, 10)

    asyncio.run(talk())


class Full(AsyncConnection):
    """A connection that writes each message, and whose buffer is full while the test says so."""

    def __init__(self) -> None:
        self.sent: list[str | bytes] = []
        self.has_room = asyncio.Event()

    async def send(self, message: Any, *, text: bool | None = None) -> None:
        self.sent.append(message)
        await self.has_room.wait()


class NoRoom(AsyncSilent):
    """A part of a shared connection that has no room for a message, while the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str | bytes] = []
        self.has_room = asyncio.Event()

    async def send(self, message: str | bytes, /) -> None:
        await self.has_room.wait()
        self.sent.append(message)


@pytest.mark.parametrize("cancelled", ["send", "flush"])
@pytest.mark.parametrize("kind", [Full, NoRoom])
def test_the_number_of_a_cancelled_message_is_used_again_only_if_it_was_not_sent(
    kind: type[Full | NoRoom], cancelled: str
) -> None:
    used = kind is Full

    async def talk() -> list[str | bytes]:
        wire = kind()
        stream = AsyncClientStream(wire, protocol())
        first = stream.send(np.zeros(4, np.int16)) if cancelled == "send" else stream.flush()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first, 0.05)
        wire.has_room.set()
        await stream.send(np.ones(4, np.int16))
        assert await stream.flush() == used + 1
        return wire.sent

    sent = asyncio.run(talk())[used]
    assert isinstance(sent, bytes)
    assert sent[:4] == used.to_bytes(4, "little")


@pytest.mark.parametrize(
    ("reason", "retry_after_s"), [("No room. Retry after 7 s.", 7.0), ("No room.", Overloaded("").retry_after_s)]
)
def test_a_close_with_a_retry_time_is_an_overload_with_it(reason: str, retry_after_s: float) -> None:
    with pytest.raises(Overloaded, match=reason) as raised, translated(CONFIG, ""):
        raise ConnectionClosedError(Close(1013, reason), None)
    assert raised.value.retry_after_s == retry_after_s


@pytest.mark.parametrize(
    ("url", "uri"),
    [
        ("http://http.server:8000/", "ws://http.server:8000/v1"),
        ("https://server/http", "wss://server/http/v1"),
        ("HTTP://http:8000", "ws://http:8000/v1"),
    ],
)
def test_the_url_of_a_stream_is_that_of_the_server(url: str, uri: str) -> None:
    attempt = Attempt(Call(method="GET", path="/v1"), 0.0, 1.0)
    options: dict[str, Any] = _connect_options(ClientConfig(url=url), attempt, None)
    assert options["uri"] == uri
