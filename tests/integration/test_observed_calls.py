"""Lines of the log and spans of gRPC calls, of a real server."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest

from penstock.serve.grpc import oip_v2_pb2 as pb
from tests.integration.test_grpc_health import CHECK, WATCH, address_of, service
from tests.integration.test_tracing import PARENT, SAMPLED, TRACE, Receiver, attributes
from tests.support.serving import RunningServer, write_doubler

SERVICE = "/inference.GRPCInferenceService"
INFER, STREAM = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"
KEY = "anna-0123456789abcdef"
WHO = ("authorization", f"Bearer {KEY}")
# What makes the doubler sleep.
SLOW = -1.0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def request(*numbers: float, name: str = "doubler") -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name=name)
    made.inputs.add(name="numbers", datatype="FP32", shape=[1, len(numbers)])
    made.raw_input_contents.append(np.array(numbers, np.float32).tobytes())
    return made


def status(call: Callable[[], Any]) -> str:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    said: Any = raised.value
    return said.code().name


def test_calls_have_lines_and_spans_as_requests_of_http_have(tmp_path: Path, receiver: Receiver) -> None:
    (tmp_path / "keys").write_text(f"anna {KEY}\n")
    options = ["--grpc-port", "0", "--log-requests", "--log-format", "json", "--api-keys", str(tmp_path / "keys")]
    options += ["--otlp-endpoint", receiver.url, "--trace-share", "1"]
    with RunningServer(write_doubler(tmp_path), *options) as server:
        with grpc.insecure_channel(address_of(server)) as channel:
            infer: Any = channel.unary_unary(
                INFER, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
            )
            answer = infer(request(1, 2, 3, 4), metadata=[*SAMPLED.items(), WHO], timeout=10)
            assert status(lambda: infer(request(1), metadata=[WHO], timeout=10)) == "INVALID_ARGUMENT"
            assert status(lambda: infer(request(1, 2, 3, 4), timeout=10)) == "UNAUTHENTICATED"
            assert status(lambda: infer(request(1, 2, 3, 4, name="x\ny"), metadata=[WHO])) == "NOT_FOUND"
            assert status(lambda: infer(request(SLOW, 2, 3, 4), metadata=[WHO], timeout=0.3)) == "DEADLINE_EXCEEDED"
            check, watching = channel.unary_unary(CHECK), cast(Any, channel.unary_stream(WATCH))
            assert cast(Any, check)(service("doubler"), timeout=10)
            streaming: Any = channel.stream_stream(
                STREAM, pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
            )
            requests = [request(1, 2, 3, 4), request(1), request(2, 3, 4, 5)]
            steps = list(streaming(iter(requests), metadata=[WHO], timeout=20))
            watch = watching(service("doubler"), timeout=20)
            assert next(watch)
            watch.cancel()
            # The next call on the connection comes after the cancellation.
            assert cast(Any, check)(b"", timeout=10)
        log = server.log()
    lines = [line for line in map(json.loads, log.splitlines()) if line["logger"] == "penstock.requests"]
    seen = [(line["path"], line["model"], line["grpc_status"], line["client"]) for line in lines]
    assert seen[:7] == [
        (INFER, "doubler", "OK", "anna"),
        (INFER, "doubler", "INVALID_ARGUMENT", "anna"),
        (INFER, None, "UNAUTHENTICATED", None),
        (INFER, "x\ny", "NOT_FOUND", "anna"),
        (INFER, "doubler", "DEADLINE_EXCEEDED", "anna"),
        (CHECK, "doubler", "OK", None),
        (STREAM, "doubler", "OK", "anna"),
    ]
    assert sorted(seen[7:]) == [(CHECK, None, "OK", None), (WATCH, "doubler", "CANCELLED", None)]
    assert lines[0]["bytes"] == answer.ByteSize()
    assert len(steps) == 3
    assert lines[6]["bytes"] == sum(step.ByteSize() for step in steps)
    # A client that leaves at its deadline gets no sentence.
    assert [line["error"] is None for line in lines[:4]] == [True, False, False, False]
    assert all(0 <= line["milliseconds"] < 20_000 for line in lines)
    assert KEY not in log
    spans = sorted(receiver.spans, key=lambda span: span.start_time_unix_nano)
    assert len(spans) == len(lines)
    first, said = spans[0], attributes(spans[0])
    assert (first.name, first.trace_id.hex(), first.parent_span_id.hex()) == (INFER[1:], TRACE, PARENT)
    assert (said["rpc.method"], said["penstock.model"], said["penstock.outcome"]) == (
        "ModelInfer",
        "doubler",
        "answered",
    )
    assert said["penstock.batch_rows"] == 1
    assert 0 <= said["penstock.queue_ms"] < 5_000
    codes = [attributes(span)["rpc.grpc.status_code"] for span in spans]
    assert codes[:7] == [grpc.StatusCode[line["grpc_status"]].value[0] for line in lines[:7]]
    assert "penstock.batch_rows" not in attributes(spans[1])


@pytest.mark.thorough
def test_calls_of_a_server_without_log_and_traces_have_neither(tmp_path: Path) -> None:
    with RunningServer(write_doubler(tmp_path), "--grpc-port", "0") as server:
        with grpc.insecure_channel(address_of(server)) as channel:
            assert cast(Any, channel.unary_unary(CHECK))(b"", timeout=10)
        assert server.log() == ""
