"""gRPC clients that take more than their share of time, connections or memory, and the others beside them."""

import gzip
import itertools
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from penstock.bench.streams.grpc_call import DATA, END_HEADERS, END_STREAM, PING, RST_STREAM, SETTINGS
from penstock.serve.grpc.oip_v2_pb2 import ModelInferRequest
from penstock.serve.grpc.open_calls import goaway
from penstock.serve.settings import LimitSettings
from tests.support.http2 import INFER, STREAM, Http2Client, begun, frame, head
from tests.support.processes import eventually, memory_bytes
from tests.support.serving import RunningServer, write_doubler
from tests.support.slow_clients import median_latency_s
from tests.support.thorough import thorough

triton: Any = tritonclient.grpc

HEAD_S, BODY_S, IDLE_S, MIB, CONNECTIONS = 1.5, 2.0, 3.0, 16, 40
MESSAGE = 900_000
# Unless --head-timeout-s says something else.
HEAD_DEFAULT_S = LimitSettings().head_timeout_s
CANCEL, CONTINUATION = (8).to_bytes(4, "big"), 9


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_doubler(tmp_path_factory.mktemp("doubler"))


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[RunningServer]:
    """Short deadlines, little memory."""
    options = [
        *("--grpc-port", "0", "--max-unfinished-mib", str(MIB), "--max-connections", str(CONNECTIONS)),
        *("--head-timeout-s", str(HEAD_S), "--body-timeout-s", str(BODY_S), "--idle-timeout-s", str(IDLE_S)),
    ]
    with RunningServer(bundle, *options) as server:
        yield server


@pytest.fixture(scope="module")
def port(server: RunningServer) -> int:
    return port_of(server)


@pytest.fixture(scope="module")
def patient_port(bundle: Path) -> Iterator[int]:
    """Few connections, and the deadlines and memory of the defaults."""
    with RunningServer(bundle, "--grpc-port", "0", "--max-connections", str(CONNECTIONS)) as server:
        yield port_of(server)


@pytest.fixture(scope="module")
def small_port(bundle: Path) -> Iterator[int]:
    """Little memory, and the deadlines of the defaults: no call ends by its own."""
    with RunningServer(bundle, "--grpc-port", "0", "--max-unfinished-mib", str(MIB)) as server:
        yield port_of(server)


def port_of(server: RunningServer) -> int:
    assert server.process.stdout is not None
    return int(server.process.stdout.readline().split()[-1].rpartition(":")[2])


def doubles(port: int) -> list[list[float]]:
    """Ask as others do."""
    given = triton.InferInput("numbers", [1, 4], "FP32")
    given.set_data_from_numpy(np.array([[1, 2, 3, 4]], np.float32))
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return client.infer("doubler", [given], client_timeout=20).as_numpy("doubles").tolist()


def answered(port: int) -> bool:
    with suppress(InferenceServerException):
        return doubles(port) == [[2, 4, 6, 8]]
    return False


@pytest.mark.parametrize("path", [INFER, thorough(STREAM)])
def test_a_deadline_holds_for_all_of_a_message(port: int, path: str) -> None:
    # Before the server's own time begins.
    start_s = time.monotonic()
    with Http2Client(port) as client:
        client.open(path, 1)
        client.send(frame(DATA, begun(MESSAGE), 0, 1))
        while 1 not in client.ended:
            assert time.monotonic() - start_s < 15, "the message may take for ever"
            client.send(frame(DATA, b"x", 0, 1))
            client.read(0.1)
        late_s = time.monotonic() - start_s - BODY_S
    assert b"whole" in client.ended[1]
    # A deadline of each piece would never come.
    assert -0.1 <= late_s < 10


@pytest.mark.thorough
def test_a_stream_on_which_nothing_moves_is_ended(port: int) -> None:
    start_s = time.monotonic()
    with Http2Client(port) as client:
        client.open(STREAM, 1)
        client.send(frame(DATA, begun(0), 0, 1))
        # The answer to the empty request comes first.
        client.read(0.5)
        assert not client.closed
        client.send(frame(DATA, begun(MESSAGE), 0, 1))
        while not client.closed and time.monotonic() - start_s < 15:
            client.send(frame(DATA, b"x", 0, 1))
            client.read(0.1)
            if b"whole" in client.received:
                break
    assert b"No whole message came" in client.received
    assert IDLE_S - 0.5 <= time.monotonic() - start_s < IDLE_S + 10


