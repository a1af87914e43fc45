"""tritonclient.grpc, unchanged, against the Open Inference Protocol over gRPC."""

import asyncio
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from penstock.bench.streams.grpc_call import DATA, END_STREAM
from penstock.core.errors import Forbidden, ServeError, Unauthorized
from penstock.serve.exchange.access import Access
from penstock.serve.grpc.oip_v2_pb2 import ModelInferRequest, ModelInferResponse, RepositoryIndexRequest
from penstock.serve.grpc.service import GrpcServer
from penstock.serve.messages import ModelState
from penstock.serve.oip.shared_memory import Regions
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.settings import LimitSettings, NetworkSettings
from tests.support.clock import idle_loop
from tests.support.http2 import Http2Client, begun, frame
from tests.support.serving import RunningServer, serve_command, write_doubler

# The clients are not typed.
triton: Any = tritonclient.grpc
triton_aio: Any = tritonclient.grpc.aio

# Of a tenth of a second each: more than any test waits for.
MANY = 120
# Of both kinds, as many: more than a test asks meanwhile.
EACH = 15
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
INFER = "/inference.GRPCInferenceService/ModelInfer"


def grpc_url(server: RunningServer) -> str:
    assert server.process.stdout is not None
    return f"127.0.0.1:{server.process.stdout.readline().split()[-1]}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(write_doubler(tmp_path_factory.mktemp("grpc")), "--grpc-port", "0") as server:
        yield server


@pytest.fixture(scope="module")
def url(server: RunningServer) -> str:
    return grpc_url(server)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    client = triton.InferenceServerClient(url)
    yield client
    client.close()


@pytest.fixture(scope="module")
def slow_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_doubler(tmp_path_factory.mktemp("slow"), sleep_s=0.1)


SLOW = ("--grpc-port", "0", "--latency-ms", "60000", "--max-batch", "1")


@pytest.fixture(scope="module")
def slow(slow_bundle: Path) -> Iterator[tuple[RunningServer, str]]:
    """One row at a time, a tenth of a second each; and its address for gRPC."""
    with RunningServer(slow_bundle, *SLOW) as server:
        yield server, grpc_url(server)
        assert server.log() == ""


@pytest.fixture
def ending(slow_bundle: Path) -> Iterator[RunningServer]:
    """As slow, for a test to end."""
    with RunningServer(slow_bundle, *SLOW) as server:
        yield server


def tensors(values: np.ndarray = ROWS, name: str = "numbers") -> list[Any]:
    given = triton.InferInput(name, list(values.shape), "FP32")
    given.set_data_from_numpy(values)
    return [given]


def stats(server: RunningServer) -> dict[str, Any]:
    return server.ask("GET", "/v1/stats")[2]


def until(true: Callable[[], bool], *, within_s: float = 10.0) -> None:
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s, f"not within {within_s:g} s"
        time.sleep(0.02)


def rows_run(server: RunningServer) -> int:
    return server.ask("GET", "/v2/models/doubler/stats")[2]["model_stats"][0]["execution_count"]


