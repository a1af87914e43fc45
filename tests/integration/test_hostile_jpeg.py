"""Damaged and hostile JPEGs at rate at a real server, while other clients go on; and a server without simplejpeg."""

import io
import os
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import orjson
import pytest
from PIL import Image

from penstock.bench.process_usage import worker_pids
from penstock.core.source_files.find_application import find_application
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.load import load
from tests.support.pictures import smooth
from tests.support.prepared import MOST, shared_pictures
from tests.support.processes import eventually, process_bytes
from tests.support.serving import RunningServer, serve_command

ASK = "/v1/apps/pictures"
HEAD = {"Content-Type": "image/jpeg"}
SECONDS, HOSTILE = 4.0, 4


def jpeg(height: int, width: int, **options: bool) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(smooth(1, height, width)).save(sink, "JPEG", quality=90, **options)
    return sink.getvalue()


def sized(body: bytes, side: int) -> bytes:
    """The file with another size in its header."""
    at = body.index(b"\xff\xc2" if b"\xff\xc2" in body else b"\xff\xc0")
    return body[: at + 5] + struct.pack(">HH", side, side) + body[at + 9 :]


def scans(body: bytes, count: int) -> bytes:
    """The file with its last scan again and again."""
    return body[:-2] + body[body.rindex(b"\xff\xda") : -2] * count + body[-2:]


