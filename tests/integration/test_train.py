"""Training from the command line, interrupted in every way."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import build, main
from tests.support.slowed_training import SLOW

COMMAND = [sys.executable, "-m", "penstock"]
STEPS = 600


def penstock(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("app") / "app.py"
    file.write_text(SLOW)
    return file


@pytest.fixture(scope="module")
def undisturbed(app: Path) -> str:
    run = app.parent / "undisturbed"
    done = penstock("train", app, "--out", run, "--steps", STEPS, "--checkpoint-every-steps", 20)
    assert done.returncode == 0, done.stderr
    return fields(run)["parameter_hash"]


def fields(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def interrupted(app: Path, run: Path, number: int, after_s: float) -> subprocess.Popen[str]:
    command = [*COMMAND, "train", str(app), "--out", str(run), "--steps", str(STEPS), "--checkpoint-every-steps", "20"]
    slow = app.with_name("slow")
    slow.touch()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not list(run.glob("checkpoints/step-*")):
        assert process.poll() is None
        time.sleep(0.005)
    time.sleep(after_s)
    process.send_signal(number)
    slow.unlink()
    return process


def same_command(app: Path, run: Path, steps: int = STEPS) -> subprocess.CompletedProcess[str]:
    return penstock("train", app, "--out", run, "--steps", steps, "--checkpoint-every-steps", 20)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_a_random_moment_the_same_command_ends_with_the_same_parameters(
    app: Path, undisturbed: str, tmp_path: Path, seed: int
) -> None:
    run = tmp_path / "run"
    with interrupted(app, run, signal.SIGKILL, random.Random(seed).uniform(0, 0.4)) as process:
        assert process.wait() == -signal.SIGKILL
    assert fields(run)["state"] == "running"
    resumed = penstock("train", "--resume", run) if seed else same_command(app, run)
    assert resumed.returncode == 0, resumed.stderr
    assert fields(run)["parameter_hash"] == undisturbed
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))
    again = same_command(app, run)
    assert (again.returncode, "is finished" in again.stdout) == (0, True)


@pytest.mark.thorough
def test_ctrl_c_saves_and_says_how_to_go_on(app: Path, undisturbed: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with interrupted(app, run, signal.SIGINT, 0.05) as process:
        said = process.communicate(timeout=30)[0]
        assert process.returncode == 130
    assert f"penstock train --resume {run}" in said.replace("\n", "")
    assert "Traceback" not in said
    stopped = fields(run)
    assert stopped["state"] == "stopped"
    assert ("Bundle of the best so far" in said) == ("bundle" in stopped) == (run / "bundle").exists()
    # A comment is no change of the code.
    copy = app.with_name("same.py")
    copy.write_text(f"# The same.\n{app.read_text()}")
    copy.replace(app)
    assert penstock("train", "--resume", run).returncode == 0
    assert fields(run)["parameter_hash"] == undisturbed
    finished = penstock("train", "--resume", run)
    assert (finished.returncode, "is finished" in finished.stdout) == (0, True)


@pytest.mark.thorough
def test_a_finished_run_becomes_longer(app: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert same_command(app, run, 40).returncode == 0
    done = same_command(app, run, 60)
    assert done.returncode == 0, done.stderr
    assert (fields(run)["state"], fields(run)["total_steps"]) == ("finished", 60)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 60


def test_a_checkpoint_becomes_a_bundle(app: Path, tmp_path: Path) -> None:
    run, made = tmp_path / "run", tmp_path / "made"
    assert same_command(app, run, 40).returncode == 0

    def typed(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(build(), [str(each) for each in arguments])
        return result.exit_code, f"{result.output} {result.exception}"

    status, said = typed("bundle", run, "--out", made, "--checkpoint", 20)
    assert (status, "checkpoint of step 20" in said) == (0, True), said
    assert typed("inspect", made, "--run")[0] == 0
    assert "no checkpoint of step 30, only of 20, 40" in typed("bundle", run, "--out", made, "--checkpoint", 30)[1]
    assert "give an application and its --weights FILE" in typed("bundle", app, "--out", made, "--checkpoint", 20)[1]


@pytest.mark.thorough
def test_a_fresh_run_is_begun_beside_the_other(app: Path, undisturbed: str) -> None:
    run = app.parent / "undisturbed"
    before = (run / "run.json").read_bytes()
    done = penstock("train", app, "--out", run, "--steps", 4, "--fresh")
    assert done.returncode == 0, done.stderr
    assert (run / "run.json").read_bytes() == before
    assert fields(app.parent / "undisturbed-2")["total_steps"] == 4


@pytest.mark.thorough
def test_runs_are_listed_and_compared(app: Path, undisturbed: str) -> None:
    listed = penstock("runs", app.parent, "--metric", "loss", "--reach", "0")
    assert listed.returncode == 0, listed.stderr
    assert "undisturbed" in listed.stdout
    assert (app.parent / "runs.png").stat().st_size > 5000
    strange = penstock("runs", app.parent, "--metric", "foo", "--reach", "0")
    assert strange.returncode == 2
    assert "has the metric 'foo'; --metric is one of " in strange.stderr
    rows = {row["run"]: row for row in json.loads(penstock("runs", app.parent, "--format", "json").stdout)}
    assert rows["undisturbed"]["state"] == "finished"
    assert f"{rows['undisturbed']['best']['loss']:.4f}" in listed.stdout


@pytest.mark.thorough
def test_mistakes_are_said_in_a_sentence(
    app: Path, undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "run.json").write_text(
        json.dumps(
            {
                **json.loads((app.parent / "undisturbed" / "run.json").read_text()),
                "state": "running",
                "sources": {},
                "code": {},
            }
        )
    )
    mistakes: list[tuple[tuple[object, ...], str]] = [
        (("train", "nothing", "--out", tmp_path / "x"), "There is no application 'nothing'"),
        (("train", app), "say what to train and where"),
        (
            ("train", app, "--out", app.parent / "undisturbed", "--seed", 3),
            "seed is 3, the run's is the recipe's 0; steps is the recipe's, the run's is 600. Give the same options",
        ),
        (("train", app, "--out", app.parent / "undisturbed", "--steps", 599), "steps is 599, the run's is 600"),
        (
            ("train", app, "--out", app.parent / "undisturbed", "--set", "epoch=1"),
            "no setting 'epoch'; the nearest are epochs",
        ),
        (("train", "digits", "--out", app.parent / "undisturbed"), "the application is digits, the run's is"),
        (("train", app, "--out", changed, "--steps", STEPS, "--checkpoint-every-steps", 20), "--accept-changed-app"),
        (("train", "--resume", tmp_path / "none"), "holds no run"),
        (("train", "--resume", app.parent / "undisturbed", "--seed", 3), "a resumed run keeps its folder"),
        (("train", "--resume", changed), "changed since the run"),
        (("train", app, "--out", tmp_path / "y", "--precision", "fp8"), "--precision is 'fp8'"),
        (("train", app, "--out", tmp_path / "y", "--batch-size", 0), "--batch-size is 0"),
        (("train", app, "--out", tmp_path / "y", "--workers", 0), "--workers is 0; it must be a number above 0"),
        (("train", app, "--out", tmp_path / "y", "--clip-norm", -1), "--clip-norm is -1"),
        (("train", app, "--out", tmp_path / "y", "--gradient-accumulation", 3), "do not divide into 3 equal parts"),
        (
            ("train", app, "--out", tmp_path / "y", "--bad-examples", "hide"),
            "--bad-examples is 'hide'; choose one of stop, skip",
        ),
        (("train", app, "--out", tmp_path / "y", "--profile", 0), "--profile is 0; give at least 1 step"),
        (("train", app, "--out", tmp_path / "y", "--steps", 20, "--profile", 5), "21 steps are needed for the profile"),
        (("runs", tmp_path / "empty"), "there is no run"),
    ]
    for arguments, sentence in mistakes:
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr().err
        assert left.value.code == 2, arguments
        assert sentence in said.replace("\n", " "), (arguments, said)
        assert "Traceback" not in said


@pytest.mark.thorough
def test_a_profiled_run_says_where_its_time_goes_and_how_it_was_set(app: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--gradient-accumulation", 2, "--clip-norm", 0.5, "--workers", 2, "--bad-examples", "skip")
    options += ("--precision", "tf32", "--profile", 4, "--no-compile")
    done = penstock("train", app, "--out", run, "--steps", 40, *options)
    assert done.returncode == 0, done.stderr
    assert "4 steps of 32 examples on the CPU: " in done.stdout
    assert "samples/s" in done.stdout
    assert {file.name for file in run.iterdir()} >= {"trace.json", "step-time.json", "timeline.svg"}
    breakdown = json.loads((run / "step-time.json").read_text())
    assert [len(steps) for steps in breakdown["ranks"]] == [4]
    written = json.loads((run / "run.json").read_text())
    expected = {"clip_norm": 0.5, "loading.workers": 2, "loading.bad_examples": "skip"}
    expected |= {"execution.accumulation_steps": 2, "execution.compile": False}
    assert written["overrides"] == {**expected, "steps": 40, "precision": "tf32"}
    assert {name: written["recipe"][name] for name in expected} == expected
    assert written["samples_per_s"] > 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["samples_per_s"] > 0 for line in lines)
