"""Sweeps: bookkeeping, failures, pruning and going on, with trials that only write the files of a run."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import build
from penstock.cli.sweep import best_command
from penstock.core.errors import TrainError
from penstock.core.source_files.find_application import FoundApplication, find_application
from penstock.train.sweep.ranges import parse_space
from penstock.train.sweep.sweeping import SweepPlan, SweepResult, SweepStopped, check_space, sweep
from penstock.train.sweep.trial_run import RunPlan
from penstock.train.sweep.trials import Trials

APP = """
import numpy as np
from torch import nn

from penstock import Application, Optimizer, Recipe, TensorSpec
from penstock.train.recipe import ArraySet, Data, Selection, accuracy

X, Y = np.zeros((8, 2), np.float32), np.zeros(8, np.int64)
part = ArraySet(inputs=X, targets=Y)

app = Application(
    name="some",
    input=TensorSpec(dtype="float32", shape=(2,), meaning="numbers"),
    output=TensorSpec(dtype="float32", shape=(2,), meaning="scores"),
    model=lambda: nn.Linear(2, 2),
    recipe=lambda: Recipe(
        data=lambda: Data(train=part, validation=part),
        loss=nn.functional.cross_entropy,
        optimizer=Optimizer("sgd", lr=0.1, momentum=0.9),
        metrics={"accuracy": accuracy},
        selection=Selection(metric="accuracy", mode="max"),
        epochs=1,
    ),
)
"""
# A training that writes the files of a run: its accuracy is its learning rate.
FAKE = """
import json, signal, sys, time
from pathlib import Path
folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
lr = settings["optimizer.lr"]
with (folder / "began").open("a") as began:
    began.write("x")
run = {"state": "running", "total_steps": 3, "recipe": {}}
def write(fields):
    # Whole or not at all, as a training does.
    (folder / "run.json.new").write_text(json.dumps(fields))
    (folder / "run.json.new").rename(folder / "run.json")
write(run)
if lr > 0.9:
    sys.stderr.write("penstock: the loss is nan at step 1.\\n")
    sys.exit(2)
