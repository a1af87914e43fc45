"""Live streams over real sockets: what they answer, how they end, and that nothing is left of them."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from penstock import Client
from penstock.core.errors import Overloaded, TooSlow
from penstock.core.spec import Array
from tests.support.deaf import deaf_client, send_pings
from tests.support.live import CHUNK, RATE_HZ, new_live_bundle, offline, sounds
from tests.support.serving import RunningServer, write_doubler
from tests.support.thorough import thorough

PATH = "/v1/apps/hark/stream"
KEY = "a-key-of-thirty-two-characters-a"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_live_bundle(tmp_path_factory)


def with_keys(folder: Path) -> tuple[str, ...]:
    """Options of a server that wants a key, and logs requests."""
    keys = folder / "keys"
    keys.write_text(f"me {KEY}\n")
    return "--api-keys", str(keys), "--log-requests"


@pytest.fixture(scope="module")
def strict(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    options = (*with_keys(tmp_path_factory.mktemp("keys")), "--cors", "https://good.example")
    with RunningServer(bundle, *options, "--idle-timeout-s", "1", "--request-timeout-s", "0.5") as server:
        yield server


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    other = write_doubler(tmp_path_factory.mktemp("doubler"))
    with RunningServer(bundle, str(other)) as server:
        yield server


def opened(server: RunningServer, path: str = PATH, **options: Any) -> ClientConnection:
    return connect(f"ws://{server.host}:{server.port}{path}", compression=None, legacy=True, **options)


def started(server: RunningServer, **fields: Any) -> ClientConnection:
    stream = opened(server)
    stream.send(json.dumps({"type": "start"} | fields))
    assert json.loads(stream.recv())["type"] == "ready"
    return stream


def message(number: int, samples: Array) -> bytes:
    return number.to_bytes(4, "little") + samples.tobytes()


def rest_of(stream: ClientConnection) -> list[dict[str, Any]]:
    return [json.loads(said) for said in stream]


def streams_of(server: RunningServer) -> dict[str, int]:
    return server.ask("GET", "/v1/stats")[2]["models"]["hark"]["streams"]


def slots_in_use(server: RunningServer) -> int:
    return server.ask("GET", "/v1/stats")[2]["models"]["hark"]["slots"]["in_use"]


def soon(true: Callable[[], bool], seconds: float = 5.0) -> None:
    end_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.01)


def closed(stream: ClientConnection) -> tuple[int, str]:
    """How the server ends a stream, whatever it says before."""
    received = None
    try:
        while True:
            stream.recv(10)
    except ConnectionClosed as error:
        received = error.rcvd
    assert received is not None
    assert len(received.reason.encode()) <= 123
    return received.code, received.reason


def test_the_results_are_those_of_the_whole_signal(server: RunningServer, bundle: Path) -> None:
    sound = sounds(1, 3000)[0]
    before = streams_of(server)
    with started(server) as stream:
        for number, at in enumerate(range(0, 3000, CHUNK)):
            stream.send(message(number, sound[at : at + CHUNK]))
        stream.send('{"type":"end"}')
        *results, ended = rest_of(stream)
    assert (stream.close_code, stream.close_reason) == (1000, "")
    assert [result["seq"] for result in results] == list(range(11))
    assert [result.get("last", False) for result in results] == [False] * 10 + [True]
    assert ended == {"type": "end", "chunks": 10}
    frames = [frame for result in results for frame in result["event"] or ()]
    np.testing.assert_allclose(frames, offline(bundle, sound[None])[0], atol=1e-5)
    after = streams_of(server)
    assert {name: after[name] - before[name] for name in after} == {
        "open": 0,
        "opened": 1,
        "refused": 0,
        "aborted": 0,
        "chunks": 11,
        "results": 11,
        "resumed": 0,
        "replayed": 0,
        "lost": 0,
    }
    metrics = server.ask("GET", "/metrics")[2].decode()
    assert 'penstock_streams_chunks_total{app="hark"}' in metrics
    assert 'penstock_streams_open{app="hark",engine="0"} 0.0' in metrics
    assert 'penstock_streams_open{app="doubler"' not in metrics


def test_two_clients_at_once_never_mix(server: RunningServer, bundle: Path) -> None:
    signals = sounds(6, 4000)
    expected = offline(bundle, signals)
    rng = np.random.default_rng(3)
    cuts = [np.sort(rng.integers(1, 4000, 30)) for _ in signals]
    got: dict[int, list[Any]] = {}

    def run(index: int) -> None:
        with Client(f"http://{server.host}:{server.port}") as client, client.stream("hark") as stream:
            for part in np.split(signals[index], cuts[index]):
                stream.send(part)
            got[index] = [frame for result in stream.end() for frame in result.event or ()]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(signals))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, answer in got.items():
        np.testing.assert_allclose(answer, expected[index], atol=1e-5)
    assert len(got) == len(signals)


def test_after_a_flush_the_signal_begins_anew(server: RunningServer, bundle: Path) -> None:
    signals = sounds(3, 1300)
    with Client(f"http://{server.host}:{server.port}") as client, client.streams() as shared:
        streams = [client.stream("hark"), client.stream("hark", rate_hz=48_000), shared.open("hark")]
        for stream, times in zip(streams, (1, 6, 1), strict=True):
            flushes: list[int] = []
            for sound in signals:
                stream.send(np.repeat(sound, times))
                flushes.append(stream.flush())
            results = list(stream.end())
            assert [result.seq for result in results] == list(range(len(results)))
            assert [result.seq for result in results if result.flushed] == flushes
            parts: list[list[Any]] = [[] for _ in range(4)]
            for result in results:
                parts[sum(result.seq > flush for flush in flushes)] += result.event or ()
            assert parts.pop() == []
            for frames, whole in zip(parts, offline(bundle, signals), strict=True):
                if times == 1:
                    np.testing.assert_allclose(frames, whole, atol=1e-5)
                else:
                    assert len(frames) == len(whole)
            stream.close()


def test_faster_than_real_time_is_slowed_and_loses_nothing(server: RunningServer, bundle: Path) -> None:
    sound = np.tile(sounds(1, 8000)[0], 30)
    stream = started(server, events="binary")
    heard: list[bytes] = []

    def listen() -> None:
        heard.extend(said for said in stream if isinstance(said, bytes))

    thread = threading.Thread(target=listen)
    thread.start()
    for number, at in enumerate(range(0, len(sound), RATE_HZ)):
        stream.send(message(number, sound[at : at + RATE_HZ]))
    stream.send('{"type":"end"}')
    thread.join()
    assert [int.from_bytes(said[:4], "little") for said in heard] == list(range(31))
    frames = np.concatenate([np.frombuffer(said, "<f4", -1, 8) for said in heard]).reshape(-1, 2)
    np.testing.assert_allclose(frames, offline(bundle, sound[None])[0], atol=1e-4)


def test_other_rates_and_encodings(server: RunningServer, bundle: Path) -> None:
    low = sounds(1, 4000)
    high = np.repeat(low[0], 6)
    for encoding, samples in (
        ("pcm_s16le", high),
        ("pcm_f32le", (high / 32768).astype(np.float32)),
        ("mulaw", (high >> 8).astype(np.uint8)),
    ):
        with started(server, rate_hz=48000, encoding=encoding) as stream:
            for number, part in enumerate(np.array_split(samples, 13)):
                stream.send(message(number, part))
            stream.send('{"type":"end"}')
            *results, ended = rest_of(stream)
        assert ended["chunks"] == 13
        assert [result["seq"] for result in results] == list(range(14))
        assert sum(len(result["event"] or ()) for result in results) == offline(bundle, low).shape[1]


def test_a_client_that_leaves_gives_its_slot_back(server: RunningServer) -> None:
    before = streams_of(server)["aborted"]
    for leave in (lambda stream: stream.close(), lambda stream: stream.socket.shutdown(socket.SHUT_RDWR)):
        stream = started(server)
        stream.send(message(0, sounds(1, CHUNK)[0]))
        assert slots_in_use(server) == 1
        leave(stream)
        soon(lambda: slots_in_use(server) == 0)
        soon(lambda: streams_of(server)["open"] == 0)
    assert streams_of(server)["aborted"] - before == 2


def test_a_client_that_is_killed_gives_its_slot_back(server: RunningServer) -> None:
    code = f"""