WHOLE = jpeg(MOST, MOST)
PROGRESSIVE = jpeg(MOST, MOST, progressive=True)
# A body, the status it gets, and words of the error.
CASES = {
    "cut short": (WHOLE[: len(WHOLE) // 2], 400, "cut short or damaged"),
    "a header alone": (WHOLE[: WHOLE.index(b"\xff\xda") + 20], 400, "cut short or damaged"),
    "no picture": (b"\xff\xd8\xff\xe0" + bytes(5000), 400, "The picture is damaged"),
    "a bomb": (sized(WHOLE, 60_000), 413, "too many pixels"),
    "a progressive bomb": (sized(PROGRESSIVE, 30_000), 413, "pixels; at most 360,000 are taken"),
    "a hundred scans": (scans(PROGRESSIVE, 120), 413, "scans; at most 16 are taken of its size"),
    "costly scans": (scans(PROGRESSIVE, 40), 413, "scans; at most 16 are taken of its size"),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return shared_pictures(tmp_path_factory)


@pytest.fixture(scope="module", params=[pytest.param("0", id="one process"), pytest.param("1", id="a front-end")])
def server(bundle: Bundle, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with RunningServer(bundle.folder, "--frontends", request.param, "--executor", "torch") as server:
        yield server


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_picture_is_refused_with_words(server: RunningServer, case: str) -> None:
    body, status, words = CASES[case]
    start_s = time.monotonic()
    found, _, answer = server.ask("POST", ASK, body, HEAD)
    assert (found, words in answer["error"]) == (status, True), answer
    assert time.monotonic() - start_s < 5


def memory_bytes(server: RunningServer) -> int:
    pids = [server.process.pid, *worker_pids(server.process.pid).values()]
    return sum(map(process_bytes, pids))


def ask_on(connection: HTTPConnection, body: bytes) -> tuple[int, bytes]:
    connection.request("POST", ASK, body, HEAD)
    answer = connection.getresponse()
    return answer.status, answer.read()


@pytest.mark.thorough
def test_others_are_answered_while_hostile_pictures_come_at_rate(server: RunningServer, bundle: Bundle) -> None:
    good = [jpeg(40 + side, 90) for side in range(8)]
    predictor = load(bundle.folder)
    expected = [predictor.answer(body, "image/jpeg") for body in good]
    server.ask("POST", ASK, good[0], HEAD)
    before = memory_bytes(server)
    stop = threading.Event()
    statuses: Counter[tuple[str, int]] = Counter()

    def attack(index: int) -> None:
        cases = list(CASES.items())
        with closing(HTTPConnection(server.host, server.port, timeout=20)) as connection:
            turn = index
            while not stop.is_set():
                name, (body, _, _) = cases[turn % len(cases)]
                status, _ = ask_on(connection, body)
                statuses[name, status] += 1
                turn += 1

    waits_s: list[float] = []

    def is_enough() -> bool:
        seen = statuses.copy()
        right = {name for name, status in seen if status == CASES[name][1]}
        return right == CASES.keys() and seen.total() > 50 and len(waits_s) > 20

    with ThreadPoolExecutor(HOSTILE) as pool:
        attacks = [pool.submit(attack, index) for index in range(HOSTILE)]
        try:
            with closing(HTTPConnection(server.host, server.port, timeout=20)) as connection:
                begun_s = time.monotonic()
                # Longer on a machine that is busy.
                while (lasted_s := time.monotonic() - begun_s) < SECONDS or (lasted_s < 60 and not is_enough()):
                    which = len(waits_s) % len(good)
                    start_s = time.monotonic()
                    status, answer = ask_on(connection, good[which])
                    waits_s.append(time.monotonic() - start_s)
                    assert status == 200, answer
                    np.testing.assert_allclose(orjson.loads(answer), expected[which], atol=1e-6)
        finally:
            stop.set()
        for each in attacks:
            each.result()
    grown = memory_bytes(server) - before
    # The pool may refuse what it could not begin in time, and nothing else changes a status.
    assert all(status in (CASES[name][1], 503, 504) for name, status in statuses), statuses
    assert is_enough(), (statuses, len(waits_s))
    # But for one: a busy machine itself may stop a process for a while.
    assert float(np.percentile(sorted(waits_s)[:-1], 99)) < 1.0
    assert grown < 100 << 20, (grown, len(waits_s), sum(statuses.values()))
    eventually(lambda: server.ask("GET", "/v1/stats")[2]["slots"]["in_use"] == 0, within_s=20)


SIZED_PY = """
from penstock import Application, PictureFile, TensorSpec


def network():
    from torch import nn

    class Means(nn.Module):
        def forward(self, pixels):
            return pixels.float().mean((1, 2))

    return Means()


app = Application(
    name="pictures",
    input=TensorSpec(dtype="uint8", shape=(12, 12, 3), meaning="a picture"),
    output=TensorSpec(dtype="float32", shape=(3,), meaning="means", name="means"),
    model=":network",
    decode=PictureFile(mode="RGB", size=(12, 12)),
    accepts=("image/jpeg",),
)
"""


@pytest.mark.slow
def test_a_large_picture_that_decode_resizes_holds_up_nobody(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(SIZED_PY)
    found = find_application(str(tmp_path / "app.py"))
    raws = np.random.default_rng(0).integers(0, 256, (2, 12, 12, 3), np.uint8)
    bundle = Bundle.write(found, found.model(), raws, to=tmp_path / "bundle")
    decode = found.application.decode
    assert decode is not None
    large = jpeg(2048, 2048, progressive=True)
    costly = scans(large, 16 - large.count(b"\xff\xda"))
    start_s = time.monotonic()
    pixels = decode(costly, "image/jpeg")
    decode_s = time.monotonic() - start_s
    raw = {"Content-Type": "application/octet-stream"}
    with RunningServer(bundle.folder, "--frontends", "1") as server, ThreadPoolExecutor(1) as pool:
        stop = threading.Event()

        def attack() -> int:
            count = 0
            with closing(HTTPConnection(server.host, server.port, timeout=20)) as connection:
                while not stop.is_set():
                    status, answer = ask_on(connection, costly)
                    assert status == 200
                    np.testing.assert_allclose(orjson.loads(answer), pixels.mean((0, 1)), atol=1e-3)
                    count += 1
            return count

        attacking = pool.submit(attack)
        waits_s: list[float] = []
        try:
            with closing(HTTPConnection(server.host, server.port, timeout=20)) as connection:
                while sum(waits_s) < 2:
                    start_s = time.monotonic()
                    connection.request("POST", ASK, raws[0].tobytes(), raw)
                    assert connection.getresponse().read()
                    waits_s.append(time.monotonic() - start_s)
        finally:
            stop.set()
        assert attacking.result() >= 2
    # In the event loop, nearly every request would wait for the picture before it.
    assert float(np.median(waits_s)) < decode_s / 4, (np.median(waits_s), decode_s)


@pytest.mark.thorough
def test_a_server_without_the_fast_decoder_says_so(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "simplejpeg.py").write_text("raise ImportError('not here')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = serve_command(bundle.folder, "--frontends", "0", "--executor", "torch")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rstrip("/\n").rpartition(":")[2])
            note = process.stdout.readline()
            with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
                connection.request("GET", "/v1/stats")
                stats = connection.getresponse().read().decode()
                status, answer = ask_on(connection, jpeg(40, 60))
        finally:
            process.kill()
    sentence = "JPEG files are decoded by Pillow, which takes half as long again, because the package simplejpeg is not"
    assert note.startswith(f"Note: {sentence}")
    assert sentence in stats
    assert status == 200
    np.testing.assert_allclose(orjson.loads(answer), load(bundle.folder).answer(jpeg(40, 60), "image/jpeg"), atol=1e-6)