def test_a_header_block_has_a_deadline_and_a_largest_size(port: int, small_port: int) -> None:
    # 300 KB of memory of the library are 16 KB here.
    piece = frame(CONTINUATION, b"\0\1a\1b" * 200, 0, 1)
    with Http2Client(port) as slow, Http2Client(small_port) as large, Http2Client(small_port) as whole:
        # No frame may be within a header block: settings are acknowledged before.
        for client in (slow, large, whole):
            client.settle()
        start_s = time.monotonic()
        slow.send(head(INFER, 1, flags=0))
        # Long before the deadline of ten seconds that it has.
        large.send(head(INFER, 1, flags=0), piece * 40)
        eventually(lambda: large.read(0.02) or large.closed, within_s=HEAD_DEFAULT_S / 2)
        # What the library itself refuses is refused by its status.
        whole.send(head(INFER, 1, flags=0), piece * 25, frame(CONTINUATION, b"", END_HEADERS, 1))
        assert b"grpc-status" in whole.until_ended(1, 5)
        while not slow.closed:
            assert time.monotonic() - start_s < HEAD_S + 15, "the head may take for ever"
            slow.send(frame(CONTINUATION, b"\0\1a\1b", 0, 1))
            slow.read(0.2)
        assert time.monotonic() - start_s > HEAD_S - 0.1
        assert b"CONTINUATION" not in slow.received


def test_unfinished_header_blocks_of_all_connections_are_bounded(small_port: int) -> None:
    piece = b"\0\1a\1b" * 3200
    # A thirty-second of what may be unfinished.
    most = (MIB << 20) // 32 // (2 * len(piece))
    with ExitStack() as held:
        clients: list[Http2Client] = []
        for _ in range(most + 3):
            client = held.enter_context(Http2Client(small_port))
            # The server has the blocks of those before, in their order.
            client.settle()
            client.send(head(INFER, 1, piece, flags=0), frame(CONTINUATION, piece, 0, 1))
            clients.append(client)
        # The oldest go, long before their deadline.
        for client in clients[:3]:
            eventually(lambda client=client: client.read(0.02) or client.closed, within_s=HEAD_DEFAULT_S / 2)
        clients[3].read(0.02)
        assert [client.closed for client in clients[:4]] == [True, True, True, False]
        assert doubles(small_port) == [[2, 4, 6, 8]]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_compressed_message_is_bounded_once_it_is_unpacked(port: int, encoding: str) -> None:
    message = ModelInferRequest(model_name="doubler", id="x" * 2_000_000).SerializeToString()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(INFER)(message, timeout=10, compression=getattr(grpc.Compression, encoding.title()))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "once it is unpacked" in str(raised.value.details())