kept = (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else ""
done = kept.count("\\n")
for step in range(done + 1, 4):
    with (folder / "metrics.jsonl").open("a") as sink:
        sink.write(json.dumps({"step": step, "validation_accuracy": lr * step / 3}) + "\\n")
    while step == 2 and (folder.parent / "hold").exists():
        time.sleep(0.01)
write(run | {"state": "finished", "metrics": {"accuracy": lr}})
"""


@pytest.fixture
def found(tmp_path: Path) -> FoundApplication:
    file = tmp_path / "sweep_app.py"
    file.write_text(APP)
    return find_application(str(file))


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def command(plan: RunPlan) -> list[str]:
        return [sys.executable, "-S", str(script), str(plan.folder), json.dumps(dict(plan.settings))]

    monkeypatch.setattr(RunPlan, "command", command)
    monkeypatch.setattr("penstock.train.sweep.sweeping.POLL_S", 0.01)


def plan(tmp_path: Path, *texts: str, **more: Any) -> SweepPlan:
    given: dict[str, Any] = {"trials": 3, "folder": tmp_path / "out"} | more
    return SweepPlan(application="sweep_app.py", space=parse_space(texts or ["optimizer.lr=range(0.1, 0.5)"]), **given)


def swept(plan: SweepPlan, found: FoundApplication, said: list[str] | None = None) -> SweepResult:
    return sweep(plan, found, (said if said is not None else []).append)


def chosen(result: SweepResult) -> list[float]:
    return [each.settings["optimizer.lr"] for each in result.trials]


def test_the_best_trial_is_that_of_the_metric_and_its_command_trains_it(
    tmp_path: Path, found: FoundApplication
) -> None:
    planned = plan(tmp_path, "optimizer.lr=range(0.1, 0.5)", "seed=3")
    result = swept(planned, found)
    assert [each.outcome for each in result.trials] == ["complete"] * 3
    assert result.best is not None
    assert (result.metric, result.mode, result.best.value) == ("accuracy", "max", max(chosen(result)))
    lr = result.best.settings["optimizer.lr"]
    command = f"penstock train sweep_app.py --out {tmp_path}/out-best --set seed=3 --set optimizer.lr={lr!r}"
    assert best_command(planned, result.best) == command


@pytest.mark.thorough
def test_equal_seeds_choose_alike_and_more_trials_go_on(tmp_path: Path, found: FoundApplication) -> None:
    whole = swept(plan(tmp_path, trials=12), found)
    part = swept(plan(tmp_path, trials=4, folder=tmp_path / "part"), found)
    assert chosen(part) == chosen(whole)[:4]
    assert len(set(chosen(whole))) == 12
    said: list[str] = []
    more = swept(plan(tmp_path, trials=12, folder=tmp_path / "part"), found, said)
    assert more.trials == whole.trials
    assert (tmp_path / "part/000/began").read_text() == "x"
    assert chosen(swept(plan(tmp_path, folder=tmp_path / "other", seed=1), found)) != chosen(part)[:3]


def test_few_combinations_are_each_trained_once(tmp_path: Path, found: FoundApplication) -> None:
    result = swept(plan(tmp_path, "optimizer.lr=[0.1, 0.2]", "batch_size=[1, 2]", trials=9), found)
    settings = [tuple(each.settings.values()) for each in result.trials]
    assert sorted(settings) == [(0.1, 1), (0.1, 2), (0.2, 1), (0.2, 2)]


def test_a_trial_that_crashes_is_a_failed_trial(tmp_path: Path, found: FoundApplication) -> None:
    result = swept(plan(tmp_path, "optimizer.lr=[0.1, 0.2, 0.95]", trials=3), found)
    assert sorted(each.outcome for each in result.trials) == ["complete", "complete", "failed"]
    failed = next(each for each in result.trials if each.outcome == "failed")
    assert (failed.reason, failed.value) == ("the loss is nan at step 1.", None)


def test_when_the_first_trials_all_fail_the_sweep_ends(tmp_path: Path, found: FoundApplication) -> None:
    with pytest.raises(TrainError, match="the first 3 trials all failed, the last with: the loss is nan at step 1"):
        swept(plan(tmp_path, "optimizer.lr=range(0.91, 1)", trials=9), found)


@pytest.mark.thorough
def test_trials_below_the_median_are_pruned_and_a_repetition_prunes_the_same(
    tmp_path: Path, found: FoundApplication
) -> None:
    first = swept(plan(tmp_path, trials=10), found)
    outcomes = [each.outcome for each in first.trials]
    assert outcomes[:5] == ["complete"] * 5
    assert "pruned" in outcomes
    assert {each.validations for each in first.trials if each.outcome == "pruned"} == {1}
    assert swept(plan(tmp_path, trials=10, folder=tmp_path / "again", jobs=1), found).trials == first.trials
    kept = swept(plan(tmp_path, trials=10, folder=tmp_path / "kept", prunes=False), found)
    assert [each.outcome for each in kept.trials] == ["complete"] * 10


def test_several_trials_at_a_time_have_numbers_of_their_own(tmp_path: Path, found: FoundApplication) -> None:
    result = swept(plan(tmp_path, trials=5, jobs=3), found)
    assert [each.number for each in result.trials] == list(range(5))
    assert sorted(each.name for each in (tmp_path / "out").glob("0*")) == [f"{n:03d}" for n in range(5)]
    assert plan(tmp_path, gpus=("4", "GPU-abc"), jobs=2).environment(1) == {"CUDA_VISIBLE_DEVICES": "GPU-abc"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"texts": ["optimizer.lr=range(0.1, 0.6)"]},
            r"optimizer.lr is range\(0.1, 0.6\), the sweep's is range\(0.1, 0",
        ),
        ({"texts": ["optimizer.lr=range(0.1, 0.5)", "seed=1"]}, "seed is 1, the sweep's is not given"),
        ({"seed": 1}, "seed is 1, the sweep's is 0"),
        ({"prunes": False}, "prune is false, the sweep's is true"),
    ],
)
def test_another_sweep_is_refused_with_the_difference(
    tmp_path: Path, found: FoundApplication, changed: dict[str, Any], message: str
) -> None:
    swept(plan(tmp_path, trials=1), found)
    with pytest.raises(TrainError, match=message):
        swept(plan(tmp_path, *changed.pop("texts", ()), trials=1, **changed), found)


def test_changed_sources_are_refused_or_accepted(tmp_path: Path, found: FoundApplication) -> None:
    swept(plan(tmp_path, trials=1), found)
    file = tmp_path / "sweep_app.py"
    file.write_text(APP.replace("momentum=0.9", "momentum=0.8"))
    changed = FoundApplication(application=found.application, module=found.module, reference=found.reference)
    with pytest.raises(TrainError, match=r"sweep_app.py of 'some' changed since .* cannot be compared"):
        swept(plan(tmp_path, trials=2), changed)
    assert len(swept(plan(tmp_path, trials=2, accepts_changed_app=True), changed).trials) == 2


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["optimiser.lr=log(0.1, 1)"], "no setting 'optimiser.lr'; the nearest are optimizer.lr"),
        (["batch_size=range(0, 8)"], "batch_size 0; it must be a number above 0"),
        (["batch_size=range(0.5, 8)"], "batch_size is 0.5; it must be a whole number"),
        (["optimizer.name=[sgd, adamw]", "optimizer.momentum=range(0.1, 0.9)"], "momentum"),
        (["selection.metric=[loss, accuracy]"], "selection.metric varies, but the trials are compared by it"),
        (["callbacks=[[wandb], [mlflow]]"], "is no list of values"),
    ],
)
def test_settings_are_checked_before_anything_starts(
    tmp_path: Path, found: FoundApplication, texts: list[str], message: str
) -> None:
    with pytest.raises(TrainError, match=message):
        swept(plan(tmp_path, *texts), found)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_file_of_settings_that_the_recipe_does_not_have_is_named(tmp_path: Path, command: str) -> None:
    app, config = tmp_path / "configured_app.py", tmp_path / "of-another-version.toml"
    app.write_text(APP)
    config.write_text(
        "seed = '[1, 2]'\n[optimizer]\nrate = 0.1\n" if command == "sweep" else "[optimizer]\nrate = 0.1\n"
    )
    given = [command, str(app), "--out", str(tmp_path / "out"), "--device", "cpu", "--config", str(config)]
    # Not in words of the file where only the command line is wrong.
    for more, message in (
        ([], f"--config {config}: the recipe has no setting 'optimizer.rate'; the nearest are"),
        (["--set", "epoch=3"], "the recipe has no setting 'epoch'; the nearest are epochs"),
    ):
        error = CliRunner().invoke(build(), [*given, *more]).exception
        assert isinstance(error, TrainError)
        assert str(error).startswith(message)
        assert ("of another version of Penstock" in str(error)) == (more == [])
    assert not (tmp_path / "out").exists()


def test_a_recipe_without_validation_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "without_app.py"
    file.write_text(APP.replace("validation=part", "validation=None"))
    with pytest.raises(TrainError, match="has no validation examples, by which trials are compared"):
        check_space(find_application(str(file)), parse_space(["optimizer.lr=range(0.1, 0.5)"]))


def test_a_folder_with_a_run_is_refused(tmp_path: Path, found: FoundApplication) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/run.json").write_text("{}")
    with pytest.raises(TrainError, match="holds a single run"):
        swept(plan(tmp_path), found)


def test_one_signal_stops_the_sweep_and_its_trials_and_the_same_command_goes_on(
    tmp_path: Path, found: FoundApplication
) -> None:
    whole = swept(plan(tmp_path, folder=tmp_path / "whole"), found)
    out = tmp_path / "out"
    out.mkdir()
    (out / "hold").touch()
    with signalled(out / "000/metrics.jsonl"), pytest.raises(SweepStopped):
        swept(plan(tmp_path), found)
    (out / "hold").unlink()
    assert swept(plan(tmp_path), found).trials == whole.trials
    # Its first run went on, and the others began once.
    assert [(out / f"00{n}/began").read_text() for n in range(3)] == ["xx", "x", "x"]


class signalled:
    """Send SIGTERM to this process when a file has two lines."""

    def __init__(self, file: Path) -> None:
        self.thread = threading.Thread(target=self.work, args=(file,), daemon=True)

    def work(self, file: Path) -> None:
        while not file.exists() or file.read_text().count("\n") < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.thread.join()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "out").mkdir()
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out/.lock")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_two_commands_do_not_sweep_in_one_folder(
    tmp_path: Path, found: FoundApplication, holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.train.sweep.sweeping.HELD_S", 0.2)
    with pytest.raises(TrainError, match="another command sweeps in"):
        swept(plan(tmp_path), found)


def test_the_journal_of_a_killed_command_is_mended(tmp_path: Path) -> None:
    space = parse_space(["optimizer.lr=[1, 2, 3]"])
    first = Trials(tmp_path, space, "max", seed=0, prunes=True)
    record = first.begin(3)
    assert record is not None
    first.report(0, 1, 0.5)
    journal = tmp_path / "journal.log"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code":')
    (tmp_path / "journal.log.lock").symlink_to(journal)
    again = Trials(tmp_path, space, "max", seed=0, prunes=True)
    assert [(each.outcome, each.validations, each.value) for each in again.records] == [("running", 1, 0.5)]
    again.report(0, 1, 0.7)
    again.complete(0, 0.9)
    assert [(each.outcome, each.value) for each in again.records] == [("complete", 0.9)]
    journal.write_bytes(whole[:40] + b"\n" + whole)
    with pytest.raises(TrainError, match=r"journal.log is damaged .* give --fresh"):
        Trials(tmp_path, space, "max", seed=0, prunes=True)
