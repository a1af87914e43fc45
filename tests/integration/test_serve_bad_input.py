"""Every kind of bad input gets the right status and a sentence, costs little, and disturbs nobody else."""

import gzip
import io
import json
import struct
import time
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from penstock.core.machine.process_stat import cpu_seconds
from tests.fuzz.process import listening_on
from tests.support.serving import RunningServer, write_doubler

JSON = {"Content-Type": "application/json"}
RAW = {"Content-Type": "application/octet-stream"}
INFER = "/v2/models/doubler/infer"
ASK = "/v1/apps/doubler"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(write_doubler(tmp_path_factory.mktemp("doubler"))) as server:
        yield server


@pytest.fixture(scope="module")
def process(server: RunningServer) -> int:
    """The server's, whose processor time says what a request costs, however busy the machine is."""
    process = listening_on(server.port)
    assert process is not None
    return process


@pytest.fixture(autouse=True)
def neighbour(server: RunningServer, process: int) -> Iterator[None]:
    """Check after each test that another client is answered at once."""
    yield
    start_s, start_cpu_s = time.monotonic(), cpu_seconds(process)
    assert server.ask("POST", ASK, b"[1, 2, 3, 4]", JSON)[2] == {"doubled": [2, 4, 6, 8]}
    assert cpu_seconds(process) - start_cpu_s < 2
    assert time.monotonic() - start_s < 10  # nor does it wait for anything
    assert server.ask("GET", "/v1/stats")[2]["slots"]["in_use"] == 0


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def small_png() -> bytes:
    sink = io.BytesIO()
    Image.fromarray(np.arange(4, dtype=np.uint8).reshape(2, 2)).save(sink, "PNG")
    return sink.getvalue()


