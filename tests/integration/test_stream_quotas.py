"""One client cannot take all live streams of a server: quotas over real sockets, of every protocol that has streams."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from penstock import Client
from penstock.core.errors import QuotaExceeded
from penstock.serve.grpc.oip_v2_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from tests.support.live import CHUNK, new_live_bundle
from tests.support.serving import RunningServer

PATH = "/v1/apps/hark/stream"
KEYS = {name: f"{name}-has-a-key-of-many-characters" for name in ("ann", "ben", "eve", "job")}
HERE, THERE = "127.0.0.1", "127.0.0.2"
PER_KEY, PER_ADDRESS = 3, 5
BY_KEY = "The key of '{}' has 3 live streams open, and --max-streams-per-key allows 3; end one of them first."
BY_ADDRESS = "Address {} has 5 live streams open, and --max-streams-per-address allows 5; end one of them first."


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_live_bundle(tmp_path_factory)


def options_in(folder: Path) -> tuple[str, ...]:
    keys = folder / "keys"
    keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    limits = ("--max-streams-per-key", str(PER_KEY), "--max-streams-per-address", str(PER_ADDRESS))
    return ("--api-keys", str(keys), *limits, "--grpc-port", "0")


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(bundle, *options_in(tmp_path_factory.mktemp("keys"))) as server:
        yield server


@pytest.fixture(scope="module")
def grpc_port(server: RunningServer) -> int:
    assert server.process.stdout is not None
    return int(server.process.stdout.readline().split()[-1])


@pytest.fixture(autouse=True)
def nothing_is_left(server: RunningServer) -> Iterator[None]:
    yield
    soon(lambda: streams_of(server)["open"] == 0)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def opened(server: RunningServer, name: str, address: str = HERE) -> ClientConnection:
    """Open a live stream with the key of this name from this address."""
    raw = socket.create_connection((server.host, server.port), source_address=(address, 0))
    return connect(
        f"ws://{server.host}:{server.port}{PATH}", sock=raw, compression=None, additional_headers=bearer(name)
    )


def refusal(server: RunningServer, name: str, address: str = HERE) -> str:
    with pytest.raises(InvalidStatus) as error:
        opened(server, name, address)
    response = error.value.response
    assert response.status_code == 429
    assert "Retry-After" not in response.headers
    return json.loads(response.body or b"")["error"]


def streams_of(server: RunningServer) -> dict[str, int]:
    return server.ask("GET", "/v1/stats", headers=bearer("job"))[2]["models"]["hark"]["streams"]


def soon(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.01)


def reopened(server: RunningServer, name: str) -> ClientConnection:
    """Open a stream as soon as the server notices that another one is gone."""
    end_s = time.monotonic() + 10
    while True:
        try:
            return opened(server, name)
        except InvalidStatus:
            assert time.monotonic() < end_s, "no place became free"
            time.sleep(0.01)


def holds(stream: ClientConnection) -> bool:
    """True if a stream goes on to answer."""
    stream.send('{"type":"start"}')
    stream.recv(10)
    stream.send((0).to_bytes(4, "little") + np.zeros(CHUNK, np.int16).tobytes())
    return json.loads(stream.recv(10))["type"] == "result"


def chunk(name: int | str, flag: str = "") -> bytes:
    """A request of the Open Inference Protocol over HTTP."""
    tensor = {"name": "sound", "shape": [1, CHUNK], "datatype": "INT16", "data": [0] * CHUNK}
    return json.dumps(
        {"inputs": [tensor], "parameters": {"sequence_id": name} | ({flag: True} if flag else {})}
    ).encode()


def put(server: RunningServer, key: str, name: int, flag: str = "") -> tuple[int, Any]:
    status, _, said = server.ask("POST", "/v2/models/hark/infer", chunk(name, flag), bearer(key))
    return status, said


def test_one_key_is_refused_and_another_gets_its_streams_from_the_same_address(server: RunningServer) -> None:
    before = streams_of(server)["refused"]
    with ExitStack() as stack:
        anns = [stack.enter_context(opened(server, "ann")) for _ in range(PER_KEY)]
        assert refusal(server, "ann") == BY_KEY.format("ann")
        # Another address does not help.
        assert refusal(server, "ann", THERE) == BY_KEY.format("ann")
        assert holds(stack.enter_context(opened(server, "ben")))
        anns[0].close()
        assert holds(stack.enter_context(reopened(server, "ann")))
        assert refusal(server, "ann") == BY_KEY.format("ann")
    assert streams_of(server)["refused"] >= before + 3
    metrics = server.ask("GET", "/metrics", headers=bearer("job"))[2].decode()
    counted = dict(line.rsplit(" ", 1) for line in metrics.splitlines())
    assert float(counted['penstock_requests_total{app="hark",outcome="refused"}']) >= 3
    assert float(counted['penstock_requests_total{app="hark",outcome="invalid"}']) == 0
    assert float(counted['penstock_streams_refused_total{app="hark"}']) >= 3


def test_one_address_is_refused_whatever_its_keys_and_another_one_is_not(server: RunningServer) -> None:
    with ExitStack() as stack:
        for name in ("ann", "ann", "ben", "ben", "eve"):
            stack.enter_context(opened(server, name))
        assert refusal(server, "eve") == BY_ADDRESS.format(HERE)
        assert holds(stack.enter_context(opened(server, "eve", THERE)))


HOLD = """
import sys, time
from websockets.sync.client import connect
url, key = sys.argv[1:]
streams = [connect(url, additional_headers={"Authorization": "Bearer " + key}) for _ in range(3)]
print("open", flush=True)
time.sleep(600)
"""


def test_a_client_that_is_killed_gives_its_places_back(server: RunningServer) -> None:
    url = f"ws://{server.host}:{server.port}{PATH}"
    with subprocess.Popen([sys.executable, "-c", HOLD, url, KEYS["ann"]], stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == "open\n"
            assert refusal(server, "ann") == BY_KEY.format("ann")
        finally:
            client.kill()
    with ExitStack() as stack:
        for _ in range(PER_KEY):
            stack.enter_context(reopened(server, "ann"))


def test_the_client_of_python_gets_the_error(server: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(PER_KEY):
            stack.enter_context(opened(server, "ann"))
        client = stack.enter_context(Client(f"http://{server.host}:{server.port}", api_key=KEYS["ann"]))
        with pytest.raises(QuotaExceeded, match="of 'ann' has 3 live streams open"):
            stack.enter_context(client.stream("hark"))


def test_sequences_count_as_streams_and_a_start_anew_needs_no_further_place(server: RunningServer) -> None:
    with opened(server, "ann"):
        for name in (1, 2):
            assert put(server, "ann", name, "sequence_start")[0] == 200
        assert put(server, "ann", 3, "sequence_start") == (429, {"error": BY_KEY.format("ann")})
        assert put(server, "ann", 2, "sequence_start")[0] == 200
        assert put(server, "ann", 2)[0] == 200
        assert put(server, "ben", 3, "sequence_start")[0] == 200
        assert put(server, "ann", 1, "sequence_end")[0] == 200
        assert put(server, "ann", 3, "sequence_start")[0] == 200
        assert refusal(server, "ann") == BY_KEY.format("ann")
        for key, name in (("ann", 2), ("ann", 3), ("ben", 3)):
            assert put(server, key, name, "sequence_end")[0] == 200


def grpc_request(name: int, flag: str) -> ModelInferRequest:
    request = ModelInferRequest(model_name="hark")
    request.inputs.add(name="sound", shape=[1, CHUNK], datatype="INT16")
    request.raw_input_contents.append(np.zeros(CHUNK, np.int16).tobytes())
    request.parameters["sequence_id"].int64_param = name
    request.parameters[flag].bool_param = True
    return request


def test_sequences_and_streams_of_grpc(server: RunningServer, grpc_port: int) -> None:
    service = "/inference.GRPCInferenceService/"
    metadata = (("authorization", f"Bearer {KEYS['ann']}"),)
    with ExitStack() as stack, grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        infer = channel.unary_unary(
            service + "ModelInfer", ModelInferRequest.SerializeToString, ModelInferResponse.FromString
        )
        for name in range(1, PER_KEY + 1):
            infer(grpc_request(name, "sequence_start"), metadata=metadata, timeout=10)
        with pytest.raises(grpc.RpcError) as error:
            infer(grpc_request(9, "sequence_start"), metadata=metadata, timeout=10)
        call: Any = error.value
        assert (call.code(), call.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, BY_KEY.format("ann"))
        for name in range(1, PER_KEY + 1):
            infer(grpc_request(name, "sequence_end"), metadata=metadata, timeout=10)

        calls: Any = channel.stream_stream(
            service + "ModelStreamInfer", ModelInferRequest.SerializeToString, ModelStreamInferResponse.FromString
        )

        def called() -> Any:
            return calls(once_then_wait(stack), metadata=metadata, timeout=60)

        streams = [called() for _ in range(PER_KEY)]
        for stream in streams:
            next(stream)
        with pytest.raises(grpc.RpcError) as error:
            next(called())
        call = error.value
        assert call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert call.details() == BY_KEY.format("ann").replace("live streams", "gRPC streams")
        streams[0].cancel()
        soon(lambda: answers(called()))
        for stream in streams:
            stream.cancel()


def test_the_address_of_a_client_of_grpc_is_known(server: RunningServer, grpc_port: int) -> None:
    """The library itself is connected to a guard of the server."""
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            ModelInferRequest.SerializeToString,
            ModelInferResponse.FromString,
        )

        def send(key: str, name: int, flag: str) -> None:
            metadata = (("authorization", f"Bearer {KEYS[key]}"),)
            infer(grpc_request(name, flag), metadata=metadata, timeout=10)

        begun = [("ann", 21), ("ann", 22), ("ben", 23), ("ben", 24), ("eve", 25)]
        for key, name in begun:
            send(key, name, "sequence_start")
        with pytest.raises(grpc.RpcError) as error:
            send("eve", 26, "sequence_start")
        call: Any = error.value
        assert call.details() == BY_ADDRESS.format(HERE)
        for key, name in begun:
            send(key, name, "sequence_end")


def once_then_wait(stack: ExitStack) -> Iterator[ModelInferRequest]:
    """A request that is answered, and then nothing until the test ends."""
    over = threading.Event()
    stack.callback(over.set)
    request = grpc_request(77, "sequence_start")
    request.model_name = "nobody"
    yield request
    over.wait(60)


def answers(stream: Any) -> bool:
    try:
        next(stream)
    except grpc.RpcError:
        return False
    stream.cancel()
    return True


@pytest.mark.slow
def test_several_front_ends_count_together(bundle: Path, tmp_path: Path) -> None:
    with RunningServer(bundle, *options_in(tmp_path), "--frontends", "2") as server, ExitStack() as stack:
        streams = [stack.enter_context(opened(server, "ann")) for _ in range(PER_KEY)]
        # The kernel spreads connections over the front-ends.
        assert {refusal(server, "ann") for _ in range(8)} == {BY_KEY.format("ann")}
        assert holds(stack.enter_context(opened(server, "ben")))
        streams[1].close()
        assert holds(stack.enter_context(reopened(server, "ann")))
        stack.close()
        soon(lambda: streams_of(server)["open"] == 0)
