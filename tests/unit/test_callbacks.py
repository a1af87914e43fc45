"""Callbacks: order of the events, stops, failures, early stopping, loggers."""

import math
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import penstock
from benchmarks.acceptance.train.resume import APPLICATION
from penstock.cli import build
from penstock.core.errors import TrainError
from penstock.core.source_files.find_application import FoundApplication, find_application
from penstock.train.callbacks import logger
from penstock.train.callbacks.callback import (
    Callback,
    CheckpointWritten,
    Ended,
    Started,
    StepTaken,
    Stop,
    Validated,
)
from penstock.train.callbacks.dispatch import Callbacks
from penstock.train.callbacks.early_stopping import EarlyStopping
from penstock.train.callbacks.tensor_board import TensorBoard
from penstock.train.callbacks.trackers import MLflow, Trackio, WandB
from penstock.train.fit import Fitted
from penstock.train.overrides import parse_settings, with_overrides
from penstock.train.recipe import CheckpointPolicy, Recipe
from penstock.train.report.run_comparison import read_run
from penstock.train.run import RunResult, train
from tests.support.thorough import thorough

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
STEPS = 40


class Watch(Callback):
    """Record the events; stop or fail at one of them."""

    def __init__(self, stop_at: tuple[str, int] | None = None, fail_at: str | None = None) -> None:
        self.events: list[Any] = []
        self._stop_at, self._fail_at = stop_at, fail_at

    def _take(self, name: str, event: Any) -> Stop | None:
        self.events.append(event)
        if name == self._fail_at:
            raise RuntimeError("out of order")
        return Stop(reason="enough") if self._stop_at == (name, event.step) else None

    def start(self, event: Started) -> Stop | None:
        return self._take("start", event)

    def step(self, event: StepTaken) -> Stop | None:
        return self._take("step", event)

    def validation(self, event: Validated) -> Stop | None:
        return self._take("validation", event)

    def checkpoint(self, event: CheckpointWritten) -> Stop | None:
        return self._take("checkpoint", event)

    def end(self, event: Ended) -> None:
        self._take("end", event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def fit(*callbacks: Callback | str, **more: Any) -> Fitted:
    given: dict[str, Any] = {"epochs": 4, "batch_size": 10, "device": "cpu", "validation": (X, Y), **more}
    torch.manual_seed(0)
    return penstock.fit(nn.Linear(3, 2), (X, Y), callbacks=callbacks, **given)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> FoundApplication:
    file = tmp_path_factory.mktemp("app") / "app.py"
    file.write_text(APPLICATION)
    return find_application(str(file))


def run(found: FoundApplication, folder: Path, *callbacks: Callback | str, **changes: Any) -> RunResult:
    recipe = found.recipe()
    changed = {"steps": STEPS, "selection.every_epochs": 1.0, "callbacks": list(callbacks), **changes}
    return train(found, folder, with_overrides(recipe, changed), overrides={}, quiet=True)


def test_events_come_in_order(tmp_path: Path) -> None:
    watch = Watch()
    fitted = fit(watch, out=tmp_path / "run", quiet=True, checkpoints=CheckpointPolicy(every_steps=8))
    kinds = [type(event) for event in watch.events]
    assert (kinds[0], kinds[-1]) == (Started, Ended)
    assert [event.step for event in watch.of(StepTaken)] == list(range(1, 17))
    assert [event.step for event in watch.of(Validated)] == [4, 8, 12, 16]
    assert [event.step for event in watch.of(CheckpointWritten)] == [8, 16]
    assert [event.figures for event in watch.of(Validated)] == fitted.history
    # Losses are those of all steps, read at some.
    assert len([loss for event in watch.of(StepTaken) for loss in event.losses]) == 16
    first_validation = kinds.index(Validated)
    assert [event.step for event in watch.events[:first_validation]] == [0, 1, 2, 3, 4]
    started, ended = watch.events[0], watch.events[-1]
    assert (started.name, started.total_steps, started.metric, started.mode) == ("Linear", 16, "loss", "min")
    assert (started.settings["batch_size"], started.settings["device"]) == (10, "cpu")
    assert (ended.state, ended.step, dict(ended.metrics)) == ("finished", 16, fitted.metrics)
    assert (tmp_path / "run" / "checkpoints" / "step-00000016") == watch.of(CheckpointWritten)[-1].folder
    assert all(event.folder.is_dir() for event in watch.of(CheckpointWritten))


@pytest.mark.parametrize("event", [thorough("step"), "validation"])
def test_a_callback_stops_a_training(event: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = Watch(stop_at=(event, 8))
    fitted = fit(watch, out=tmp_path / "run")
    assert fitted.history[-1]["step"] == 8
    ended = watch.of(Ended)
    assert [(each.state, each.step, each.reason) for each in ended] == [("finished", 8, "enough")]
    assert "Stopped by a callback after step 8 of 16: enough." in " ".join(capsys.readouterr().out.split())
    fields = read_run(tmp_path / "run").fields
    assert (fields["state"], fields["stopped_after"], fields["stopped_because"]) == ("finished", 8, "enough")
    assert (tmp_path / "run" / "checkpoints" / "step-00000008").is_dir()


def test_a_stop_between_validations_validates_once_more() -> None:
    watch = Watch(stop_at=("step", 6))
    assert [line["step"] for line in fit(watch, quiet=True).history] == [4, 6]


def test_a_stop_at_the_start_comes_after_one_step() -> None:
    assert [line["step"] for line in fit(Watch(stop_at=("start", 0)), quiet=True).history] == [1]


def test_a_stop_after_the_last_step_is_none(tmp_path: Path) -> None:
    watch = Watch(stop_at=("validation", 16))
    fit(watch, out=tmp_path / "run", quiet=True)
    assert watch.of(Ended)[0].reason is None
    assert "stopped_because" not in read_run(tmp_path / "run").fields


@pytest.mark.parametrize("event", [thorough("start"), "step", "validation", thorough("checkpoint"), thorough("end")])
def test_a_callback_that_fails_is_named_once(event: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch, other = Watch(fail_at=event), Watch()
    plain = fit(quiet=True)
    fitted = fit(watch, other, out=tmp_path / "run", checkpoints=CheckpointPolicy(every_steps=8))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("The callback Watch failed at step") == 1
    assert "(RuntimeError: out of order); the training goes on without it." in said
    assert fitted.parameter_hash == plain.parameter_hash
    assert len(other.of(Ended)) == 1
    failed = {"start": Started, "step": StepTaken, "validation": Validated, "checkpoint": CheckpointWritten}
    assert len(watch.of(failed.get(event, Ended))) == 1


def test_callbacks_do_not_change_the_weights() -> None:
    assert fit(quiet=True).parameter_hash == fit(Watch(), quiet=True).parameter_hash


def test_the_end_of_a_failed_training_is_delivered() -> None:
    watch = Watch()
    with pytest.raises(TrainError, match="the loss is"):
        fit(watch, quiet=True, loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets) / 0)
    assert [event.state for event in watch.of(Ended)] == ["failed"]


def figures(*losses: float) -> list[dict[str, float]]:
    return [{"validation_loss": loss} for loss in losses]


@pytest.mark.parametrize(
    ("losses", "min_delta", "stops"),
    [
        ((3, 2, 1, 0.5), 0, False),
        ((3, 2, 2, 2.5), 0, True),
        ((3, 2, 2.5, 1.9), 0, False),
        ((3, 2.95, 2.92, 2.91), 0.1, True),
        ((3, math.nan, math.nan), 0, True),
        ((math.nan, 3, math.nan), 0, False),
    ],
)
def test_early_stopping_counts_validations(losses: tuple[float, ...], min_delta: float, stops: bool) -> None:
    early = EarlyStopping(2, min_delta=min_delta)
    assert early.start(Started(name="n", folder=None, step=0, total_steps=9)) is None
    wishes = [early.validation(Validated(step=1, figures=line, is_best=False)) for line in figures(*losses)]
    assert (wishes[-1] is not None) == stops
    # The same from the figures of a run that is resumed.
    resumed = early.start(Started(name="n", folder=None, step=1, total_steps=9, validations=figures(*losses)))
    assert (resumed is not None) == stops


def test_early_stopping_takes_the_metric_and_mode_of_the_recipe() -> None:
    early = EarlyStopping(1)
    early.start(Started(name="n", folder=None, step=0, total_steps=9, metric="accuracy", mode="max"))
    lines = [{"validation_accuracy": value} for value in (0.5, 0.6, 0.6)]
    wishes = [early.validation(Validated(step=1, figures=line, is_best=False)) for line in lines]
    assert wishes[:2] == [None, None]
    assert wishes[2] == Stop(reason="accuracy has not improved over 0.6 in 1 validation")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"patience": 0}, "patience 0; it must be a whole number above 0"),
        ({"patience": 1, "min_delta": -1}, "min_delta -1"),
        ({"patience": 1, "metric": "accuracy"}, "give both"),
        ({"patience": 1, "metric": "accuracy", "mode": "up"}, "give both"),
    ],
)
def test_early_stopping_refuses(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainError, match=said):
        EarlyStopping(**given)


