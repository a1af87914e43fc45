"""`penstock sweep` with real trainings, killed in the middle of a trial."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.acceptance.train.resume import APPLICATION

COMMAND = [sys.executable, "-m", "penstock"]
SETTINGS = ["--set", "clip_norm=log(0.1, 5.0)", "--set", "steps=100", "--set", "checkpoints.every_steps=10"]


def command(app: Path, out: Path, *more: str) -> list[str]:
    return [*COMMAND, "sweep", str(app), "--out", str(out), "--trials", "3", "--device", "cpu", *SETTINGS, *more]


def run_of(out: Path, number: int) -> dict[str, Any]:
    return json.loads((out / f"{number:03d}/run.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_sweep_that_was_killed_goes_on_and_counts_no_trial_twice(tmp_path: Path) -> None:
    app, out = tmp_path / "app.py", tmp_path / "out"
    app.write_text(APPLICATION)
    with subprocess.Popen(command(app, out), stdout=subprocess.DEVNULL) as killed:
        while not list(out.glob("001/checkpoints/step-*")):
            assert killed.poll() is None
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
    first = run_of(out, 0)
    begun = run_of(out, 1)
    assert (first["state"], begun["state"]) == ("finished", "running")
    done = subprocess.run(
        command(app, out, "--format", "json"), capture_output=True, text=True, timeout=300, check=True
    )
    assert "Trial 1 goes on" in done.stderr
    found = json.loads(done.stdout)
    assert [each["outcome"] for each in found["trials"]] == ["complete"] * 3
    runs = [run_of(out, number) for number in range(3)]
    assert runs[0] == first
    assert runs[1]["overrides"] == begun["overrides"]
    assert [run["overrides"]["clip_norm"] for run in runs] == [
        each["settings"]["clip_norm"] for each in found["trials"]
    ]
    assert [run["metrics"][found["metric"]] for run in runs] == [each["value"] for each in found["trials"]]
    assert len({run["overrides"]["clip_norm"] for run in runs}) == 3
    lines = [json.loads(line)["step"] for line in (out / "001/metrics.jsonl").read_text().splitlines()]
    assert lines == sorted(set(lines))
    best = (min if found["mode"] == "min" else max)(found["trials"], key=lambda each: each["value"])
    assert found["best"] == best
