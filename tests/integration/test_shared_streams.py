"""Many live streams on one connection, over real sockets: their answers, their ends, and what is left of them."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from penstock import AsyncClient, Client
from penstock.core.errors import (
    DeadlineImpossible,
    InvalidInput,
    Overloaded,
    QuotaExceeded,
    RequestError,
    TooLarge,
    TooSlow,
    Unauthorized,
    UnknownRoute,
    Unreachable,
)
from penstock.core.spec import Array
from penstock.core.streams.stream_entries import BINARY, CLOSE, HEAD, PATH, TEXT, EntryReader, entry_of
from tests.integration.test_streams import slots_in_use, streams_of
from tests.integration.test_streams import soon as soon_within
from tests.support.deaf import deaf_client, send_pings
from tests.support.live import CHUNK, RATE_HZ, new_live_bundle, offline, sounds
from tests.support.processes import eventually, kill
from tests.support.serving import RunningServer, write_doubler

KEY = "a-key-of-thirty-two-characters-a"
START = b'{"type":"start","app":"hark"}'


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_live_bundle(tmp_path_factory)


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    other = write_doubler(tmp_path_factory.mktemp("doubler"))
    with RunningServer(bundle, str(other)) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(url_of(server)) as client:
        yield client
    soon(lambda: slots_in_use(server) == 0)
    assert streams_of(server)["open"] == 0


def soon(true: Callable[[], bool]) -> None:
    soon_within(true, 60)


def url_of(server: RunningServer) -> str:
    return f"http://{server.host}:{server.port}"


def opened(server: RunningServer, **options: Any) -> ClientConnection:
    return connect(f"ws://{server.host}:{server.port}{PATH}", compression=None, legacy=True, **options)


def numbered(number: int, samples: Array) -> bytes:
    return number.to_bytes(4, "little") + samples.tobytes()


def entries_until(connection: ClientConnection, stream_id: int, kind: int) -> list[tuple[int, int, bytes]]:
    """Everything up to an entry of this kind in this stream."""
    found: list[tuple[int, int, bytes]] = []
    reader = EntryReader()
    while not any(entry[:2] == (stream_id, kind) for entry in found):
        message = connection.recv(10)
        assert isinstance(message, bytes)
        reader.feed(message)
        while (entry := reader.next()) is not None:
            found.append(entry)
    return found


def test_each_stream_hears_its_own_signal(client: Client, bundle: Path) -> None:
    signals = sounds(12, 3_000)
    expected = offline(bundle, signals)
    with client.streams() as shared:
        streams = [shared.open("hark", events="binary" if index % 2 else "json") for index in range(len(signals))]
        assert streams[0].ready["app"] == "hark"
        for at in range(0, 3_000, CHUNK):
            with shared.together():
                for stream, signal_T in zip(streams, signals, strict=True):
                    stream.send(signal_T[at : at + CHUNK])
        for index, stream in enumerate(streams):
            results = list(stream.end())
            assert [result.seq for result in results] == list(range(11))
            if index % 2:
                frames = np.concatenate([result.output for result in results if result.output is not None])
            else:
                frames = np.array([frame for result in results for frame in result.event or ()])
            np.testing.assert_allclose(frames.reshape(-1, 2), expected[index], atol=1e-5)


def test_asyncio_the_same(client: Client, server: RunningServer, bundle: Path) -> None:
    signals = sounds(8, 2_000)
    expected = offline(bundle, signals)

    async def talk() -> None:
        async with AsyncClient(url_of(server)) as client, await client.streams() as shared:

            async def one(index: int) -> None:
                stream = await shared.open("hark")
                await stream.send(signals[index])
                frames = [frame async for result in await stream.end() for frame in result.event or ()]
                np.testing.assert_allclose(frames, expected[index], atol=1e-5)

            await asyncio.gather(*map(one, range(len(signals))))
            cancelled = await shared.open("hark")
            await cancelled.close()
            with pytest.raises(RequestError, match="The stream is closed"):
                await cancelled.send(signals[0])
            with pytest.raises(UnknownRoute, match="'nobody'"):
                await shared.open("nobody")

    asyncio.run(talk())


def test_faster_than_real_time_waits_and_loses_nothing(client: Client, bundle: Path) -> None:
    """Ten seconds at once in one stream: `send` waits for results, and the server never holds more than two."""
    long, short = sounds(1, 10 * RATE_HZ)[0], sounds(1, 2_000)[0]
    with client.streams() as shared:
        fast, other = shared.open("hark"), shared.open("hark")
        sending = threading.Thread(target=lambda: (fast.send(long), fast.end()))
        sending.start()
        other.send(short)
        frames = [frame for result in other.end() for frame in result.event or ()]
        np.testing.assert_allclose(frames, offline(bundle, short[None])[0], atol=1e-5)
        results = list(fast)
        sending.join()
        frames = [frame for result in results for frame in result.event or ()]
        np.testing.assert_allclose(frames, offline(bundle, long[None])[0], atol=1e-4)


def test_a_stream_whose_results_are_not_taken_holds_up_no_other(client: Client) -> None:
    sound = sounds(1, 2 * RATE_HZ)[0]
    with client.streams() as shared:
        ignored, other = shared.open("hark"), shared.open("hark")
        ignored.send(sound)
        other.send(sound)
        assert len(list(other.end())) == 2 * RATE_HZ // CHUNK + 1
        assert len(list(ignored.end())) == 2 * RATE_HZ // CHUNK + 1


def test_other_rates_and_wav(client: Client, bundle: Path) -> None:
    sound = sounds(1, 4_000)[0]
    riff = b"WAVEfmt " + (16).to_bytes(4, "little") + b"\1\0\1\0\x40\x1f\0\0\x80\x3e\0\0\2\0\x10\0data"
    data = sound.tobytes()
    wav = b"RIFF" + (len(riff) + 4 + len(data)).to_bytes(4, "little") + riff + len(data).to_bytes(4, "little") + data
    with client.streams() as shared:
        stream, low = shared.open("hark", encoding="wav"), shared.open("hark", rate_hz=4_000)
        stream.send(wav)
        low.send(sound[:2_000])
        frames = [frame for result in stream.end() for frame in result.event or ()]
        np.testing.assert_allclose(frames, offline(bundle, sound[None])[0], atol=1e-5)
        assert sum(len(result.event or ()) for result in low.end()) == len(frames)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("nobody", {}, UnknownRoute),
        ("doubler", {}, InvalidInput),
        ("hark", {"encoding": "opus"}, InvalidInput),
        ("hark", {"latency_ms": 0.001}, DeadlineImpossible),
    ],
)
def test_a_stream_that_is_refused_raises_and_the_others_go_on(
    client: Client, name: str, options: dict[str, Any], error: type[RequestError]
) -> None:
    with client.streams() as shared, shared.open("hark") as good:
        with pytest.raises(error):
            shared.open(name, **options)
        good.send(sounds(1, CHUNK)[0])
        assert [result.seq for result in good.end()] == [0, 1]


def test_a_stream_that_does_wrong_or_is_closed_ends_alone(client: Client, server: RunningServer) -> None:
    sound = sounds(1, CHUNK)[0]
    with client.streams() as shared:
        bad, left, good = (shared.open("hark", encoding="raw") for _ in range(3))
        bad.send(b"odd")
        with pytest.raises(InvalidInput, match="whole frames of 2"):
            list(bad)
        with pytest.raises(InvalidInput, match="whole frames of 2"):
            bad.send(sound)
        left.close()
        left.close()
        soon(lambda: slots_in_use(server) == 1)
        too_long = shared.open("hark", encoding="raw")
        too_long.send(bytes(2 * RATE_HZ + 2))
        with pytest.raises(TooLarge):
            list(too_long)
        good.send(sound)
        assert [result.seq for result in good.end()] == [0, 1]


def test_a_flood_ends_its_stream_alone(server: RunningServer) -> None:
    chunk = sounds(1, 8)[0]
    with opened(server) as connection:
        connection.send(entry_of(0, TEXT, START) + entry_of(1, TEXT, START))
        # One message of a second, of 25 chunks, and again, without a look at the results.
        second = sounds(1, RATE_HZ)[0]
        for number in range(400):
            connection.send(entry_of(0, BINARY, numbered(number, second)))
        connection.send(entry_of(1, BINARY, numbered(0, chunk)))
        found = entries_until(connection, 1, TEXT) + entries_until(connection, 1, TEXT)
        ends = [payload for stream_id, kind, payload in found if (stream_id, kind) == (0, CLOSE)]
        assert len(ends) == 1
        assert int.from_bytes(ends[0][:2], "big") == 1008
        assert b"chunks wait for the network" in ends[0]
        connection.send(entry_of(1, TEXT, b'{"type":"end"}'))
        last = entries_until(connection, 1, CLOSE)[-1]
        assert last == (1, CLOSE, b"\x03\xe8")
    soon(lambda: slots_in_use(server) == 0)


def test_a_killed_client_gives_all_its_slots_back(server: RunningServer) -> None:
    code = f"""
