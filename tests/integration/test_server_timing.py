"""The response header Server-Timing, which a request asks for."""

import json
import re
import time
from collections.abc import Iterator

import pytest

from tests.support.serving import RunningServer, write_doubler

ASK = "/v1/apps/doubler"
PREDICT = "/v1/models/doubler:predict"
INFER = "/v2/models/doubler/infer"
JSON = {"Content-Type": "application/json"}
TIMED = {**JSON, "Penstock-Timing": "1"}
ROW = b"[1, 2, 3, 4]"
TENSOR = {"name": "numbers", "datatype": "FP32", "shape": [2, 4], "data": [1, 2, 3, 4] * 2}
BODIES = [
    (ASK, ROW),
    (ASK, b"[[1, 2, 3, 4], [5, 6, 7, 8]]"),
    (PREDICT, b'{"instances": [[1, 2, 3, 4], [5, 6, 7, 8]]}'),
    (INFER, json.dumps({"inputs": [TENSOR]}).encode()),
]
# The network sleeps so long.
SLEEP_S = 0.02


@pytest.fixture(scope="module", params=["0", pytest.param("1", marks=pytest.mark.slow)])
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    bundle = write_doubler(tmp_path_factory.mktemp("doubler"), sleep_s=SLEEP_S)
    with RunningServer(bundle, "--frontends", request.param) as server:
        yield server


def times_of(headers: dict[str, str]) -> tuple[float, float]:
    found = re.fullmatch(r"queue;dur=(\d+\.\d{3}), compute;dur=(\d+\.\d{3})", headers["server-timing"])
    assert found is not None, headers
    return float(found[1]), float(found[2])


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_request_that_asks_gets_its_times(server: RunningServer, path: str, body: bytes) -> None:
    start = time.perf_counter()
    status, headers, _ = server.ask("POST", path, body, TIMED)
    elapsed_ms = (time.perf_counter() - start) * 1e3
    assert status == 200
    queue_ms, compute_ms = times_of(headers)
    assert compute_ms >= SLEEP_S * 1e3
    assert 0 <= queue_ms <= queue_ms + compute_ms <= elapsed_ms


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_others_have_no_such_header(server: RunningServer, path: str, body: bytes) -> None:
    for headers in (JSON, {**JSON, "Penstock-Timing": "0"}):
        assert "server-timing" not in server.ask("POST", path, body, headers)[1]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_another_value_is_refused(server: RunningServer, path: str, body: bytes) -> None:
    status, _, reply = server.ask("POST", path, body, {**JSON, "Penstock-Timing": "yes"})
    assert status == 400
    assert reply["error"] == "Penstock-Timing is 'yes'; it must be 1, for the header Server-Timing, or 0."


def test_a_request_without_a_result_has_no_times(server: RunningServer) -> None:
    for body, status in ((b"[1]", 400), (b"[13, 2, 3, 4]", 500), (b"[[13, 2, 3, 4]]", 500)):
        found, headers, _ = server.ask("POST", ASK, body, TIMED)
        assert (found, "server-timing" in headers) == (status, False)


def test_raw_bytes_have_times_too(server: RunningServer) -> None:
    times_of(server.ask("POST", ASK, ROW, {**TIMED, "Accept": "application/octet-stream"})[1])
