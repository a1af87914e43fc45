"""Forked processes of the tests behave as those that start anew."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import eventually, exists
from tests.support.warm_client import SOCKET_VARIABLE, is_warm

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
PROBE = [sys.executable, "-m", "tests.support.probe"]


def run(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PROBE": "hello", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*PROBE, *arguments],
        input="one\ntwo\n",
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=60,
    )


def test_it_has_the_arguments_folder_environment_and_streams(tmp_path: Path) -> None:
    done = run("pass", folder=tmp_path)
    described = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "done\n")
    assert described["arguments"] == ["pass"]
    assert (described["folder"], described["said"], described["read"]) == (str(tmp_path), "hello", "one\n")
    assert described["torch"] == (SOCKET_VARIABLE in os.environ)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(7)", 7),
        ("sys.exit('a sentence')", 1),
        ("raise ValueError('wrong')", 1),
        ("os.kill(os.getpid(), 9)", -9),
        ("os.abort()", -6),
        ("os._exit(3)", 3),
    ],
)
def test_it_ends_as_a_process_does(code: str, status: int) -> None:
    done = run(code)
    assert done.returncode == status
    assert ("a sentence" in done.stderr) == ("a sentence" in code)
    assert ("ValueError: wrong" in done.stderr) == ("ValueError" in code)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -15), (signal.SIGKILL, -9), (signal.SIGINT, -2)])
def test_signals_reach_it(number: int, status: int) -> None:
    with subprocess.Popen(
        [*PROBE, "import time; time.sleep(60)"],
        text=True,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("one\n")
        process.stdin.flush()
        forked = json.loads(process.stdout.readline())["pid"]
        process.send_signal(number)
        assert process.wait(30) == status
        eventually(lambda: not exists(forked), within_s=5)


def test_what_it_starts_is_forked_too() -> None:
    code = "import subprocess; print(subprocess.run([sys.executable, '-m', 'tests.support.probe'], check=True))"
    done = run(code)
    assert done.returncode == 0, done.stderr
    inner = json.loads(done.stdout.splitlines()[1])
    assert inner["torch"] == (SOCKET_VARIABLE in os.environ)


def test_supervisors_and_code_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, "somewhere")
    assert is_warm(["-m", "penstock", "train", "app.py"])
    assert not is_warm(["-m", "penstock", "serve", "bundle", "--frontends", "2"])
    assert not is_warm(["-m", "penstock.serve.control.child_main"])
    assert not is_warm(["-c", "import torch"])
    monkeypatch.delenv(SOCKET_VARIABLE)
    assert not is_warm(["-m", "penstock", "train", "app.py"])