import json, time
from websockets.sync.client import connect
stream = connect("ws://{server.host}:{server.port}{PATH}", legacy=True)
stream.send(json.dumps({{"type": "start"}}))
print(stream.recv(), flush=True)
number = 0
while True:
    stream.send(number.to_bytes(4, "little") + bytes({2 * CHUNK}))
    number += 1
    time.sleep(0.01)
"""
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert b"ready" in client.stdout.readline()
    time.sleep(0.1)
    assert slots_in_use(server) == 1
    client.send_signal(signal.SIGKILL)
    client.communicate()
    soon(lambda: slots_in_use(server) == 0)


ONE = np.arange(CHUNK, dtype=np.int16)


@pytest.mark.parametrize(
    ("sent", "code", "said"),
    [
        (["hello"], 1007, "no JSON"),
        (['{"type":"start","encoding":"mp3"}'], 1007, "encoding is 'mp3'"),
        (['{"type":"start","latency_ms":0.001}'], 1008, "shorter than the network's own time"),
        ([message(0, ONE)], 1003, "before the start"),
        thorough(["x" * 100_000], 1009, "at most 4,096"),
        (['{"type":"start"}', "hello"], 1007, "no JSON"),
        (['{"type":"start"}', '{"type":"start"}'], 1003, "Text came"),
        (['{"type":"start"}', message(0, ONE) + b"x"], 1007, "whole frames of 2"),
        (['{"type":"start"}', message(1, ONE)], 1007, "Message 1 came where 0 belongs"),
        (['{"type":"start"}', message(0, ONE), message(0, ONE)], 1007, "Message 0 came where 1 belongs"),
        thorough(['{"type":"start"}', message(0, np.zeros(RATE_HZ + 1, np.int16))], 1009, "at most 16,004"),
        (['{"type":"start","encoding":"wav"}', message(0, ONE)], 1007, "no WAV"),
        (['{"type":"start","encoding":"wav"}', '{"type":"end"}'], 1007, "before its header"),
    ],
)
def test_bad_messages_end_the_stream_with_one_sentence(
    server: RunningServer, sent: list[str | bytes], code: int, said: str
) -> None:
    with opened(server) as stream:
        for each in sent:
            stream.send(each)
        found, reason = closed(stream)
    assert (found, said in reason) == (code, True), (found, reason)
    soon(lambda: slots_in_use(server) == 0)


def upgrade(server: RunningServer, **changed: str | None) -> bytes:
    headers: dict[str, str | None] = {
        "Host": f"{server.host}:{server.port}",
        "Upgrade": "websocket",
        "Connection": "keep-alive, Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    headers |= {name.replace("_", "-"): value for name, value in changed.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if value is not None)
    return f"GET {PATH} HTTP/1.1\r\n{lines}\r\n".encode()


@pytest.mark.parametrize(
    "frame", [b"\x82\x01a", b"\xf2\x81abcde", b"\x82\xff" + b"\x7f" * 8 + b"mask", b"\x88\x82\0\0\0\0\0\1"]
)
def test_what_is_no_frame_ends_the_connection(server: RunningServer, frame: bytes) -> None:
    # The head of the answer, and the frame that closes.
    answer = server.raw(upgrade(server) + frame, until=lambda got: len(got.partition(b"\r\n\r\n")[2]) >= 4)
    answer = answer.partition(b"\r\n\r\n")[2]
    assert answer[0] == 0x88
    assert int.from_bytes(answer[2:4], "big") == (1009 if frame[1] == 0xFF else 1002)
    soon(lambda: slots_in_use(server) == 0)


def test_messages_may_come_with_the_upgrade_and_byte_by_byte(server: RunningServer) -> None:
    from websockets.frames import Frame, Opcode

    parts = [
        Frame(Opcode.TEXT, b'{"type":', False).serialize(mask=True),
        Frame(Opcode.PING, b"ping").serialize(mask=True),
        Frame(Opcode.CONT, b'"start"}').serialize(mask=True),
        Frame(Opcode.BINARY, message(0, ONE)).serialize(mask=True),
        Frame(Opcode.TEXT, b'{"type":"end"}').serialize(mask=True),
        Frame(Opcode.CLOSE, b"").serialize(mask=True),
    ]
    whole = upgrade(server) + b"".join(parts[:-1])
    for data in ([whole], [bytes([byte]) for byte in whole]):
        with socket.create_connection((server.host, server.port), timeout=5) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answer = b""
            for piece in data:
                connection.sendall(piece)
            while b'"chunks":1}' not in answer or not answer.endswith(b"\x88\x02\x03\xe8"):
                piece = connection.recv(65536)
                assert piece, answer
                answer += piece
            assert b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in answer
            assert b"\x8a\x04ping" in answer
            connection.sendall(parts[-1])
            assert connection.recv(100) == b""


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({"Upgrade": None}, 400, "is a WebSocket"),
        ({"Upgrade": "h2c"}, 400, "is a WebSocket"),
        ({"Connection": "close"}, 400, "is a WebSocket"),
        ({"Sec_WebSocket_Version": "8"}, 426, "Sec-WebSocket-Version: 13\r\n"),
        ({"Sec_WebSocket_Version": None}, 426, "Upgrade: websocket\r\n"),
        ({"Sec_WebSocket_Key": "short"}, 400, "Key of 16 bytes"),
        ({"Sec_WebSocket_Key": None}, 400, "Key of 16 bytes"),
        ({"Content_Length": "3"}, 400, "a GET without a body"),
        ({"Origin": "https://evil.example"}, 403, "may not open streams"),
        ({"Origin": "null"}, 403, "may not open streams"),
        ({"Origin": "http://["}, 403, "may not open streams"),
    ],
)
def test_upgrades_that_are_none(server: RunningServer, changed: dict[str, str | None], status: int, said: str) -> None:
    answer = server.raw(upgrade(server, **changed))
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert said.encode() in answer


def test_where_there_is_no_stream(server: RunningServer) -> None:
    for path, status in (("/v1/apps/nobody/stream", 404), ("/v1/apps/doubler/stream", 400), ("/v1/apps/hark", 405)):
        with pytest.raises(InvalidStatus) as caught:
            opened(server, path)
        assert caught.value.response.status_code == status
    assert server.ask("POST", PATH, b"")[0] == 405
    origin = f"http://{server.host}:{server.port}"
    with opened(server, additional_headers={"Origin": origin}):
        pass


def test_a_client_that_does_not_read_is_ended_and_the_others_go_on(server: RunningServer) -> None:
    from websockets.frames import Frame, Opcode

    start = Frame(Opcode.TEXT, b'{"type":"start","events":"binary"}').serialize(mask=True)
    with deaf_client(server.host, server.port, upgrade(server), start) as deaf, pytest.raises(ConnectionError):
        send_pings(deaf)
    soon(lambda: slots_in_use(server) == 0)
    with started(server) as stream:
        stream.send(message(0, ONE))
        assert json.loads(stream.recv())["seq"] == 0


def test_keys_and_origins(strict: RunningServer) -> None:
    strange: dict[str, Any] = {"subprotocols": ["penstock", "key.nobody"]}
    strangers: list[dict[str, Any]] = [{}, strange | {"additional_headers": {"Origin": "https://evil.example"}}]
    for options in strangers:
        with pytest.raises(InvalidStatus) as caught:
            opened(strict, **options)
        assert caught.value.response.status_code == 401
    with opened(strict, **strange) as stream:
        assert stream.subprotocol == "penstock"
        assert closed(stream) == (4401, "This server requires an API key; send 'Authorization: Bearer KEY'.")
    with opened(strict, additional_headers=BEARER) as stream:
        assert stream.subprotocol is None
    page = {"Origin": "https://good.example"}
    with opened(strict, subprotocols=["penstock", f"key.{KEY}"], additional_headers=page) as stream:
        assert stream.subprotocol == "penstock"
    with Client(f"http://{strict.host}:{strict.port}", api_key=KEY) as client, client.stream("hark") as live:
        assert live.ready["chunk_frames"] == CHUNK


@pytest.mark.thorough
def test_silence_ends_a_stream(strict: RunningServer) -> None:
    silent = opened(strict, additional_headers=BEARER)
    assert closed(silent)[0] == 4408
    with Client(f"http://{strict.host}:{strict.port}", api_key=KEY) as client, client.stream("hark") as live:
        with pytest.raises(TooSlow, match="No samples came for"):
            list(live)
        soon(lambda: client.stats()["streams"]["open"] == 0)


def say_goodbye(server: RunningServer, bundle: Path, key: str | None = None) -> None:
    sound = sounds(1, 2 * CHUNK)[0]
    with Client(f"http://{server.host}:{server.port}", api_key=key) as client, client.stream("hark") as live:
        live.send(sound)
        results = iter(live)
        frames = [frame for _ in range(2) for frame in next(results).event or ()]
        server.stop()
        last = next(results)
        assert last.last
        frames += last.event or ()
        with pytest.raises(Overloaded, match="The server is shutting down; open another stream"):
            next(results)
    np.testing.assert_allclose(frames, offline(bundle, sound[None])[0], atol=1e-5)
    assert server.process.wait(10) == 0


@pytest.mark.thorough
def test_a_drain_answers_what_came_and_says_goodbye(bundle: Path, tmp_path: Path) -> None:
    with RunningServer(bundle, *with_keys(tmp_path)) as server:
        say_goodbye(server, bundle, KEY)
        log = server.log()
    assert "'/v1/apps/hark/stream' 101" in log
    assert KEY not in log


@pytest.mark.slow
def test_front_ends_of_their_own(bundle: Path) -> None:
    with RunningServer(bundle, "--frontends", "2") as server:
        signals = sounds(4, 2000)
        for signal_T in signals:
            with Client(f"http://{server.host}:{server.port}") as client, client.stream("hark") as live:
                live.send(signal_T)
                frames = [frame for result in live.end() for frame in result.event or ()]
                np.testing.assert_allclose(frames, offline(bundle, signal_T[None])[0], atol=1e-5)
        soon(lambda: streams_of(server)["open"] == 0)
        counts = streams_of(server)
        assert (counts["opened"], counts["aborted"], counts["results"]) == (4, 0, counts["chunks"])
        say_goodbye(server, bundle)
