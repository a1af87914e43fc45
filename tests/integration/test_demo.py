"""`make demo` in short: the whole path from training to the report, and nothing left running."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support.processes import eventually

pytestmark = [pytest.mark.slow, pytest.mark.alone]


def start(run: Path, output: int, input: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", "bench", "demo", "--out", str(run), "--epochs", "2", "--seconds", "1"]
    # A budget that the servers keep while other work is done on this machine.
    command += ["--budget-ms", "1000"]
    return subprocess.Popen(command, text=True, stdin=input, stdout=output, stderr=output)


def processes_of(run: Path) -> list[str]:
    """The command lines of all processes that name the run, the demo itself included."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode().split("\0")
        except OSError:
            continue
        if any(str(run) in word for word in words):
            found.append(" ".join(words))
    return found


def test_without_a_terminal_it_reports_and_ends(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    (run / "run.json").write_text("{}")
    (run / "left-over").touch()
    demo = start(run, subprocess.PIPE)
    printed, complaints = demo.communicate(timeout=170)
    assert demo.returncode == 0, complaints
    assert not (run / "left-over").exists()
    assert (run / "bundle" / "manifest.json").is_file()
    assert (run / "curves.png").is_file()
    for words in (
        "Held-out accuracy",
        "requests/s answered",
        "mean batch",
        "latency p98",
        "batches of one",
        "curves.png",
    ):
        assert words in printed
    report = json.loads((run / "demo.json").read_text())
    # Where other work takes from both, batches of one may carry the rate as well.
    assert report["batching"]["figures"]["share_within"] > report["single"]["figures"]["share_within"] - 0.02
    assert report["batching"]["mean_batch"] > report["single"]["mean_batch"] == 1
    assert report["batching"]["figures"]["checked"] > 0
    # What a server forked ends a moment after it.
    eventually(lambda: not processes_of(run), within_s=10)


def test_in_a_terminal_it_serves_on_until_interrupted(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    ours, theirs = pty.openpty()
    demo = start(run, theirs, theirs)
    os.close(theirs)
    printed = ""
    end = time.monotonic() + 150
    while not (found := re.search(r"Page: +\S*?(http://127\.0\.0\.1:\d+)/", printed)) and time.monotonic() < end:
        printed += os.read(ours, 4096).decode(errors="replace")
    assert found, printed
    with urlopen(found[1] + "/", timeout=10) as page:
        assert page.status == 200
    demo.send_signal(signal.SIGINT)
    assert demo.wait(20) == 0
    os.close(ours)
    # What a server forked ends a moment after it.
    eventually(lambda: not processes_of(run), within_s=10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_early_it_takes_its_children_along(tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "demo"
    demo = start(run, subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not (run / "run.json").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert len(processes_of(run)) > 1
    demo.send_signal(number)
    demo.wait(20)
    # What a server forked ends a moment after it.
    eventually(lambda: not processes_of(run), within_s=10)


def test_what_is_not_a_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    demo = start(tmp_path, subprocess.PIPE)
    _, complaints = demo.communicate(timeout=30)
    assert demo.returncode == 2
    assert "is not a run; move it away" in complaints
    assert (tmp_path / "thesis.tex").exists()