@pytest.mark.thorough
def test_connections_that_say_nothing_or_are_idle_are_closed(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as silent, Http2Client(port) as idle:
        start_s = time.monotonic()
        while silent.recv(1 << 16):
            pass
        assert time.monotonic() - start_s < HEAD_S + 10
        while not idle.closed:
            assert time.monotonic() - start_s < IDLE_S + 10
            idle.read(0.5)


def test_connections_are_limited(patient_port: int) -> None:
    with ExitStack() as held:
        clients = [held.enter_context(Http2Client(patient_port)) for _ in range(CONNECTIONS + 20)]

        def closed() -> int:
            for client in clients:
                client.read(0.02)
            return sum(client.closed for client in clients)

        # A new one waits until the oldest has been idle for a moment; nobody is idle for too long.
        eventually(lambda: closed() >= 20, within_s=10)
        assert closed() == 20
    eventually(lambda: answered(patient_port), within_s=10)


@pytest.mark.parametrize("sends", ["nothing", thorough("half a message"), thorough("half a head")])
def test_who_holds_all_connections_does_not_shut_out_others(patient_port: int, sends: str) -> None:
    port = patient_port
    with ExitStack() as held:
        clients = [held.enter_context(Http2Client(port)) for _ in range(CONNECTIONS)]
        for client in clients:
            client.settle()
            if sends == "half a message":
                client.open(INFER, 1)
                client.send(frame(DATA, begun(MESSAGE, b"x" * 100), 0, 1))
            elif sends == "half a head":
                client.send(head(INFER, 1, flags=0))
        # What has just begun stays for a second, see `OLD_NS`.
        time.sleep(0.2 if sends == "nothing" else 1.1)
        start_s = time.monotonic()
        for _ in range(3):
            assert doubles(port) == [[2, 4, 6, 8]]
        # Before any of them would be closed by a deadline of its own.
        assert time.monotonic() - start_s < HEAD_DEFAULT_S - 2
        for client in clients:
            client.read(0.01)
        # Its calls were not answered, and may be sent again.
        assert any(client.closed and goaway(0) in client.received for client in clients)


@pytest.mark.thorough
def test_beyond_all_connections_health_is_answered_and_nothing_else(patient_port: int) -> None:
    port, address = patient_port, f"127.0.0.1:{patient_port}"
    given = triton.InferInput("numbers", [1, 4], "FP32")
    given.set_data_from_numpy(np.array([[1, 2, 3, 4]], np.float32))
    results: SimpleQueue[Any] = SimpleQueue()
    with ExitStack() as held:
        streaming: list[Any] = []
        for number in range(CONNECTIONS):
            # A channel of its own, and so a connection.
            client = triton.InferenceServerClient(address, channel_args=[("penstock.test", number)])
            streaming.append(held.enter_context(client))
            client.start_stream(lambda result, error: results.put((result, error)))
            client.async_stream_infer("doubler", [given])
            assert results.get(timeout=10)[1] is None
        for _ in range(3):
            with triton.InferenceServerClient(address) as probe:
                assert probe.is_server_live(client_timeout=10)
                assert probe.is_server_ready(client_timeout=10)
                assert probe.is_model_ready("doubler", client_timeout=10)
                with pytest.raises(InferenceServerException, match=r"has all of its 40 connections; come back later"):
                    probe.infer("doubler", [given], client_timeout=10)
        with triton.InferenceServerClient(address) as another:
            another.start_stream(lambda result, error: results.put((result, error)))
            # The stream is refused before its first message or after it.
            with suppress(InferenceServerException):
                another.async_stream_infer("doubler", [given])
            assert "has all of its" in str(results.get(timeout=10)[1])
        # Who only holds such a connection loses it.
        silent = held.enter_context(Http2Client(port))
        silent.settle()
        start_s = time.monotonic()
        while not silent.closed:
            assert time.monotonic() - start_s < 10
            silent.read(0.2)
        # The others keep theirs.
        streaming[0].async_stream_infer("doubler", [given])
        assert results.get(timeout=10)[1] is None
    eventually(lambda: answered(port), within_s=10)


def test_a_stream_that_was_answered_keeps_its_place_and_so_does_a_call_that_waits(patient_port: int) -> None:
    port = patient_port
    given = triton.InferInput("numbers", [1, 4], "FP32")
    given.set_data_from_numpy(np.array([[1, 2, 3, 4]], np.float32))
    slow = triton.InferInput("numbers", [1, 4], "FP32")
    # The network takes two seconds.
    slow.set_data_from_numpy(np.array([[-2, 2, 3, 4]], np.float32))
    results: SimpleQueue[Any] = SimpleQueue()
    with (
        ExitStack() as held,
        triton.InferenceServerClient(f"127.0.0.1:{port}") as streaming,
        triton.InferenceServerClient(f"127.0.0.1:{port}") as waiting,
    ):
        streaming.start_stream(lambda result, error: results.put((result, error)))
        streaming.async_stream_infer("doubler", [given])
        assert results.get(timeout=10)[1] is None
        clients = [held.enter_context(Http2Client(port)) for _ in range(CONNECTIONS - 2)]
        for client in clients:
            client.settle()
        waiting.async_infer("doubler", [slow], lambda result, error: results.put((result, error)))
        time.sleep(0.3)
        for _ in range(30):
            held.enter_context(Http2Client(port)).settle()
        assert sum(client.closed or client.read(0.01) or client.closed for client in clients) >= 25
        result, error = results.get(timeout=10)
        assert (error, result.as_numpy("doubles").tolist()) == (None, [[-4, 4, 6, 8]])
        streaming.async_stream_infer("doubler", [given])
        assert results.get(timeout=10)[1] is None


def test_unfinished_messages_stay_within_their_budget(server: RunningServer, port: int) -> None:
    doubles(port)
    before = memory_bytes(server)
    calls = range(1, 41, 2)
    with ExitStack() as held:
        clients = [held.enter_context(Http2Client(port)) for _ in range(8)]
        for client in clients:
            for call in calls:
                client.open(INFER, call)
            client.send_data(dict.fromkeys(calls, begun(MESSAGE + 1, b"x" * MESSAGE)), 0.3)
        grown = memory_bytes(server) - before
        # Whoever is slow makes room.
        assert doubles(port) == [[2, 4, 6, 8]]
        assert memory_bytes(server) - before < (MIB + 32) << 20
    # All of them together would be 144 MB.
    assert grown < (MIB + 32) << 20
    eventually(lambda: answered(port), within_s=10)


def test_who_has_no_key_is_rejected_before_the_message_is_whole(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("anna 0123456789abcdef\n")
    with (
        RunningServer(bundle, "--grpc-port", "0", "--api-keys", str(tmp_path / "keys")) as server,
        Http2Client(port_of(server)) as client,
    ):
        client.open(INFER, 1)
        assert b"key" in client.until_ended(1, 5)


def resets() -> Iterable[bytes]:
    """Calls that are reset as soon as they are open (CVE-2023-44487)."""
    for first in range(1, 1 << 20, 100):
        yield b"".join(head(INFER, call) + frame(RST_STREAM, CANCEL, 0, call) for call in range(first, first + 100, 2))


def streams() -> Iterable[bytes]:
    for first in range(1, 1 << 20, 100):
        yield b"".join(head(STREAM, call) for call in range(first, first + 100, 2))


def empty_calls() -> Iterable[bytes]:
    for first in range(1, 1 << 20, 100):
        calls = range(first, first + 100, 2)
        yield b"".join(head(INFER, call) + frame(DATA, begun(0), END_STREAM, call) for call in calls)


def single_bytes() -> Iterable[bytes]:
    yield head(INFER, 1) + frame(DATA, begun(60_000), 0, 1)
    yield from itertools.repeat(frame(DATA, b"x", 0, 1) * 1000, 59)


def empty_frames() -> Iterable[bytes]:
    yield head(INFER, 1) + frame(DATA, begun(60_000), 0, 1)
    yield from itertools.repeat(frame(DATA, b"", 0, 1) * 1000)


def pings() -> Iterable[bytes]:
    return itertools.repeat(frame(PING, bytes(8)) * 1000)


def settings() -> Iterable[bytes]:
    return itertools.repeat(frame(SETTINGS, b"\0\4\0\1\0\0") * 1000)


def continuations() -> Iterable[bytes]:
    """A head that never ends (CVE-2024-27316)."""
    yield head(INFER, 1, flags=0)
    yield from itertools.repeat(frame(CONTINUATION, b"\0\1a\1b" * 3000, 0, 1) * 4)


def huge_metadata() -> Iterable[bytes]:
    for call in range(1, 1 << 20, 2):
        yield head(INFER, call, (b"\0\1a\x7d" + b"b" * 125) * 120)


@cache
def bomb() -> bytes:
    return gzip.compress(bytes(60_000_000), 9)


def compressed() -> Iterable[bytes]:
    """Messages of 60 KB that unfold to 60 MB."""
    message = begun(len(bomb()), bomb(), compressed=True)
    parts = [message[at : at + 16_384] for at in range(0, len(message), 16_384)]
    for call in range(1, 1 << 20, 2):
        yield head(INFER, call, b"\0\x0dgrpc-encoding\4gzip") + b"".join(frame(DATA, part, 0, call) for part in parts)


QUICK = [resets, continuations]
ANSWERED_BESIDE = [continuations, single_bytes, empty_frames, pings, settings]
FLOODS = [streams, empty_calls, single_bytes, empty_frames, pings, settings, huge_metadata, compressed]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "flood",
    [
        *QUICK,
        *(pytest.param(each, marks=pytest.mark.slow) for each in FLOODS),
    ],
)
def test_a_flood_delays_no_http_client_for_long_and_holds_little_memory(bundle: Path, flood: Any) -> None:
    bomb()
    options = ("--grpc-port", "0", "--body-timeout-s", str(BODY_S), "--max-unfinished-mib", "64")
    with RunningServer(bundle, *options) as server:
        port, over = port_of(server), Event()
        quiet_s, before = median_latency_s(server, 1), memory_bytes(server)

        def run() -> None:
            while not over.is_set():
                with suppress(OSError), Http2Client(port, 2) as client:
                    for payload in flood():
                        client.send(payload)
                        client.read(0.001)
                        if over.is_set() or client.closed:
                            break

        threads = [Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(0.5)
            attacked_s = median_latency_s(server, 3)
            # Calls beside floods of frames that are no calls.
            start_s = time.monotonic()
            assert flood not in ANSWERED_BESIDE or answered(port)
            waited_s = time.monotonic() - start_s
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert waited_s < 10
        assert attacked_s < 0.1 + 10 * quiet_s
        assert memory_bytes(server) - before < 256 << 20
        # Calls that wait to be read when it ends are cancelled first.
        eventually(lambda: answered(port), within_s=10)
        assert median_latency_s(server, 1) < 0.05 + 10 * quiet_s
