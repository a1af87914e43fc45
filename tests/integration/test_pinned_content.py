"""Killed processes of a server whose files were edited, replaced and removed: the next ones run what was loaded."""

import http.client
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.bench.process_usage import worker_pids
from tests.support.chained import answer, picture, write_chained
from tests.support.processes import eventually, kill, owner
from tests.support.serving import RunningServer, write_doubler

pytestmark = pytest.mark.thorough

ASK = "/v1/apps/doubler"
JSON = {"Content-Type": "application/json"}
RIGHT = (200, {"doubled": [2.0, 4.0, 6.0, 8.0]})
# An import that neither waits nor computes in one piece, as that of a large package.
SLOW_IMPORT = """
import time
_end_s = time.monotonic() + {import_s}
while time.monotonic() < _end_s:
    sum(range(1000))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_doubler(tmp_path)
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[RunningServer]:
    with RunningServer(folder / "bundle", "--frontends", "2") as server:
        yield server


def answers_of(server: RunningServer, role: str, count: int = 6) -> tuple[set[str], list[tuple[int, object]]]:
    """Ask on new connections until one process has answered some times; returns the versions and the answers of all."""
    versions: set[str] = set()
    answers: list[tuple[int, object]] = []
    left, end_s = count, time.monotonic() + 60
    while left:
        assert time.monotonic() < end_s, (role, answers)
        connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
        connection.request("POST", ASK, b"[1, 2, 3, 4]", JSON)
        left -= owner(server, connection.sock.getsockname()[1]) == role
        answer = connection.getresponse()
        answers.append((answer.status, json.loads(answer.read())))
        versions.add(answer.headers["Penstock-Version"])
        connection.close()
    return versions, answers


def replaced(server: RunningServer, role: str) -> None:
    """Kill a process and wait for the next one."""
    before = worker_pids(server.process.pid)[role]
    kill(server, role)
    eventually(lambda: worker_pids(server.process.pid).get(role, before) != before, within_s=30)


def edit(folder: Path) -> None:
    text = (folder / "app.py").read_text()
    (folder / "app.py").write_text(text.replace('"doubled"', '"edited"'))


def retrain(folder: Path) -> None:
    edit(folder)
    from penstock import Bundle
    from penstock.core.source_files.find_application import find_application

    found = find_application(str(folder / "app.py"))
    Bundle.write(found, found.model(), np.ones((3, 4), np.float32), to=folder / "bundle")


def remove(folder: Path) -> None:
    shutil.rmtree(folder / "bundle")
    (folder / "app.py").unlink()


@pytest.mark.parametrize(
    ("changes", "engine"),
    [((retrain,), False), pytest.param((edit, retrain, remove), True, marks=pytest.mark.slow)],
)
def test_replaced_processes_run_what_was_loaded(
    server: RunningServer, folder: Path, changes: tuple[Callable[[Path], None], ...], engine: bool
) -> None:
    versions, answers = answers_of(server, "front-end 0", count=2)
    assert len(versions) == 1
    assert versions != {None}
    for change in changes:
        change(folder)
        replaced(server, "front-end 0")
        later, more = answers_of(server, "front-end 0")
        assert set(map(repr, answers + more)) == {repr(RIGHT)}
        assert later == versions
    if not engine:
        return
    replaced(server, "engine")
    eventually(lambda: server.ask("GET", "/v2/health/ready")[0] == 200, within_s=90)
    later, answers = answers_of(server, "front-end 0", count=2)
    assert set(map(repr, answers)) == {repr(RIGHT)}
    assert later == versions


@pytest.mark.slow
def test_a_replaced_front_end_refuses_other_sources_of_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "pinned_installed"
    package.mkdir()
    write_doubler(package)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    from penstock import Bundle
    from penstock.core.source_files.find_application import find_application

    found = find_application("pinned_installed.app")
    Bundle.write(found, found.model(), np.ones((2, 4), np.float32), to=tmp_path / "bundle")
    with RunningServer(tmp_path / "bundle", "--frontends", "2") as server:
        edit(package)
        replaced(server, "front-end 0")

        def answered_and_ready() -> tuple[int, object, int]:
            connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
            connection.request("POST", ASK, b"[1, 2, 3, 4]", JSON)
            answer = connection.getresponse()
            body = json.loads(answer.read())
            connection.request("GET", "/v2/health/ready")
            ready = connection.getresponse().status
            connection.close()
            return answer.status, body, ready

        seen: dict[int, tuple[object, int]] = {}
        end_s = time.monotonic() + 60
        while seen.keys() != {200, 503}:
            assert time.monotonic() < end_s, seen
            status, body, ready = answered_and_ready()
            assert status in (200, 503), body
            assert status != 200 or body == RIGHT[1]
            seen[status] = body, ready
    assert seen[200] == (RIGHT[1], 200)
    assert seen[503][1] == 503
    assert "app.py of application 'pinned_installed.app' changed since the server loaded it" in str(seen[503][0])


def test_a_replaced_front_end_runs_the_chain_that_was_loaded(tmp_path: Path) -> None:
    chained = write_chained(tmp_path, partial=False)
    helper = chained.chain.with_name("chain_helper.py")
    helper.write_text("FACTOR = 1\n")
    text = chained.chain.read_text()
    chained.chain.write_text(
        "from chain_helper import FACTOR\n" + text.replace("else one[0] for", "else one[0] * FACTOR for")
    )
    body = json.dumps(picture((1, 1), (4, 5)).tolist()).encode()
    with RunningServer(None, *chained.arguments, "--frontends", "1") as server:
        before = server.ask("POST", "/v1/apps/look", body, JSON)
        assert before[2]["weights"] == answer((1, 1), (4, 5))
        helper.write_text("FACTOR = 100\n")
        chained.chain.write_text("raise SystemExit('edited')\n")
        replaced(server, "front-end 0")
        eventually(lambda: server.ask("GET", "/v2/health/ready")[0] == 200, within_s=60)
        after = server.ask("POST", "/v1/apps/look", body, JSON)
        assert (after[0], after[2]["weights"]) == (200, before[2]["weights"])
        chained.chain.unlink()
        replaced(server, "front-end 0")
        eventually(lambda: server.ask("GET", "/v2/health/ready")[0] == 200, within_s=60)
        assert server.ask("POST", "/v1/apps/look", body, JSON)[2]["weights"] == before[2]["weights"]


def test_other_content_has_another_version(tmp_path: Path) -> None:
    write_doubler(tmp_path)
    models = tmp_path / "models"
    models.mkdir()
    (tmp_path / "bundle").rename(models / "doubler")
    with RunningServer(None, "--models", str(models), "--frontends", "1") as server:
        before = server.ask("POST", ASK, b"[1, 2, 3, 4]", JSON)
        edit(tmp_path)
        from penstock import Bundle
        from penstock.core.source_files.find_application import find_application

        found = find_application(str(tmp_path / "app.py"))
        Bundle.write(found, found.model(), np.ones((3, 4), np.float32), to=models / "doubler")
        assert server.ask("POST", "/v2/repository/models/doubler/load")[0] == 200
        after = server.ask("POST", ASK, b"[1, 2, 3, 4]", JSON)
    assert (before[2], after[2]) == ({"doubled": [2.0, 4.0, 6.0, 8.0]}, {"edited": [2.0, 4.0, 6.0, 8.0]})
    assert before[1]["penstock-version"] != after[1]["penstock-version"]


@pytest.mark.slow
def test_others_are_answered_while_a_front_end_imports(tmp_path: Path) -> None:
    import_s = 4.0
    models = tmp_path / "models"
    models.mkdir()
    for name, head in (("quick", ""), ("slow", SLOW_IMPORT.format(import_s=0.0))):
        (tmp_path / name).mkdir()
        write_doubler(tmp_path / name)
        if head:
            text = (tmp_path / name / "app.py").read_text() + head
            (tmp_path / name / "app.py").write_text(text)
            from penstock import Bundle
            from penstock.core.source_files.find_application import find_application

            found = find_application(str(tmp_path / name / "app.py"))
            Bundle.write(found, found.model(), np.ones((2, 4), np.float32), to=tmp_path / name / "bundle")
            (tmp_path / name / "app.py").write_text(text.replace("+ 0.0", f"+ {import_s}"))
    (tmp_path / "quick" / "bundle").rename(models / "quick")
    options = ("--models", str(models), "--frontends", "1", "--accept-changed-app", "--watchdog-s", "3")
    with RunningServer(None, *options) as server:
        shutil.move(tmp_path / "slow" / "bundle", models / "slow")
        loading = threading.Thread(target=lambda: loaded.append(load(server)))
        loaded: list[int] = []
        loading.start()
        waited_s: list[float] = []
        while loading.is_alive():
            start_s = time.monotonic()
            assert server.ask("POST", "/v1/apps/quick", b"[1, 2, 3, 4]", JSON)[0] == 200
            waited_s.append(time.monotonic() - start_s)
        assert loaded == [200]
        assert server.ask("POST", "/v1/apps/slow", b"[1, 2, 3, 4]", JSON)[0] == 200
        assert max(waited_s) < import_s / 2


def load(server: RunningServer) -> int:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    connection.request("POST", "/v2/repository/models/slow/load")
    status = connection.getresponse().status
    connection.close()
    return status
