"""Batches of plain requests and version 1 of KServe's protocol, over HTTP."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.serving import RunningServer, write_doubler

ASK = "/v1/apps/doubler"
PREDICT = "/v1/models/doubler:predict"
JSON = {"Content-Type": "application/json"}
FROM_CURL = {"Content-Type": "application/x-www-form-urlencoded"}
ROWS = [[1, 2, 3, 4], [5, 6, 7, 8], [0, 0, 0, 1]]
REPLIES = [{"doubled": [2 * number for number in row]} for row in ROWS]
NAMED = [{"numbers": row} for row in ROWS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(write_doubler(tmp_path_factory.mktemp("doubler"))) as server:
        yield server


@pytest.fixture(autouse=True)
def neighbour(server: RunningServer) -> Iterator[None]:
    """Check after each test that one row is answered and that no slot is in use."""
    yield
    assert server.ask("POST", ASK, b"[1, 2, 3, 4]", JSON)[2] == REPLIES[0]
    assert server.ask("GET", "/v1/stats")[2]["slots"]["in_use"] == 0


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (ASK, ROWS, REPLIES),
        (ASK, ROWS[:1], REPLIES[:1]),
        (ASK, ROWS[0], REPLIES[0]),
        (ASK, {"inputs": ROWS}, {"outputs": REPLIES}),
        (ASK, {"inputs": ROWS[:1]}, {"outputs": REPLIES[:1]}),
        (ASK, {"instances": ROWS}, {"predictions": REPLIES}),
        (PREDICT, {"instances": ROWS}, {"predictions": REPLIES}),
        # The one input by its name, as forms and packs have it.
        (ASK, NAMED[0], REPLIES[0]),
        (ASK, NAMED, REPLIES),
        (ASK, {"inputs": NAMED}, {"outputs": REPLIES}),
        (PREDICT, {"instances": [NAMED[0], *ROWS[1:]]}, {"predictions": REPLIES}),
    ],
)
def test_a_batch_has_a_reply_for_each_row(server: RunningServer, path: str, body: Any, expected: Any) -> None:
    before = server.ask("GET", "/v1/stats")[2]
    status, headers, reply = server.ask("POST", path, json.dumps(body).encode(), JSON)
    assert (status, headers["content-type"], reply) == (200, "application/json", expected)
    # One request, however many rows.
    assert server.ask("GET", "/v1/stats")[2]["answered"] - before["answered"] == 1


def test_a_batch_as_raw_bytes(server: RunningServer) -> None:
    accept = {**JSON, "Accept": "application/octet-stream"}
    content = server.ask("POST", ASK, json.dumps({"inputs": ROWS}).encode(), accept)[2]
    assert np.frombuffer(content, np.float32).reshape(3, 4).tolist() == [reply["doubled"] for reply in REPLIES]


def test_predict_asks_for_no_content_type(server: RunningServer) -> None:
    for headers in (FROM_CURL, {}):
        assert server.ask("POST", PREDICT, json.dumps({"instances": ROWS}).encode(), headers)[2] == {
            "predictions": REPLIES
        }


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        (ASK, b'{"inputs": []}', 400, "0 rows; send at least one"),
        (ASK, b"[]", 400, "list of 0 where a list of 4 belongs"),
        (ASK, b"[[]]", 400, "[0]: numbers has a list of 0 where a list of 4 belongs"),
        (ASK, b'{"inputs": [1, 2, 3, 4]}', 400, "inputs[0]: numbers has an integer where a list of 4 belongs"),
        (ASK, b'{"inputs": 5}', 400, "'inputs' is no list; send a list of inputs, float32[4] each"),
        (ASK, b'{"inputs": {"numbers": [1, 2, 3, 4]}}', 400, "'inputs' is no list"),
        (ASK, b'{"inputs": [[1, 2, 3, 4], [1, 2, 3]]}', 400, "inputs[1]: numbers has a list of 3 where a list of 4"),
        (ASK, b"[[1, 2, 3, 4], [1, 2, 3, 4, 5]]", 400, "[1]: numbers has a list of 5 where a list of 4 belongs"),
        (ASK, b"[[1, 2, 3, 4], 5]", 400, "[1]: numbers has an integer where a list of 4 belongs"),
        (ASK, b"[[[1, 2, 3, 4]]]", 400, "list of 1 where a list of 4 belongs"),
        (ASK, b'{"inputs": [[1, 2, NaN, 4]]}', 400, "not JSON that can be read"),
        (ASK, b'{"inputs": [[1, 2, 1e999, 4]]}', 400, "infinity"),
        (ASK, b'{"inputs": [[1, 2, null, 4]]}', 400, "inputs[0]: numbers holds null, not only numbers"),
        (ASK, b'{"inputs": ["a"]}', 400, "inputs[0]: numbers has a string where a list of 4 belongs"),
        (ASK, b'{"inputs": [[1, 2, 3, 4]], "id": 3}', 400, "There is 'id' beside 'inputs'"),
        (ASK, b'{"inputs": [[1, 2, 3, 4]], "inputs": [[1, 2, 3, 4]]}', 400, "a name twice"),
        (ASK, b'{"numbers": [1, 2, 3]}', 400, "numbers has a list of 3 where a list of 4 belongs"),
        (ASK, b'{"numbers": [1, 2, 3, 4], "numbers": [1, 2, 3, 4]}', 400, "a name twice"),
        (ASK, b'[{"numbers": [1, 2, 3, 4]}, {"number": [1, 2, 3, 4]}]', 400, "[1]: numbers has an object"),
        (ASK, b'{"inputs": [{"numbers": 1, "numbers": [1, 2, 3, 4]}]}', 400, "a name twice"),
        (PREDICT, b"no JSON", 400, "not JSON that can be read"),
        (PREDICT, b"", 400, "not JSON that can be read"),
        (PREDICT, b"[[1, 2, 3, 4]]", 400, "no 'instances'; send {\"instances\": [...]}"),
        (PREDICT, b'{"inputs": [[1, 2, 3, 4]]}', 400, "no 'instances'"),
        (PREDICT, b'{"instances": []}', 400, "0 rows; send at least one"),
        (PREDICT, b'{"instances": null}', 400, "'instances' is no list"),
        (PREDICT, b'{"instances": [[1, 2, 3]]}', 400, "instances[0]: numbers has a list of 3"),
        (PREDICT, b'{"instances": [], "signature_name": "x"}', 400, "There is 'signature_name' beside 'instances'"),
        ("/v1/models/nobody:predict", b"{}", 404, "no model 'nobody' here; there is 'doubler'"),
        ("/v1/models/doubler:explain", b"{}", 404, "has :predict"),
        # One row of several on which the application's own code fails.
        (ASK, b'{"inputs": [[1, 2, 3, 4], [13, 2, 3, 4]]}', 500, "network failed on this input"),
        (PREDICT, b'{"instances": [[1, 2, 3, 4], [17, 2, 3, 4]]}', 500, "NaN or infinity"),
        (PREDICT, b'{"instances": [[1, 2, 3, 4], [999, 2, 3, 4]]}', 500, "reply failed on this output"),
    ],
)
def test_a_bad_batch_is_refused_in_a_sentence(
    server: RunningServer, path: str, body: bytes, status: int, sentence: str
) -> None:
    before = server.ask("GET", "/v1/stats")[2]
    found, _, reply = server.ask("POST", path, body, JSON)
    assert (found, list(reply)) == (status, ["error"]), reply
    assert sentence in reply["error"]
    after = server.ask("GET", "/v1/stats")[2]
    assert after["answered"] == before["answered"]
    if "nobody" not in path and "explain" not in path:
        counted = "failed" if status == 500 else "invalid"
        assert after[counted] - before[counted] == 1


def test_a_batch_that_would_be_late_is_refused_whole(server: RunningServer) -> None:
    late = {**JSON, "Penstock-Latency-Ms": "0.001"}
    for path in (ASK, PREDICT):
        assert server.ask("POST", path, json.dumps({"instances": ROWS}).encode(), late)[0] == 504


def test_more_rows_than_the_table_takes_are_refused(server: RunningServer) -> None:
    most = server.ask("GET", "/v2/models/doubler/config")[2]["max_batch_size"]
    for path, body in ((ASK, {"inputs": ROWS[:1] * (most + 1)}), (PREDICT, {"instances": ROWS[:1] * (most + 1)})):
        status, _, reply = server.ask("POST", path, json.dumps(body).encode(), JSON)
        assert status == 413
        assert f"The request has {most + 1:,} rows; at most {most:,} are taken at once" in reply["error"]
    body = json.dumps(ROWS[:1] * (most + 1)).encode()
    assert server.ask("POST", ASK, body, JSON)[0] == 413
    reply = server.ask("POST", ASK, json.dumps(ROWS[:1] * most).encode(), JSON)[2]
    assert reply == REPLIES[:1] * most


def test_the_flags_of_curl_are_named(server: RunningServer) -> None:
    status, _, reply = server.ask("POST", ASK, b"shape", FROM_CURL)
    assert status == 400
    assert reply["error"].endswith(
        "`curl -d` sends application/x-www-form-urlencoded; send JSON with `-H 'Content-Type: application/json'`, "
        "and a file as `--data-binary @FILE -H 'Content-Type: image/png'`."
    )
    for body, headers in ((b"shape", {"Content-Type": "text/x-number"}), (b"[1, 2, 3]", FROM_CURL)):
        assert "curl" not in server.ask("POST", ASK, body, headers)[2]["error"]


def test_kserve_lists_and_describes_the_models(server: RunningServer) -> None:
    # What OpenAI's clients look for is beside it.
    model = {"id": "doubler", "object": "model", "created": 0, "owned_by": "penstock"}
    assert server.ask("GET", "/v1/models")[2] == {"models": ["doubler"], "object": "list", "data": [model]}
    assert server.ask("GET", "/v1/models/doubler")[2] == {"name": "doubler", "ready": True} | model
    assert server.ask("GET", "/v1/models/nobody")[0] == 404
    assert server.ask("POST", "/v1/models", b"{}")[0] == 405
    assert server.ask("GET", PREDICT)[0] == 405
