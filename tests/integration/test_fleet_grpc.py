"""gRPC through real Envoy with the configuration of `deploy/`, before real servers."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from benchmarks.acceptance.fleet.routing_proxies import ENVOY, find_program, running_proxy
from benchmarks.acceptance.fleet.routing_servers import (
    NUMBERS,
    RoutedServers,
    free_ports,
    routed_servers,
    write_paced,
)
from penstock.bench.server_process import model_stats
from penstock.serve.grpc.oip_v2_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

pytestmark = pytest.mark.fleet

SERVICE = "/inference.GRPCInferenceService"
PACE_S = 0.1
OPTIONS = ("--latency-ms", "5000", "--max-batch", "1")
ROW = np.arange(NUMBERS, dtype=np.float32)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoutedServers]:
    if find_program(ENVOY) is None:
        pytest.skip("envoy is not installed; 'make fleet' installs it")
    with pytest.MonkeyPatch.context() as patch:
        # Processes of their own and not forks, whose groups are not theirs alone to kill.
        patch.setattr(sys, "executable", f"{sys.prefix}/bin/python")
        bundle = write_paced(tmp_path_factory.mktemp("paced"))
        with routed_servers(bundle, OPTIONS, (PACE_S, PACE_S), grpc=True) as servers:
            yield servers


@pytest.fixture
def channel(servers: RoutedServers) -> Iterator[grpc.Channel]:
    port = free_ports(1)[0]
    with running_proxy(ENVOY, port, servers.backends), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


def row_request(model: str = RoutedServers.name, timeout_us: int | None = None) -> ModelInferRequest:
    request = ModelInferRequest(model_name=model, raw_input_contents=[ROW.tobytes()])
    request.inputs.add(name="numbers", datatype="FP32", shape=[1, NUMBERS])
    if timeout_us is not None:
        request.parameters["timeout"].int64_param = timeout_us
    return request


def infer(channel: grpc.Channel, request: ModelInferRequest | None = None) -> ModelInferResponse:
    call: Any = channel.unary_unary(
        f"{SERVICE}/ModelInfer", ModelInferRequest.SerializeToString, ModelInferResponse.FromString
    )
    return call(request or row_request(), timeout=20)


def is_right(response: ModelInferResponse) -> bool:
    return bool(np.array_equal(np.frombuffer(response.raw_output_contents[0], np.float32), 2 * ROW))


def answered(servers: RoutedServers, index: int) -> int:
    stats = model_stats(servers.process(index).url, servers.name)["inference_stats"]
    return sum(stats["success"].values())


def refusal(call: Callable[[], object]) -> grpc.RpcError | None:
    try:
        call()
    except grpc.RpcError as error:
        return error
    return None


def test_calls_on_one_connection_go_to_all_servers(servers: RoutedServers, channel: grpc.Channel) -> None:
    before = [answered(servers, index) for index in range(2)]
    for _ in range(12):
        assert is_right(infer(channel))
    gained = [answered(servers, index) - earlier for index, earlier in enumerate(before)]
    assert min(gained) > 2, gained


def test_statuses_of_mistakes_and_refusals_arrive(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        infer(channel, row_request("nobody"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert "nobody" in str(raised.value.details())
    with pytest.raises(grpc.RpcError) as raised:
        infer(channel, row_request(timeout_us=1))
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "the network's own time" in str(raised.value.details())
    with ThreadPoolExecutor(24) as pool:
        errors = list(pool.map(lambda _: refusal(lambda: infer(channel, row_request(timeout_us=350_000))), range(24)))
    refused: list[Any] = [error for error in errors if error is not None]
    # Two servers answer three of them each in time.
    assert 4 <= len(refused) <= 20
    assert {error.code() for error in refused} <= {
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
    said = [error for error in refused if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert said
    for error in said:
        assert "budget" in error.details()
        trailers = dict(error.trailing_metadata())
        assert int(trailers["retry-after-ms"]) > 0


def test_requests_on_a_stream_are_answered_and_their_errors_arrive(channel: grpc.Channel) -> None:
    call: Any = channel.stream_stream(
        f"{SERVICE}/ModelStreamInfer", ModelInferRequest.SerializeToString, ModelStreamInferResponse.FromString
    )
    responses = list(call(iter([row_request(), row_request("nobody"), row_request()]), timeout=20))
    assert sorted(bool(response.error_message) for response in responses) == [False, False, True]
    assert all(is_right(each.infer_response) for each in responses if not each.error_message)


def test_a_server_that_is_killed_takes_no_call_from_its_client(servers: RoutedServers, channel: grpc.Channel) -> None:
    infer(channel)
    servers.kill(1)
    try:
        assert all(is_right(infer(channel)) for _ in range(6))
    finally:
        servers.start(1)