def test_early_stopping_of_a_run_and_the_same_command_again(found: FoundApplication, tmp_path: Path) -> None:
    # No loss is lower by so much.
    early = EarlyStopping(2, min_delta=100.0)
    stopped = run(found, tmp_path / "run", early)
    fields = read_run(tmp_path / "run").fields
    assert fields["stopped_after"] < STEPS
    assert (tmp_path / "run" / "bundle").is_dir()
    # As if it had been killed before its bundle.
    assert run(found, tmp_path / "run", early).parameter_hash == stopped.parameter_hash
    assert read_run(tmp_path / "run").fields["stopped_after"] == fields["stopped_after"]


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        (["wandbb"], "there is no callback 'wandbb'; the names are tensorboard, wandb, mlflow, trackio"),
        ([print], "give an instance of a subclass of Callback"),
        ("wandb", "give a list"),
        ([EarlyStopping(1, metric="f1", mode="max")], "EarlyStopping.metric 'f1'; choose one of loss"),
    ],
)
def test_a_recipe_refuses_other_callbacks(callbacks: Any, said: str) -> None:
    with pytest.raises(TrainError, match=said):
        Recipe(
            data=lambda: pytest.fail("not called"),
            loss=nn.functional.mse_loss,
            optimizer=torch.optim.SGD,
            steps=1,
            callbacks=callbacks,
        )


