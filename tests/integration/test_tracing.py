"""Traces and the log of requests of a real server, the traces taken by an OTLP receiver of this test's own."""

import gzip
import http.server
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.support.serving import RunningServer, write_doubler

ASK = "/v1/apps/doubler"
JSON = {"Content-Type": "application/json"}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
PATHS = (ASK, "/v2/models/doubler/infer", "/v2/models/doubler")
KEY = "anna-0123456789abcdef"


@final
class Receiver:
    """Takes what an OTLP exporter posts."""

    def __init__(self) -> None:
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.paths.append(self.path)
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.paths: list[str] = []
        self.requests: list[ExportTraceServiceRequest] = []
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def spans(self) -> list[Any]:
        resources = [resource for request in self.requests for resource in request.resource_spans]
        return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]

    def resource(self) -> dict[str, Any]:
        return attributes(self.requests[0].resource_spans[0].resource)


def attributes(message: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in message.attributes}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_doubler(tmp_path_factory.mktemp("doubler"))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.mark.thorough
def test_a_span_says_in_which_batch_its_request_was(tmp_path: Path, receiver: Receiver) -> None:
    options = ["--otlp-endpoint", receiver.url, "--trace-share", "1", "--max-batch", "3"]
    # As a batch of one takes as long as one of three, to the measurement at the start too, it makes them whole.
    with RunningServer(write_doubler(tmp_path, sleep_s=0.1), *options) as server:
        threads = [threading.Thread(target=server.ask, args=("POST", ASK, b"[1, 2, 3, 4]", JSON)) for _ in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rows = [{"name": "numbers", "datatype": "FP32", "shape": [3, 4], "data": list(range(12))}]
        body = json.dumps({"inputs": rows}).encode()
        assert server.ask("POST", "/v2/models/doubler/infer", body, JSON)[0] == 200
        assert server.ask("GET", "/v2/models/doubler", headers=JSON)[0] == 200
        server.stop()
        assert server.process.wait(20) == 0
    spans = {path: [told for told in map(attributes, receiver.spans) if told["url.path"] == path] for path in PATHS}
    batches = [told["penstock.batch_rows"] for told in spans[ASK]]
    # As many spans say that they were in a batch of n rows as fit into whole batches of n.
    assert len(batches) == 9
    assert all(batches.count(rows) % rows == 0 for rows in batches)
    assert 1 < max(batches) <= 3
    assert max(told["penstock.queue_ms"] for told in spans[ASK]) > 50
    assert [told["penstock.batch_rows"] for told in spans["/v2/models/doubler/infer"]] == [3]
    assert "penstock.batch_rows" not in spans["/v2/models/doubler"][0]


@pytest.mark.thorough
@pytest.mark.parametrize("frontends", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_spans_reach_a_collector_whole(bundle: Path, receiver: Receiver, frontends: str) -> None:
    options = ["--otlp-endpoint", receiver.url, "--trace-share", "1", "--frontends", frontends]
    with RunningServer(bundle, *options) as server:
        begin_ns = time.monotonic_ns()
        assert server.ask("POST", ASK, b"[1, 2, 3, 4]", {**JSON, **SAMPLED})[0] == 200
        answered_ms = (time.monotonic_ns() - begin_ns) / 1e6
        assert server.ask("POST", ASK, b"[1]", JSON)[0] == 400
        assert server.ask("POST", ASK, b"13", {"Content-Type": "text/x-number"})[0] == 500
        assert server.ask("GET", "/v1/apps", headers={"traceparent": SAMPLED["traceparent"][:-2] + "00"})[0] == 200
        server.stop()
        # What was not yet sent is sent before the end.
        assert server.process.wait(20) == 0
    assert set(receiver.paths) == {"/v1/traces"}
    assert receiver.resource()["service.name"] == "penstock"
    answered, invalid, failed = sorted(receiver.spans, key=lambda span: span.start_time_unix_nano)
    assert (answered.trace_id.hex(), answered.parent_span_id.hex()) == (TRACE, PARENT)
    assert invalid.parent_span_id == failed.parent_span_id == b""
    assert {span.name for span in receiver.spans} == {"POST /v1/apps/{name}"}
    told = attributes(answered)
    assert (told["http.response.status_code"], told["penstock.model"]) == (200, "doubler")
    assert (told["http.route"], told["url.path"]) == ("/v1/apps/{name}", ASK)
    outcomes = [attributes(span)["penstock.outcome"] for span in (answered, invalid, failed)]
    assert outcomes == ["answered", "invalid", "failed"]
    # One at a time: each was a batch of its own.
    assert told["penstock.batch_rows"] == 1
    assert 0 <= told["penstock.queue_ms"] < answered_ms
    assert not {"penstock.batch_rows", "penstock.queue_ms"} & attributes(invalid).keys()
    now_ns = time.time_ns()
    assert 0 < answered.end_time_unix_nano - answered.start_time_unix_nano < 20e9
    assert 0 < now_ns - answered.start_time_unix_nano < 100e9


@pytest.mark.thorough
def test_a_collector_that_is_not_there_costs_no_answer_and_no_ending(bundle: Path, receiver: Receiver) -> None:
    receiver.close()
    options = ["--otlp-endpoint", receiver.url, "--trace-share", "1", "--log-format", "json"]
    with RunningServer(bundle, *options) as server:
        for _ in range(50):
            assert server.ask("POST", ASK, b"[1, 2, 3, 4]", JSON)[0] == 200
        start_s = time.monotonic()
        server.stop()
        assert server.process.wait(20) == 0
        assert time.monotonic() - start_s < 10
        lines = [json.loads(line) for line in server.log().splitlines()]
    assert {line["logger"].partition(".")[0] for line in lines} <= {"opentelemetry"}


def test_without_the_package_the_option_is_refused_in_one_sentence(bundle: Path) -> None:
    without = "import sys; sys.modules['opentelemetry'] = None; from penstock.cli import main; "
    without += f"sys.argv = ['penstock', 'serve', {str(bundle)!r}, '--otlp-endpoint', 'http://127.0.0.1:4318']; main()"
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "pip install 'penstock-nn[telemetry]'" in done.stderr


def test_without_the_option_nothing_of_it_is_loaded() -> None:
    processes = "penstock.serve.control.single_process, penstock.serve.control.child_main"
    code = f"import sys, {processes}; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_log_has_a_line_for_each_request_with_its_clients_name(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"anna {KEY}\n")
    options = ["--log-requests", "--log-format", "json", "--api-keys", str(tmp_path / "keys")]
    with RunningServer(bundle, *options) as server:
        begin_ns = time.monotonic_ns()
        assert server.ask("POST", ASK, b"[1, 2, 3, 4]", {**JSON, "X-Api-Key": KEY})[0] == 200
        assert server.ask("GET", "/v1/apps")[0] == 401
        head = f"POST {ASK} HTTP/1.1\r\nHost: a\r\nX-Api-Key: {KEY}\r\nContent-Length: 99999999\r\n\r\n"
        assert server.raw(head.encode()).startswith(b"HTTP/1.1 413 ")
        assert server.raw(b"\x00\x00").startswith(b"HTTP/1.1 400 ")
        all_ms = (time.monotonic_ns() - begin_ns) / 1e6
        log = server.log()
    lines = [line for line in map(json.loads, log.splitlines()) if line["logger"] == "penstock.requests"]
    seen = [(line["method"], line["path"], line["status"], line["client"]) for line in lines]
    assert seen == [
        ("POST", ASK, 200, "anna"),
        ("GET", "/v1/apps", 401, None),
        ("POST", ASK, 413, "anna"),
        ("", "", 400, None),
    ]
    assert lines[0]["bytes"] == len('{"doubled":[2.0,4.0,6.0,8.0]}')
    assert all(0 <= line["milliseconds"] < all_ms for line in lines)
    assert KEY not in log