def infer_body(**changes: object) -> bytes:
    tensor = {"name": "numbers", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    return json.dumps({"inputs": [{**tensor, **changes}]}).encode()


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "sentence"),
    [
        # Content types.
        (ASK, b"hello", {"Content-Type": "text/plain"}, 415, "'text/plain' is not taken by 'doubler'; send image/png"),
        (ASK, b"[1,2,3,4]", {**JSON, "Content-Encoding": "br"}, 415, "use gzip or deflate"),
        # JSON.
        (ASK, b"[1, 2, 3", JSON, 400, "not JSON that can be read"),
        (ASK, b"[1, 2, NaN, 4]", JSON, 400, "not JSON that can be read (it has NaN or infinity at character 8, and"),
        (ASK, b"", JSON, 400, "not JSON that can be read (it is empty)."),
        (ASK, b"[1, 2, 1e999, 4]", JSON, 400, "infinity"),
        (ASK, b"[" * 100_000 + b"]" * 100_000, JSON, 413, "100,000 lists or objects"),
        (ASK, b"[" * 2_000 + b"]" * 2_000, JSON, 400, "not JSON that can be read"),
        (ASK, b'{"a": 1}', JSON, 400, 'alone or as {"numbers": ...}, or several as {"inputs": [...]}.'),
        (ASK, b'{"a": 1, "numbers": [1, 2, 3, 4]}', JSON, 400, "JSON but not an array"),
        (ASK, b"[1, 2, 3]", JSON, 400, "list of 3 where a list of 4 belongs"),
        (ASK, b"[[1, 2], [3]]", JSON, 400, "list of 2 where a list of 4 belongs"),
        (ASK, b'["a", "b", "c", "d"]', JSON, 400, "not only numbers"),
        (ASK, b"[1, 2, null, 4]", JSON, 400, "not only numbers"),
        (ASK, b"[1, true, 3, 4]", JSON, 400, "numbers holds a bool, not only numbers; it must be float32[4]."),
        # Raw bytes.
        (ASK, bytes(15), RAW, 400, "15 bytes; float32[4] takes exactly 16"),
        (ASK, np.array([1, np.nan, 3, 4], np.float32).tobytes(), RAW, 400, "NaN or infinity"),
        (ASK, b"", RAW, 400, "0 bytes"),
        # Pictures.
        (ASK, b"this is text", {"Content-Type": "image/png"}, 400, "not a picture"),
        (ASK, small_png()[:40], {"Content-Type": "image/png"}, 400, "p"),
        (ASK, png_header(30_000, 30_000), {"Content-Type": "image/png"}, 413, "pixels"),
        (ASK, png_header(5_000, 5_000), {"Content-Type": "image/png"}, 413, "5,000 x 5,000"),
        # The body's size, before and after it is unpacked.
        (ASK, bytes(2 << 20), RAW, 413, "at most"),
        (ASK, gzip.compress(bytes(64 << 20), mtime=0), {**RAW, "Content-Encoding": "gzip"}, 413, "once it is unpacked"),
        (ASK, gzip.compress(bytes(16), mtime=0)[:-6], {**RAW, "Content-Encoding": "gzip"}, 400, "cut short"),
        (ASK, b"not gzip", {**RAW, "Content-Encoding": "gzip"}, 400, "not gzip"),
        # The application's own code.
        (ASK, b"crash", {"Content-Type": "text/x-number"}, 500, "decode failed on this body"),
        (ASK, b"1\xff", {"Content-Type": "text/x-number"}, 400, "not text in utf-8, from byte 1: invalid start byte"),
        (ASK, b"shape", {"Content-Type": "text/x-number"}, 400, "must be float32[4]"),
        (ASK, b"kind", {"Content-Type": "text/x-number"}, 500, "decode failed on this body"),
        (ASK, b"13", {"Content-Type": "text/x-number"}, 500, "network failed on this input"),
        (ASK, b"17", {"Content-Type": "text/x-number"}, 500, "NaN or infinity"),
        (ASK, b"999", {"Content-Type": "text/x-number"}, 500, "reply failed on this output"),
        # The latency budget.
        (ASK, b"[1,2,3,4]", {**JSON, "Penstock-Latency-Ms": "soon"}, 400, "Penstock-Latency-Ms is 'soon'"),
        (ASK, b"[1,2,3,4]", {**JSON, "Penstock-Latency-Ms": "-1"}, 400, "Penstock-Latency-Ms"),
        (ASK, b"[1,2,3,4]", {**JSON, "Penstock-Latency-Ms": "nan"}, 400, "Penstock-Latency-Ms"),
        (ASK, b"[1,2,3,4]", {**JSON, "Penstock-Latency-Ms": "0.001"}, 504, "shorter than the network's own time"),
        # Routes.
        ("/v1/apps/nobody", b"[]", JSON, 404, "no model 'nobody' here; there is 'doubler'"),
        ("/v2/models/nobody/infer", b"{}", JSON, 404, "no model 'nobody'"),
        ("/v2/models/doubler/versions/7/infer", b"{}", JSON, 404, "version 1 alone"),
        ("/nowhere", b"", {}, 404, "no '/nowhere' here; there are /, /v1/apps,"),
        ("/v1/app/doubler", b"[]", JSON, 404, "no '/v1/app/doubler' here"),
        ("/metrics", b"", {}, 405, "takes GET, HEAD, not POST"),
        ("/v1/stats", b"", {}, 405, "takes GET, HEAD, not POST"),
        ("/", b"", {}, 405, "takes GET, HEAD, not POST"),
        # The Open Inference Protocol.
        (INFER, b"[]", JSON, 400, "must be a JSON object"),
        (INFER, b"{}", JSON, 400, "no 'inputs'; they must be a list"),
        (INFER, infer_body(name="image"), JSON, 400, "named 'image'; this model's is 'numbers'"),
        (INFER, infer_body(datatype="INT8"), JSON, 400, "'INT8'; 'numbers' is FP32"),
        (INFER, infer_body(shape=[1, 5]), JSON, 400, "shape is [1, 5]"),
        (INFER, infer_body(shape=[0, 4], data=[]), JSON, 400, "shape is [0, 4]"),
        (INFER, infer_body(shape=[-1, 4]), JSON, 400, "shape is [-1, 4]"),
        (INFER, infer_body(shape="wide"), JSON, 400, "list of whole numbers"),
        (INFER, infer_body(shape=[1_000_000_000, 4]), JSON, 413, "rows"),
        (INFER, infer_body(data=[1, 2]), JSON, 400, "list of 2 where a list of 4 belongs"),
        (INFER, infer_body(data="xyz"), JSON, 400, "a string where a list"),
        (INFER, infer_body(parameters={"binary_data_size": 16}), JSON, 400, "both 'data' and binary_data_size"),
        (INFER, infer_body(parameters={"shared_memory_region": "r"}), JSON, 400, "takes no shared memory"),
        (INFER, infer_body() + b"tail", {**JSON, "Inference-Header-Content-Length": "99999"}, 400, "99999"),
        (INFER, b'{"inputs": [{"name": "numbers", "datatype": "FP32", "shape": [1, 4], "data": [1,2,3,4]}],'
                b'"outputs": [{"name": "other"}]}', JSON, 400, "no output 'other'"),
    ],
)  # fmt: skip
def test_bad_input_is_answered_with_its_status_and_a_sentence(
    server: RunningServer, process: int, path: str, body: bytes, headers: dict[str, str], status: int, sentence: str
) -> None:
    start_s = cpu_seconds(process)
    given, _, content = server.ask("POST", path, body, headers)
    assert (given, sentence in content["error"]) == (status, True), content
    assert content["error"].endswith((".", ")."))
    assert cpu_seconds(process) - start_s < 2


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/v1/apps/doubler", 405, "POST"),
        ("DELETE", "/v1/stats", 405, "GET, HEAD"),
        ("GET", "/nowhere", 404, None),
    ],
)
def test_wrong_methods_name_the_right_one(
    server: RunningServer, method: str, path: str, status: int, allowed: str | None
) -> None:
    given, headers, content = server.ask(method, path)
    assert (given, headers.get("allow")) == (status, allowed)
    assert "error" in content