def test_early_stopping_without_validation_is_refused() -> None:
    with pytest.raises(TrainError, match="EarlyStopping needs validation examples"):
        fit(EarlyStopping(1), validation=None)


def test_callbacks_of_a_command_are_added_to_the_recipe(found: FoundApplication) -> None:
    early = EarlyStopping(1)
    recipe = with_overrides(found.recipe(), {"callbacks": [early]})
    assert list(with_overrides(recipe, {"callbacks": ["wandb"]}).callbacks) == [early, "wandb"]
    with pytest.raises(TrainError, match="there is no callback 'neptune'"):
        with_overrides(recipe, {"callbacks": ["neptune"]})
    with pytest.raises(TrainError, match="'callbacks' of a recipe is no single value"):
        parse_settings(["callbacks=wandb"])


def test_a_callback_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = fake_trackio()
    monkeypatch.setitem(sys.modules, "trackio", module)
    app, folder = tmp_path / "app.py", tmp_path / "run"
    app.write_text(APPLICATION)
    command = ["train", str(app), "--out", str(folder), "--device", "cpu", "--steps", "20"]
    unknown = CliRunner().invoke(build(), [*command, "--callback", "neptune"])
    assert "there is no callback 'neptune'" in str(unknown.exception)
    assert not folder.exists()
    assert CliRunner().invoke(build(), [*command, "--callback", "trackio"]).exit_code == 0
    assert calls[-1] == ("finish", None)
    assert read_run(folder).fields["overrides"]["callbacks"] == ["trackio"]
    # A logger is no difference between a command and a run.
    assert "is finished" in CliRunner().invoke(build(), command).stdout


# TensorBoard


