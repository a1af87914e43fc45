"""Memory that ends while a server runs: a request that wants it fails, others go on, who ends is started again."""

import io
import resource
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from penstock.bench.process_usage import worker_pids
from penstock.core.source_files.find_application import find_application
from penstock.runtime.bundle_writer import Bundle
from tests.support.processes import Crowd
from tests.support.serving import APPLICATION, RunningServer

pytestmark = pytest.mark.thorough

ROOM_BYTES = 200 << 20
TENSOR = {"Content-Type": "application/octet-stream"}
# What wants more memory than a limited process has.
WANTS = {
    '    if body == b"shape":\n': '    if body == b"memory":\n        np.ones(1 << 30)\n    if body == b"shape":\n',
    "            if (x == 13).any():\n": "            if (x == 23).any():\n                torch.ones(1 << 32)\n"
    "            if (x == 13).any():\n",
    "max_pixels=1 << 20": "max_pixels=1 << 27",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder, source = tmp_path_factory.mktemp("memory"), APPLICATION.format(sleep_s=0.0, holds="")
    for before, after in WANTS.items():
        assert before in source, before
        source = source.replace(before, after)
    (folder / "app.py").write_text(source)
    found = find_application(str(folder / "app.py"))
    Bundle.write(found, found.model(), np.arange(8, dtype=np.float32).reshape(2, 4), to=folder / "bundle")
    with RunningServer(folder / "bundle", "--frontends", "1") as server:
        yield server


def size_bytes(process: int) -> int:
    """The address space of a process."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[0]) * resource.getpagesize()


@contextmanager
def limited(process: int, room_bytes: int) -> Generator[None]:
    """Give a process so much more memory than it has, and no more."""
    resource.prlimit(process, resource.RLIMIT_AS, (size_bytes(process) + room_bytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(process, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def ask(server: RunningServer, body: bytes, kind: str) -> tuple[int, str]:
    status, _, said = server.ask("POST", "/v1/apps/doubler", body, {"Content-Type": kind})
    return status, str(said)


def picture() -> bytes:
    """A small file of 100 million pixels."""
    file = io.BytesIO()
    Image.new("L", (10_000, 10_000)).save(file, "PNG")
    return file.getvalue()


def test_decode_without_memory_fails_its_request_alone(server: RunningServer) -> None:
    with limited(worker_pids(server.process.pid)["front-end 0"], ROOM_BYTES), Crowd(server, clients=2) as crowd:
        crowd.until_right(5)
        assert ask(server, b"memory", "text/x-number")[0] == 500
        crowd.until_right(5, since_s=time.monotonic())
    assert crowd.outcomes.keys() == {"right"}


def test_a_picture_without_memory_is_not_called_damaged(server: RunningServer) -> None:
    body = picture()
    with limited(worker_pids(server.process.pid)["front-end 0"], 30 << 20), Crowd(server, clients=2) as crowd:
        status, said = ask(server, body, "image/png")
        crowd.until_right(5, since_s=time.monotonic())
    assert (status, "memory" in said) == (503, True), said
    assert crowd.outcomes.keys() == {"right"}
    # It was no fault of the picture.
    assert ask(server, body, "image/png")[0] == 200


def test_a_network_without_memory_fails_its_request_alone(server: RunningServer) -> None:
    engine = worker_pids(server.process.pid)["engine"]
    with limited(engine, ROOM_BYTES), Crowd(server, clients=4) as crowd:
        crowd.until_right(5)
        for _ in range(5):
            body = np.array([23, 1, 2, 3], np.float32).tobytes()
            assert ask(server, body, TENSOR["Content-Type"])[0] == 500
        crowd.until_right(5, since_s=time.monotonic())
    assert crowd.outcomes.keys() == {"right"}
    assert worker_pids(server.process.pid)["engine"] == engine


@pytest.mark.parametrize("role", ["engine", "front-end 0"])
def test_a_process_without_any_memory_left_answers_or_is_replaced(server: RunningServer, role: str) -> None:
    answers: list[tuple[int, str]] = []

    def send() -> None:
        for _ in range(10):
            # Not answered, or cut off: its process may have ended.
            with suppress(OSError, HTTPException):
                answers.append(ask(server, b"7" + b" " * 900_000, "text/x-number"))

    with limited(worker_pids(server.process.pid)[role], 0), Crowd(server, clients=4) as crowd:
        senders = [threading.Thread(target=send) for _ in range(8)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
    assert all(status in (200, 500, 503) for status, _ in answers), set(answers)
    assert "wrong" not in crowd.outcomes
    assert "hung" not in crowd.outcomes
    with Crowd(server, clients=4) as crowd:
        crowd.until_right(20, since_s=time.monotonic(), within_s=60)