import time
from penstock import Client
client = Client("{url_of(server)}")
shared = client.streams()
streams = [shared.open("hark") for _ in range(5)]
print("ready", flush=True)
while True:
    with shared.together():
        for stream in streams:
            stream.send(bytes({2 * CHUNK}))
    time.sleep(0.01)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    assert slots_in_use(server) == 5
    before = streams_of(server)["aborted"]
    child.send_signal(signal.SIGKILL)
    child.communicate()
    soon(lambda: slots_in_use(server) == 0)
    assert streams_of(server)["aborted"] - before == 5


def test_a_client_that_does_not_read_is_ended_and_the_others_go_on(server: RunningServer, client: Client) -> None:
    key = "GET /v1/streams HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    upgrade = f"{key}Sec-WebSocket-Key: {'A' * 22}==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    from websockets.frames import Frame, Opcode

    start = Frame(Opcode.BINARY, entry_of(0, TEXT, START)).serialize(mask=True)
    with deaf_client(server.host, server.port, upgrade, start) as deaf, pytest.raises(ConnectionError):
        send_pings(deaf)
    soon(lambda: slots_in_use(server) == 0)
    with client.streams() as shared:
        stream = shared.open("hark")
        assert [result.seq for result in stream.end()] == [0]


def test_keys_and_quotas(bundle: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"me {KEY}\n")
    with RunningServer(bundle, "--api-keys", str(keys), "--max-streams-per-key", "3") as server:
        with pytest.raises(InvalidStatus) as caught:
            opened(server)
        assert caught.value.response.status_code == 401
        with Client(url_of(server)) as stranger, pytest.raises(Unauthorized):
            stranger.streams()
        with opened(server, subprotocols=["penstock", f"key.{KEY}"]) as page:
            assert page.subprotocol == "penstock"
        with Client(url_of(server), api_key=KEY) as client, client.streams() as shared:
            streams = [shared.open("hark") for _ in range(3)]
            with pytest.raises(QuotaExceeded, match="has 3 live streams open, and --max-streams-per-key allows 3"):
                shared.open("hark")
            with pytest.raises(QuotaExceeded):
                client.stream("hark")
            streams.pop().close()
            soon(lambda: client_counts(server, KEY) == 2)
            streams.append(shared.open("hark"))
        soon(lambda: client_counts(server, KEY) == 0)