def test_health_metadata_configuration_and_index(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("doubler")
    assert client.is_model_ready("doubler", "1")
    assert not client.is_model_ready("doubler", "2")
    assert not client.is_model_ready("nobody")
    assert client.get_server_metadata().name == "penstock"
    metadata = client.get_model_metadata("doubler", as_json=True)
    assert metadata["inputs"] == [{"name": "numbers", "datatype": "FP32", "shape": ["-1", "4"]}]
    assert metadata["versions"] == ["1"]
    config = client.get_model_config("doubler", as_json=True)["config"]
    assert config["output"] == [{"name": "doubles", "data_type": "TYPE_FP32", "dims": ["4"]}]
    assert config["max_batch_size"] > 1
    assert [(model.name, model.state) for model in client.get_model_repository_index().models] == [("doubler", "READY")]


def test_infer(client: Any) -> None:
    wanted = [triton.InferRequestedOutput("doubles")]
    result = client.infer("doubler", tensors(), outputs=wanted, request_id="seven", priority=2)
    np.testing.assert_array_equal(result.as_numpy("doubles"), ROWS * 2)
    assert (result.get_response().id, result.get_response().model_version) == ("seven", "1")
    single = client.infer("doubler", tensors(ROWS[0]), model_version="1").as_numpy("doubles")
    np.testing.assert_array_equal(single, ROWS[0] * 2)


def test_typed_contents_are_answered_with_typed_contents(url: str) -> None:
    request = ModelInferRequest(model_name="doubler")
    request.inputs.add(name="numbers", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([1, 2, 3, 4])
    with grpc.insecure_channel(url) as channel:
        infer = channel.unary_unary(INFER, ModelInferRequest.SerializeToString, ModelInferResponse.FromString)
        response = infer(request, timeout=10)
    assert list(response.outputs[0].contents.fp32_contents) == [2, 4, 6, 8]
    assert not response.raw_output_contents


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression(client: Any, algorithm: str) -> None:
    many = np.tile(ROWS, (30, 1))
    result = client.infer("doubler", tensors(many), compression_algorithm=algorithm)
    np.testing.assert_array_equal(result.as_numpy("doubles"), many * 2)


def test_asynchronous_requests_meet_their_own_answers(client: Any) -> None:
    answers: Queue[tuple[int, Any, Any]] = Queue()
    for n in range(50):
        client.async_infer(
            "doubler", tensors(ROWS + 20 + n), lambda result, error, n=n: answers.put((n, result, error))
        )
    for _ in range(50):
        n, result, error = answers.get(timeout=10)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("doubles"), (ROWS + 20 + n) * 2)


def test_a_stream_goes_on_after_errors(client: Any) -> None:
    answers: Queue[tuple[Any, Any]] = Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for n in range(300):
        name = "numbers" if n % 10 else "other"
        client.async_stream_infer("doubler", tensors(ROWS + 20 + n, name), request_id=str(n))
    results, errors = set[int](), list[str]()
    for _ in range(300):
        result, error = answers.get(timeout=10)
        if error:
            errors.append(error.message())
            continue
        n = int(result.get_response().id)
        np.testing.assert_array_equal(result.as_numpy("doubles"), (ROWS + 20 + n) * 2)
        assert result.get_response().parameters["triton_final_response"].bool_param
        results.add(n)
    client.stop_stream()
    assert results == {n for n in range(300) if n % 10}
    assert errors == ["The input is named 'other'; this model's is 'numbers'."] * 30
    assert answers.empty()


def test_statistics_count_the_rows(client: Any) -> None:
    def count() -> int:
        return client.get_inference_statistics("doubler").model_stats[0].inference_count

    before = count()
    client.infer("doubler", tensors())
    assert count() == before + 3
    assert client.get_inference_statistics().model_stats[0].name == "doubler"


def test_http_is_served_beside_it(server: RunningServer, client: Any) -> None:
    before = stats(server)["answered"]
    client.infer("doubler", tensors())
    assert server.ask("POST", "/v1/apps/doubler", b"[1, 2, 3, 4]")[2] == {"doubled": [2, 4, 6, 8]}
    assert stats(server)["answered"] == before + 2


@pytest.mark.parametrize(
    ("call", "status", "sentence"),
    [
        (lambda c: c.infer("nobody", tensors()), "NOT_FOUND", "There is no model 'nobody' here; there is 'doubler'."),
        (
            lambda c: c.infer("doubler", tensors(), "7"),
            "NOT_FOUND",
            "Model 'doubler' is served in version 1 alone, not 7.",
        ),
        (lambda c: c.get_model_metadata("nobody"), "NOT_FOUND", "no model 'nobody'"),
        (lambda c: c.get_model_config("nobody"), "NOT_FOUND", "no model 'nobody'"),
        (lambda c: c.get_inference_statistics("nobody"), "NOT_FOUND", "no model 'nobody'"),
        (lambda c: c.infer("doubler", tensors(name="other")), "INVALID_ARGUMENT", "named 'other'"),
        (lambda c: c.infer("doubler", tensors(ROWS[:, :3])), "INVALID_ARGUMENT", "The shape is [3, 3]"),
        (lambda c: c.infer("doubler", tensors(ROWS * np.nan)), "INVALID_ARGUMENT", "NaN or infinity"),
        (lambda c: c.infer("doubler", tensors(np.tile(ROWS, (999, 1)))), "INVALID_ARGUMENT", "2,997 rows"),
        (lambda c: c.infer("doubler", tensors(), timeout=1), "DEADLINE_EXCEEDED", "the network's own time"),
        (lambda c: c.infer("doubler", tensors(ROWS * 0 + 13)), "INTERNAL", "network failed on this input"),
        (lambda c: c.infer("doubler", tensors(ROWS * 0 + 17)), "INTERNAL", "NaN or infinity"),
        (lambda c: c.load_model("doubler"), "PERMISSION_DENIED", "started with its models named"),
        (lambda c: c.load_model("doubler", config="{}"), "INVALID_ARGUMENT", "takes no parameters here, and config"),
        (lambda c: c.unload_model("doubler"), "PERMISSION_DENIED", "started with its models named"),
        (lambda c: c.get_system_shared_memory_status(), "INVALID_ARGUMENT", "takes no shared memory"),
        (lambda c: c.get_cuda_shared_memory_status(), "UNIMPLEMENTED", ""),
        (lambda c: c.infer("doubler", tensors(np.zeros((1 << 17, 4), "f"))), "RESOURCE_EXHAUSTED", "larger than max"),
    ],
)
def test_mistakes_come_with_their_status(client: Any, call: Callable[[Any], Any], status: str, sentence: str) -> None:
    with pytest.raises(InferenceServerException) as raised:
        call(client)
    assert raised.value.status() == f"StatusCode.{status}"
    assert sentence in raised.value.message()


def test_a_load_report_is_a_trailer_where_a_call_asks_for_it(url: str) -> None:
    """On the wire: gRPC's own client keeps this trailer for its load balancing."""
    request = ModelInferRequest(model_name="doubler", raw_input_contents=[ROWS[:1].tobytes()])
    request.inputs.add(name="numbers", datatype="FP32", shape=[1, 4])
    name = "endpoint-load-metrics-format"
    asks = b"\0" + bytes((len(name),)) + name.encode() + b"\3bin"

    def trailers(model: str, more: bytes) -> bytes:
        request.model_name = model
        message = request.SerializeToString()
        with Http2Client(int(url.rpartition(":")[2])) as client:
            client.open(INFER, 1, more)
            client.send(frame(DATA, begun(len(message), message), END_STREAM, 1))
            return client.until_ended(1, 10)

    assert b"endpoint-load-metrics-bin" not in trailers("doubler", b"")
    assert b"endpoint-load-metrics-bin" in trailers("doubler", asks)
    refused = trailers("tripler", asks)
    assert b"There is no model" in refused
    assert b"endpoint-load-metrics-bin" in refused


def test_bytes_that_are_no_message_are_the_clients_mistake(url: str, client: Any) -> None:
    with grpc.insecure_channel(url) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary(INFER)(b"\xff\xff\xff", timeout=10)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "3 bytes are not a ModelInferRequest" in str(raised.value.details())
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        assert b"3 bytes are not a ModelInferRequest" in next(stream(iter([b"\xff\xff\xff"]), timeout=10))
    assert client.is_server_live()


def test_what_is_refused_says_when_to_come_back(slow: tuple[RunningServer, str]) -> None:
    server, url = slow
    client = triton.InferenceServerClient(url)
    pending = [client.async_infer("doubler", tensors(ROWS[:1]), lambda result, error: None) for _ in range(MANY)]
    until(lambda: stats(server)["slots"]["in_use"] > MANY / 2)
    request = ModelInferRequest(model_name="doubler", raw_input_contents=[ROWS[:1].tobytes()])
    request.inputs.add(name="numbers", datatype="FP32", shape=[1, 4])
    request.parameters["timeout"].int64_param = 2_000_000
    with grpc.insecure_channel(url) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(INFER, ModelInferRequest.SerializeToString)(request, timeout=10)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing: Any = raised.value.trailing_metadata()
    assert int(dict(trailing)["retry-after-ms"]) > 100
    for call in pending:
        call.cancel()
    until(lambda: stats(server)["slots"]["in_use"] == 0)
    client.close()


def test_a_cancelled_request_does_not_run(slow: tuple[RunningServer, str]) -> None:
    server, url = slow
    before = rows_run(server)
    client = triton.InferenceServerClient(url)
    answers: Queue[Any] = Queue()
    pending = [
        client.async_infer("doubler", tensors(ROWS[:1]), lambda result, error: answers.put(error)) for _ in range(MANY)
    ]
    until(lambda: stats(server)["slots"]["in_use"] > MANY / 2)
    for call in pending:
        call.cancel()
    until(lambda: stats(server)["slots"]["in_use"] == 0, within_s=5)
    assert rows_run(server) - before < MANY / 2
    errors = [error for error in (answers.get(timeout=5) for _ in pending) if error]
    assert {error.status() for error in errors} == {"StatusCode.CANCELLED"}
    client.close()


def test_the_deadline_of_a_call_is_its_budget(slow: tuple[RunningServer, str]) -> None:
    client = triton.InferenceServerClient(slow[1])
    with pytest.raises(InferenceServerException) as raised:
        client.infer("doubler", tensors(ROWS[:1]), client_timeout=0.05)
    assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    begin_s = time.monotonic()
    with pytest.raises(InferenceServerException, match=r"past the budget of \d+") as raised:
        client.infer("doubler", tensors(np.zeros((60, 4), np.float32)), client_timeout=5.0)
    waited_ms = (time.monotonic() - begin_s) * 1e3
    assert raised.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    (budget_ms,) = map(int, re.findall(r"past the budget of (\d+)", raised.value.message()))
    assert 4500 - waited_ms < budget_ms < 5100
    client.close()


def test_a_deadline_that_passes_takes_the_rows_along(slow: tuple[RunningServer, str]) -> None:
    server, url = slow
    before = rows_run(server)
    client = triton.InferenceServerClient(url)
    answers: Queue[Any] = Queue()
    client.start_stream(lambda result, error: answers.put(error), stream_timeout=1)
    for _ in range(MANY):
        client.async_stream_infer("doubler", tensors(ROWS[:1]))
    while (error := answers.get(timeout=5)) is None:
        pass
    assert error.status() == "StatusCode.DEADLINE_EXCEEDED"
    until(lambda: stats(server)["slots"]["in_use"] == 0, within_s=5)
    assert rows_run(server) - before < MANY / 2
    client.close()


def test_a_stream_that_is_cancelled_takes_its_requests_along(slow: tuple[RunningServer, str]) -> None:
    server, url = slow
    before = rows_run(server)
    client = triton.InferenceServerClient(url)
    client.start_stream(lambda result, error: None)
    for _ in range(MANY):
        client.async_stream_infer("doubler", tensors(ROWS[:1]))
    until(lambda: stats(server)["slots"]["in_use"] > MANY / 2)
    client.stop_stream(cancel_requests=True)
    until(lambda: stats(server)["slots"]["in_use"] == 0, within_s=5)
    assert rows_run(server) - before < MANY / 2
    client.close()


LOST_CLIENT = """
import sys, time
import numpy as np
import tritonclient.grpc as triton
client = triton.InferenceServerClient(sys.argv[1])
given = triton.InferInput("numbers", [1, 4], "FP32")
given.set_data_from_numpy(np.ones((1, 4), np.float32))
client.start_stream(lambda result, error: None)
for _ in range(int(sys.argv[2])):
    client.async_infer("doubler", [given], lambda result, error: None)
    client.async_stream_infer("doubler", [given])
time.sleep(60)
"""


def test_a_client_that_is_killed_leaves_nothing(slow: tuple[RunningServer, str]) -> None:
    server, url = slow
    before = rows_run(server)
    lost = subprocess.Popen([sys.executable, "-c", LOST_CLIENT, url, str(MANY // 2)])
    until(lambda: stats(server)["slots"]["in_use"] > MANY / 2, within_s=30)
    lost.kill()
    lost.wait()
    until(lambda: stats(server)["slots"]["in_use"] == 0, within_s=5)
    assert rows_run(server) - before < MANY / 2


# The drain must outlast what is asked of it: that needs a processor.
@pytest.mark.thorough
@pytest.mark.alone
def test_a_drain_answers_what_was_accepted(ending: RunningServer) -> None:
    client = triton.InferenceServerClient(grpc_url(ending))
    answers: Queue[tuple[Any, Any]] = Queue()
    streamed: Queue[tuple[Any, Any]] = Queue()
    client.start_stream(lambda result, error: streamed.put((result, error)))
    # So many that the drain outlasts what is asked of it below.
    for _ in range(EACH):
        client.async_infer("doubler", tensors(ROWS[:1]), lambda result, error: answers.put((result, error)))
        client.async_stream_infer("doubler", tensors(ROWS[:1]))
    until(lambda: stats(ending)["slots"]["in_use"] > EACH)
    ending.stop()
    until(lambda: not client.is_server_ready())
    assert client.is_server_live()
    assert [answers.get(timeout=20)[1] for _ in range(EACH)] == [None] * EACH
    assert [streamed.get(timeout=20)[1] for _ in range(EACH)] == [None] * EACH
    assert "shutting down" in streamed.get(timeout=10)[1].message()
    assert ending.process.wait(timeout=10) == 0
    with pytest.raises(InferenceServerException) as raised:
        client.infer("doubler", tensors())
    assert raised.value.status() == "StatusCode.UNAVAILABLE"
    client.close()
    assert ending.log() == ""


@pytest.mark.thorough
def test_a_second_signal_ends_it_at_once(ending: RunningServer) -> None:
    client = triton.InferenceServerClient(grpc_url(ending))
    answers: Queue[Any] = Queue()
    for _ in range(MANY):
        client.async_infer("doubler", tensors(ROWS[:1]), lambda result, error: answers.put(error))
    until(lambda: stats(ending)["slots"]["in_use"] > MANY / 2)
    ending.stop()
    until(lambda: not client.is_server_ready())
    ending.stop()
    # What waits would take longer, and so would a drain.
    assert ending.process.wait(timeout=4) == 0
    assert any(answers.get(timeout=5) for _ in range(MANY))
    client.close()
    assert ending.log() == ""


@pytest.mark.thorough
def test_a_port_that_is_taken_is_said_in_one_sentence(server: RunningServer, url: str, slow_bundle: Path) -> None:
    command = serve_command(slow_bundle, "--grpc-port")
    done = subprocess.run([*command, url.rpartition(":")[2]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--grpc-port" in done.stderr


def test_a_missing_extra_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServeError, match=r"install penstock-nn\[grpc\]"):
        NetworkSettings(grpc_port=0)


def test_the_asynchronous_client(url: str) -> None:
    async def talk() -> None:
        async with triton_aio.InferenceServerClient(url) as client:
            assert await client.is_server_ready()
            assert (await client.get_model_metadata("doubler")).name == "doubler"
            results = await asyncio.gather(*(client.infer("doubler", tensors(ROWS + 20 + n)) for n in range(30)))
            for n, result in enumerate(results):
                np.testing.assert_array_equal(result.as_numpy("doubles"), (ROWS + 20 + n) * 2)
            with pytest.raises(InferenceServerException, match="no model 'nobody'"):
                await client.infer("nobody", tensors())

            async def requests() -> AsyncIterator[dict[str, Any]]:
                for n in range(30):
                    name = "numbers" if n % 3 else "other"
                    yield {"model_name": "doubler", "inputs": tensors(ROWS + 20 + n, name), "request_id": str(n)}

            answers = [answer async for answer in client.stream_infer(requests())]
            wrong = [error.message() for _, error in answers if error]
            assert wrong == ["The input is named 'other'; this model's is 'numbers'."] * 10
            good = {int(result.get_response().id) for result, error in answers if error is None}
            assert good == {n for n in range(30) if n % 3}
            assert len(answers) == 30

    asyncio.run(talk())


async def change(name: str, unload: bool) -> None: ...


def no_models() -> ModelRegistry:
    models = ModelRegistry(change, loading=True)
    models.set_state(ModelState(name="one", version="1", state="READY"))
    models.set_state(ModelState(name="two", version="3", state="UNAVAILABLE", reason="unloaded"))
    return models


def authorise(key: str | None, admin: bool) -> str:
    if key is None or not key.startswith("Bearer right"):
        raise Unauthorized("There is no key that is known.")
    if admin and key != "Bearer right admin":
        raise Forbidden("Not an admin's.")
    return key


def test_a_call_without_a_key_is_refused() -> None:
    async def talk() -> None:
        server = GrpcServer(
            no_models(),
            batch_loop=idle_loop(time.monotonic_ns),
            listener=socket.create_server(("127.0.0.1", 0)),
            max_message_bytes=1 << 20,
            limits=LimitSettings(),
            authorise=authorise,
            regions=Regions(None, 0),
        )
        await server.start()
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            assert await client.is_server_ready()
            right = {"authorization": "Bearer right"}
            index = await client.get_model_repository_index(headers=right)
            assert [(model.name, model.reason) for model in index.models] == [("one", ""), ("two", "unloaded")]
            await client.load_model("two", headers={"authorization": "Bearer right admin"})
            with pytest.raises(InferenceServerException, match="Not an admin") as raised:
                await client.load_model("two", headers=right)
            assert raised.value.status() == "StatusCode.PERMISSION_DENIED"
            assert not await client.is_model_ready("two", headers=right)
            for headers in (None, {"authorization": "Bearer wrong"}):
                with pytest.raises(InferenceServerException, match="no key") as raised:
                    await client.get_model_repository_index(headers=headers)
                assert raised.value.status() == "StatusCode.UNAUTHENTICATED"

                async def requests() -> AsyncIterator[dict[str, Any]]:
                    yield {"model_name": "one", "inputs": tensors()}

                with pytest.raises(grpc.RpcError, match="no key"):
                    _ = [answer async for answer in client.stream_infer(requests(), headers=headers)]
        await server.stop(1)

    asyncio.run(talk())


def test_the_index_may_leave_out_what_is_not_ready() -> None:
    async def talk() -> None:
        server = GrpcServer(
            no_models(),
            batch_loop=idle_loop(time.monotonic_ns),
            listener=socket.create_server(("127.0.0.1", 0)),
            max_message_bytes=1 << 20,
            limits=LimitSettings(),
            authorise=Access().check_key,
            regions=Regions(None, 0),
        )
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            index = channel.unary_unary(
                "/inference.GRPCInferenceService/RepositoryIndex", RepositoryIndexRequest.SerializeToString
            )
            assert b"two" in await index(RepositoryIndexRequest())
            assert b"two" not in await index(RepositoryIndexRequest(ready=True))
        await server.stop(1)

    asyncio.run(talk())