def test_the_options_of_the_server_as_a_whole_are_its_methods(server: RunningServer) -> None:
    answer = server.raw(b"OPTIONS * HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nAllow: GET, HEAD, POST, OPTIONS\r\n" in answer
    assert b"\r\nContent-Length: 0\r\n" in answer


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"garbage\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300), b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"505"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 40_000 + b"\r\n\r\n", b"413"),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"413"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(b"H%d: x\r\n" % n for n in range(500)) + b"\r\n", b"413"),
        (b"POST /v1/apps/doubler HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", b"400"),
        (b"POST /v1/apps/doubler HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"POST /v1/apps/doubler HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
            b"400",
        ),
        (b"POST /v1/apps/doubler HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
    ],
)
def test_what_is_not_http_is_refused_and_closed(server: RunningServer, data: bytes, status: bytes) -> None:
    answer = server.raw(data)
    assert answer.startswith(b"HTTP/1.1 " + status), answer[:200]
    assert b"Connection: close" in answer
    assert b'{"error":' in answer


def test_an_endless_chunked_body_is_stopped(server: RunningServer) -> None:
    head = b"POST /v1/apps/doubler HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = server.raw(head + (b"10000\r\n" + bytes(65536) + b"\r\n") * 40)
    assert answer.startswith(b"HTTP/1.1 413"), answer[:100]


def test_a_truncated_request_costs_nothing(server: RunningServer) -> None:
    incomplete = b"POST /v1/apps/doubler HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nonly this"
    assert server.raw(incomplete) == b""


def test_one_bad_row_fails_its_request_alone(server: RunningServer) -> None:
    bodies = [np.array([value, 2, 3, 4], np.float32).tobytes() for value in (1, 13, 17, 5)]
    pipelined = b"".join(
        b"POST /v1/apps/doubler HTTP/1.1\r\nHost: a\r\nContent-Type: application/octet-stream\r\n"
        b"Accept: application/octet-stream\r\nContent-Length: 16\r\n\r\n" + body
        for body in bodies
    )
    answers = server.raw(pipelined)
    assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"200", b"500", b"500", b"200"]


def test_the_log_has_the_traceback_and_the_client_has_not(tmp_path_factory: pytest.TempPathFactory) -> None:
    with RunningServer(write_doubler(tmp_path_factory.mktemp("log"))) as server:
        for body in (b"crash", b"13", b"999"):
            status, _, content = server.ask("POST", ASK, body, {"Content-Type": "text/x-number"})
            assert status == 500
            assert "Traceback" not in content["error"]
        log = server.log()
    assert "RuntimeError: decode crashed" in log
    assert "ValueError: thirteen" in log
    assert "RuntimeError: reply crashed" in log