@pytest.mark.thorough
def test_silence_ends_a_stream_and_then_the_connection(bundle: Path) -> None:
    with RunningServer(bundle, "--idle-timeout-s", "1", "--request-timeout-s", "0.5") as server:
        # On a busy machine a connection may end before its upgrade, or before its stream was open.
        eventually(lambda: "No stream was open" in end_of_unused(server), within_s=60)

        def silence() -> str:
            with (
                Client(url_of(server)) as client,
                pytest.raises((TooSlow, Unreachable)) as ended,
                client.streams() as shared,
            ):
                list(shared.open("hark"))
            return str(ended.value)

        eventually(lambda: "No samples came for" in silence(), within_s=60)


def end_of_unused(server: RunningServer) -> str:
    """Why the server ends a connection on which no stream is opened; empty if it was not upgraded yet."""
    try:
        with opened(server) as unused, pytest.raises(ConnectionClosed) as closed:
            unused.recv(60)
    except (InvalidHandshake, ConnectionError, EOFError):
        return ""
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 4408
    return closed.value.rcvd.reason


def client_counts(server: RunningServer, key: str) -> int:
    with Client(url_of(server), api_key=key) as client:
        return client.stats()["models"]["hark"]["streams"]["open"]


@pytest.mark.thorough
def test_a_drain_answers_what_came(bundle: Path) -> None:
    sound = sounds(1, 2 * CHUNK)[0]
    with RunningServer(bundle) as server:
        with Client(url_of(server)) as client, client.streams() as shared:
            live = shared.open("hark")
            live.send(sound)
            results = iter(live)
            frames = [frame for _ in range(2) for frame in next(results).event or ()]
            server.stop()
            last = next(results)
            frames += last.event or ()
            with pytest.raises(Overloaded, match="The server is shutting down"):
                next(results)
            with pytest.raises((Overloaded, Unreachable)):
                shared.open("hark")
        np.testing.assert_allclose(frames, offline(bundle, sound[None])[0], atol=1e-5)
        assert server.process.wait(10) == 0


@pytest.mark.slow
def test_streams_outlive_the_engine_and_so_does_the_connection(bundle: Path) -> None:
    sound = sounds(1, 2 * CHUNK)[0]
    with RunningServer(bundle, "--frontends", "1") as server, Client(url_of(server)) as client:
        with client.streams() as shared:
            streams = [shared.open("hark") for _ in range(4)]
            for stream in streams:
                stream.send(sound)
                assert next(iter(stream)).seq == 0
            kill(server, "engine")
            soon(client.ready)
            again = shared.open("hark")
            again.send(sound)
            frames = [frame for result in again.end() for frame in result.event or ()]
            np.testing.assert_allclose(frames, offline(bundle, sound[None])[0], atol=1e-5)
            for stream in streams:
                # The first result was heard before.
                assert [result.seq for result in stream.end()] == [1, 2]
        soon(lambda: streams_of(server)["open"] == 0)


def test_malformed_entries_end_the_connection_and_free_all_slots(server: RunningServer) -> None:
    with opened(server) as connection:
        connection.send(entry_of(0, TEXT, START) + entry_of(1, TEXT, START))
        assert json.loads(entries_until(connection, 1, TEXT)[-1][2])["type"] == "ready"
        connection.send(HEAD.pack(0, BINARY, 100) + b"short")
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1007
    soon(lambda: slots_in_use(server) == 0)
