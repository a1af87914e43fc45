"""Pictures of any size at a real server: decoded and prepared by the front-end, beside its loop and without torch."""

import http.client
import io
import shutil
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from PIL import Image

from penstock.bench.process_usage import worker_pids
from penstock.core.bundles.bundle import PREPARE
from penstock.core.spec import Array
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.load import load
from tests.support.prepared import MOST, RAWS, pictures, shared_pictures
from tests.support.processes import eventually
from tests.support.serving import RunningServer, serve_command

ASK = "/v1/apps/pictures"
PNG = {"Content-Type": "image/png"}


def png(picture: Array) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(picture).save(sink, "PNG")
    return sink.getvalue()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return shared_pictures(tmp_path_factory)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("0", id="one process"),
        pytest.param("2", id="two front-ends", marks=pytest.mark.slow),
    ],
)
def server(bundle: Bundle, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with RunningServer(bundle.folder, "--frontends", request.param, "--executor", "torch") as server:
        yield server


def test_pictures_of_any_size_get_the_golden_answers(server: RunningServer, bundle: Bundle) -> None:
    for raw, output in zip(RAWS, bundle.files.golden.outputs, strict=True):
        status, _, answer = server.ask("POST", ASK, png(raw), PNG)
        assert status == 200
        np.testing.assert_allclose(answer, output, atol=1e-6)


def test_a_prepared_picture_has_times_if_asked_for(server: RunningServer) -> None:
    headers = server.ask("POST", ASK, png(RAWS[0]), {**PNG, "Penstock-Timing": "1"})[1]
    assert headers["server-timing"].startswith("queue;dur=")
    assert "server-timing" not in server.ask("POST", ASK, png(RAWS[0]), PNG)[1]


def test_many_at_once_get_their_own_answers(server: RunningServer, bundle: Bundle) -> None:
    raws = pictures(*((20 + index, 90 - index) for index in range(24)))
    predictor = load(bundle.folder)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda raw: server.ask("POST", ASK, png(raw), PNG), raws))
    assert [status for status, _, _ in answers] == [200] * len(raws)
    expected = np.stack([predictor.predict(raw) for raw in raws])
    np.testing.assert_allclose([answer for _, _, answer in answers], expected, atol=1e-6)


def test_what_is_prepared_already_is_taken_by_every_other_way(server: RunningServer, bundle: Bundle) -> None:
    golden = bundle.files.golden
    raw_bytes = {"Content-Type": "application/octet-stream"}
    answer = server.ask("POST", ASK, golden.inputs[1].tobytes(), raw_bytes)[2]
    np.testing.assert_allclose(answer, golden.outputs[1], atol=1e-6)
    tensor: dict[str, Any] = {"name": "input", "datatype": "FP32", "shape": [1, 12, 12, 3]}
    body = orjson.dumps({"inputs": [tensor | {"data": golden.inputs[1].ravel().tolist()}]})
    status, _, answer = server.ask("POST", "/v2/models/pictures/infer", body)
    assert status == 200
    np.testing.assert_allclose(answer["outputs"][0]["data"], golden.outputs[1], atol=1e-6)
    metadata = server.ask("GET", "/v2/models/pictures")[2]
    assert metadata["inputs"][0]["shape"] == [-1, 12, 12, 3]


def test_the_server_says_what_raw_arrays_it_takes(server: RunningServer) -> None:
    (app,) = server.ask("GET", "/v1/apps")[2]["apps"]
    assert (app["raw"]["shape"], app["raw"]["max_shape"]) == ([None, None, 4], [MOST, MOST, 4])


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        (b"no picture", 400, "not a picture that can be read"),
        (png(RAWS[1])[:200], 400, "cut short or damaged"),
        (b"shape", 400, "raw is uint8[2, 2, 3]; it must be uint8[any, any, 4]"),
        (b"text\xff", 400, "not text in utf-8, from byte 4"),
        (b"crash", 500, "decode failed on this body; the server's log says how"),
        (
            png(np.zeros((2, MOST + 1, 4), np.uint8)),
            413,
            f"raw has shape [2, {MOST + 1}, 4]; at most [{MOST}, {MOST}, 4]",
        ),
        (png(np.zeros((2 * MOST, MOST, 4), np.uint8)), 413, "pixels; at most 360,000 are taken"),
        (b"[1, 2]", 400, "nested lists of shape [12, 12, 3]"),
    ],
)
def test_bad_bodies_get_a_sentence_and_the_next_one_an_answer(
    server: RunningServer, body: bytes, status: int, sentence: str
) -> None:
    content = {"Content-Type": "application/json"} if body.startswith(b"[") else PNG
    found, _, answer = server.ask("POST", ASK, body, content)
    assert found == status
    assert sentence in answer["error"]
    assert server.ask("POST", ASK, png(RAWS[0]), PNG)[0] == 200


def test_clients_that_go_leave_nothing_behind(server: RunningServer) -> None:
    body = png(pictures((MOST, MOST))[0])
    head = f"POST {ASK} HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(6):
        with socket.create_connection((server.host, server.port)) as connection:
            connection.sendall(head + body)
    for raw in RAWS:
        assert server.ask("POST", ASK, png(raw), PNG)[0] == 200
    eventually(lambda: server.ask("GET", "/v1/stats")[2]["slots"]["in_use"] == 0, within_s=10)


def test_a_front_end_that_prepares_loads_no_torch(server: RunningServer) -> None:
    server.ask("POST", ASK, png(RAWS[0]), PNG)
    roles = worker_pids(server.process.pid)
    for role, process in roles.items():
        libraries = Path(f"/proc/{process}/maps").read_text()
        if role.startswith("front-end"):
            assert "libtorch" not in libraries
            assert "onnxruntime" in libraries


@pytest.mark.thorough
def test_a_version_that_is_replaced_answers_what_it_prepares(bundle: Bundle, tmp_path: Path) -> None:
    for number in ("1", "2"):
        shutil.copytree(bundle.folder, tmp_path / "models" / "pictures" / number)
    with RunningServer(None, "--models", str(tmp_path / "models"), "--executor", "torch") as server:
        with closing(asking_slowly(server)) as asked:
            assert server.ask("POST", "/v2/repository/models/pictures/unload")[0] == 200
            assert asked.getresponse().status == 200
        assert server.ask("POST", "/v2/repository/models/pictures/load")[0] == 200
        assert server.ask("POST", ASK, png(RAWS[0]), PNG)[0] == 200


@pytest.mark.thorough
def test_a_server_refuses_a_bundle_whose_graph_prepares_otherwise(bundle: Bundle, tmp_path: Path) -> None:
    folder = shutil.copytree(bundle.folder, tmp_path / "bundle")
    (folder / PREPARE).write_bytes((folder / PREPARE).read_bytes()[:-1] + b"x")
    done = subprocess.run(serve_command(folder), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "prepare.onnx is not the file that was written" in done.stderr


@pytest.mark.thorough
def test_a_drain_waits_for_what_is_being_prepared(bundle: Bundle) -> None:
    with RunningServer(bundle.folder, "--executor", "torch") as server:
        with closing(asking_slowly(server)) as asked:
            server.stop()
            assert asked.getresponse().status == 200
        assert server.process.wait(20) == 0


def asking_slowly(server: RunningServer) -> http.client.HTTPConnection:
    """A connection over which something was asked whose preparation takes a second."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
    # So that it is accepted.
    connection.request("GET", "/v1/apps")
    connection.getresponse().read()
    connection.request("POST", ASK, b"slow", PNG)
    # What came before this, and over another connection, is read by now or soon.
    assert server.ask("GET", "/v2/health/live")[0] == 200
    return connection
