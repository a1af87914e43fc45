"""gRPC's own health checks, by gRPC's library alone."""

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest

from tests.support.serving import RunningServer, write_doubler

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_doubler(tmp_path_factory.mktemp("doubler"))


@pytest.fixture(scope="module")
def channel(bundle: Path) -> Iterator[grpc.Channel]:
    with RunningServer(bundle, "--grpc-port", "0") as server, grpc.insecure_channel(address_of(server)) as channel:
        yield channel


def address_of(server: RunningServer) -> str:
    assert server.process.stdout is not None
    return f"127.0.0.1:{server.process.stdout.readline().split()[-1].rpartition(':')[2]}"


def service(name: str) -> bytes:
    return b"\x0a" + bytes([len(name)]) + name.encode()


def check(channel: grpc.Channel, request: bytes) -> bytes:
    call: Any = channel.unary_unary(CHECK)
    return call(request, timeout=10)


@pytest.mark.parametrize("name", ["", "inference.GRPCInferenceService", "doubler"])
def test_the_server_and_its_model_serve(channel: grpc.Channel, name: str) -> None:
    assert check(channel, service(name) if name else b"") == SERVING


def test_an_unknown_model_and_a_damaged_request_have_their_status(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        check(channel, service("nobody"))
    said: Any = raised.value
    assert (said.code(), said.details()) == (grpc.StatusCode.NOT_FOUND, "This server has no model 'nobody'.")
    with pytest.raises(grpc.RpcError) as raised:
        check(channel, b"\x0a\xff")
    said = raised.value
    assert said.code() == grpc.StatusCode.INVALID_ARGUMENT
    watched: Any = channel.unary_stream(WATCH)
    assert next(watched(service("nobody"), timeout=10)) == SERVICE_UNKNOWN


@pytest.mark.thorough
def test_slow_and_large_checks_delay_nobody_and_watches_are_limited(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        check(channel, b"\x0a\x88\x27" + b"x" * 5_000)
    said: Any = raised.value
    assert (said.code(), said.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "A health check has at most 4,096 bytes.",
    )
    never = Event()

    def silence() -> Iterator[bytes]:
        never.wait(20)
        yield from ()

    # As a stream, whose message does not come.
    slow: Any = channel.stream_unary(CHECK)
    held = [slow.future(silence(), timeout=20) for _ in range(100)]
    begun_s = time.monotonic()
    assert check(channel, b"") == SERVING
    assert time.monotonic() - begun_s < 5
    never.set()
    assert all(isinstance(each.exception(timeout=20), grpc.RpcError) for each in held)
    watched: Any = channel.unary_stream(WATCH)
    watches = [watched(b"", timeout=30) for _ in range(64)]
    assert all(next(each) == SERVING for each in watches)
    with pytest.raises(grpc.RpcError) as raised:
        next(watched(b"", timeout=30))
    said = raised.value
    assert said.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert check(channel, b"") == SERVING
    for each in watches:
        each.cancel()


def test_a_watch_sees_the_end_and_does_not_delay_it(bundle: Path) -> None:
    with RunningServer(bundle, "--grpc-port", "0") as server, grpc.insecure_channel(address_of(server)) as channel:
        watched: Any = channel.unary_stream(WATCH)
        answers = watched(b"", timeout=30)
        assert next(answers) == SERVING
        server.stop()
        assert list(answers) == [NOT_SERVING]
        # Well before the end of its patience with requests.
        assert server.process.wait(timeout=9) == 0
        assert server.log() == ""