def test_a_run_has_tensorboard_events(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fitted = fit(TensorBoard(every_steps=5), out=tmp_path / "run", quiet=True)
    events = EventAccumulator(str(tmp_path / "run" / "events")).Reload()
    losses = events.Scalars("validation_loss")
    assert [event.step for event in losses] == [4, 8, 12, 16]
    assert [event.value for event in losses] == pytest.approx([line["validation_loss"] for line in fitted.history])
    assert [event.step for event in events.Scalars("step_loss")] == [5, 10, 15]


def test_without_tensorboard_a_run_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    fit(out=tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("TensorBoard") == 1
    assert "(tensorboard is not installed; pip install 'penstock-nn[train]'); the training goes on" in said
    assert not (tmp_path / "run" / "events").exists()
    assert (tmp_path / "run" / "curves.png").exists()


# Loggers, with modules in place of the packages


class FakeRun:
    """A run of W&B or of Trackio."""

    def __init__(self, calls: list[Any], broken: str | None) -> None:
        self.id, self.name = "id-1", "name-1"
        self._calls, self._broken = calls, broken

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self._broken == "log":
            raise ConnectionError("no route to host")
        self._calls.append(("log", dict(metrics), step, threading.current_thread().name))

    def finish(self, exit_code: int | None = None) -> None:
        self._calls.append(("finish", exit_code))


def fake_wandb(broken: str | None = None) -> tuple[ModuleType, list[Any]]:
    calls: list[Any] = []

    # The arguments of wandb.init that are given.
    def init(
        *, project: str, name: str, dir: str, config: Any, mode: str, id: str | None, resume: str | None
    ) -> FakeRun:
        if broken == "init":
            raise ConnectionError("no route to host")
        calls.append(("init", {"project": project, "name": name, "mode": mode, "id": id, "resume": resume}, config))
        return FakeRun(calls, broken)

    module: Any = ModuleType("wandb")
    module.init = init
    return module, calls


def fake_trackio() -> tuple[ModuleType, list[Any]]:
    calls: list[Any] = []

    def init(project: str, name: str | None, *, space_id: str | None, config: Any, resume: str, embed: bool) -> FakeRun:
        assert not embed
        calls.append(("init", {"project": project, "name": name, "resume": resume}, config))
        return FakeRun(calls, None)

    module: Any = ModuleType("trackio")
    module.init = init
    return module, calls


def fake_mlflow() -> tuple[ModuleType, list[Any]]:
    calls: list[Any] = []
    module: Any = ModuleType("mlflow")

    def start_run(run_id: str | None = None, run_name: str | None = None) -> Any:
        calls.append(("start_run", run_id, run_name, threading.current_thread().name))
        return SimpleNamespace(info=SimpleNamespace(run_id="id-1"))

    module.set_tracking_uri = lambda uri: calls.append(("set_tracking_uri", uri))
    module.set_experiment = lambda name: calls.append(("set_experiment", name))
    module.start_run = start_run
    module.log_params = lambda params: calls.append(("log_params", params))
    module.log_metrics = lambda metrics, step: calls.append(
        ("log_metrics", metrics, step, threading.current_thread().name)
    )
    module.end_run = lambda status: calls.append(("end_run", status, threading.current_thread().name))
    return module, calls


def test_wandb_gets_settings_losses_and_validations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    fitted = fit(WandB("flowers", mode="offline", every_steps=5), out=tmp_path / "run", quiet=True)
    first, last = calls[0], calls[-1]
    assert first[:2] == ("init", {"project": "flowers", "name": "run", "mode": "offline", "id": None, "resume": None})
    assert first[2]["batch_size"] == 10
    assert last == ("finish", 0)
    logged = [(metrics, step) for what, metrics, step, _ in calls[1:-1] if what == "log"]
    assert [step for metrics, step in logged if "step_loss" in metrics] == [5, 10, 15]
    validations = [(metrics["validation_loss"], step) for metrics, step in logged if "validation_loss" in metrics]
    assert validations == [(line["validation_loss"], line["step"]) for line in fitted.history]
    # W&B takes steps in order.
    assert [step for _, step in logged] == sorted(step for _, step in logged)
    assert logged[-1] == ({f"best_{name}": value for name, value in fitted.metrics.items()}, 16)
    # Not in the thread of the steps.
    assert {thread for _, _, _, thread in calls[1:-1]} == {"WandB"}


@pytest.mark.thorough
def test_a_resumed_training_goes_on_with_its_run_of_wandb(
    found: FoundApplication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, calls = fake_wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    run(found, tmp_path / "run", "wandb")
    run(found, tmp_path / "run", "wandb", steps=STEPS + 10)
    assert [(call[1]["id"], call[1]["resume"]) for call in calls if call[0] == "init"] == [
        (None, None),
        ("id-1", "allow"),
    ]


def test_mlflow_gets_parameters_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = fake_mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    fit(MLflow("flowers", tracking_uri="sqlite:///here.db"), out=tmp_path / "run", quiet=True)
    assert [call[0] for call in calls[:4]] == ["set_tracking_uri", "set_experiment", "start_run", "log_params"]
    assert calls[2] == ("start_run", None, "run", "MLflow")
    assert calls[3][1]["batch_size"] == "10"
    assert [call[2] for call in calls if call[0] == "log_metrics"] == [4, 8, 12, 16, 16]
    # MLflow's active run belongs to a thread.
    assert calls[-1] == ("end_run", "FINISHED", "MLflow")


@pytest.mark.thorough
def test_trackio_gets_figures_and_goes_on_by_name(
    found: FoundApplication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, calls = fake_trackio()
    monkeypatch.setitem(sys.modules, "trackio", module)
    run(found, tmp_path / "run", Trackio("flowers"))
    run(found, tmp_path / "run", Trackio("flowers"), steps=STEPS + 10)
    starts = [call[1] for call in calls if call[0] == "init"]
    assert starts[0] == {"project": "flowers", "name": "run", "resume": "never"}
    assert starts[1] == {"project": "flowers", "name": "name-1", "resume": "allow"}
    assert [call for call in calls if call[0] == "finish"] == [("finish", None)] * 2


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_an_absent_package_is_refused_before_the_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    watch = Watch()
    with pytest.raises(TrainError, match=f"needs the package '{name}', which is not installed; run 'pip install"):
        fit(watch, name)
    assert watch.events == []


@pytest.mark.parametrize("broken", ["init", "log"])
def test_a_logger_without_a_network_is_named_once(
    broken: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(broken)[0])
    fitted = fit(WandB(every_steps=1))
    assert fitted.history[-1]["step"] == 16
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("The callback WandB failed at step") == 1
    assert "(ConnectionError: no route to host); the training goes on without it." in said


def test_a_logger_that_hangs_does_not_hold_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _ = fake_wandb()
    held = threading.Event()
    monkeypatch.setattr(FakeRun, "log", lambda *_, **__: held.wait())
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(logger, "CLOSE_S", 0.1)
    fitted = fit("wandb")
    held.set()
    assert fitted.history[-1]["step"] == 16
    assert "The callback WandB failed at step 16 (TimeoutError: figures" in " ".join(capsys.readouterr().out.split())


def test_a_logger_refuses_an_interval_of_no_steps() -> None:
    with pytest.raises(TrainError, match="WandB has every_steps 0"):
        WandB(every_steps=0)


def test_a_step_event_costs_microseconds() -> None:
    """1% of a step of 10 ms is 100 µs; the fastest of many trials is far below that on any machine."""
    watching = [TensorBoard(), WandB(), MLflow()]
    callbacks = Callbacks(watching)
    assert callbacks.takes_steps
    fastest_s = math.inf
    for _ in range(20):
        began_s = time.perf_counter()
        for step in range(500):
            callbacks.step(StepTaken(step=step, time_s=time.monotonic()))
        fastest_s = min(fastest_s, (time.perf_counter() - began_s) / 500)
    assert fastest_s < 50e-6


def test_a_step_event_does_not_read_the_loss_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.train.step.host_sync import HostSync

    syncs: list[int] = []
    wait = HostSync.wait

    def counted(self: HostSync, **state: Any) -> Any:
        syncs.append(1)
        return wait(self, **state)

    monkeypatch.setattr(HostSync, "wait", counted)
    watch = Watch()
    fit(watch, quiet=True, epochs=50)
    assert len([event for event in watch.of(StepTaken) if event.losses]) == len(syncs) < 200
