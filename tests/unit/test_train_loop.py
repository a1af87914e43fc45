"""Training in this process, on a network that takes milliseconds."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR
from typer.testing import CliRunner

import penstock
from benchmarks.acceptance.train.resume import APPLICATION
from penstock.cli import build
from penstock.core.errors import PeersLost, TrainError
from penstock.core.source_files.find_application import FoundApplication, find_application
from penstock.train.checkpoint.format import newest_checkpoint
from penstock.train.checkpoint.saver import Saver
from penstock.train.data.arrays import check_finite
from penstock.train.history import History, resume, save_checkpoint
from penstock.train.interrupt import Interrupt
from penstock.train.overrides import with_overrides
from penstock.train.recipe import (
    ArraySet,
    CheckpointPolicy,
    Loading,
    Predictions,
    Recipe,
    Selection,
    StepExecution,
    accuracy,
)
from penstock.train.report.run_comparison import read_run
from penstock.train.report.run_log import read_metrics
from penstock.train.run import RunResult, train
from penstock.train.run_owner import owned
from penstock.train.step.declared_schedule import Schedule
from penstock.train.step.host_sync import HostSync
from penstock.train.step.schedules import warm_up_cosine
from penstock.train.trainer import Trainer
from tests.support.thorough import thorough

STEPS = 40
DAMAGED = """

from dataclasses import replace
from penstock.core.errors import BadExample
from penstock.train.recipe import Examples


class Damaged(Examples):
    def __init__(self):
        self.declare(app.input)

    def __len__(self):
        return 64

    def read(self, indices_B, seeds_B, inputs_B):
        raise BadExample("5.png cannot be read (truncated).", index=5, name="5.png")


recipe = replace(recipe, data=lambda: Data(train=Damaged(), validation=data().validation))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> FoundApplication:
    file = tmp_path_factory.mktemp("app") / "app.py"
    file.write_text(APPLICATION)
    return find_application(str(file))


def run(found: FoundApplication, folder: Path, **changes: Any) -> RunResult:
    recipe = with_overrides(found.recipe(), {"steps": STEPS, "selection.every_epochs": 1.0} | changes)
    return train(found, folder, recipe, overrides={}, quiet=True)


def test_a_run_leaves_all_that_it_promises(found: FoundApplication, tmp_path: Path) -> None:
    result = run(found, tmp_path / "run")
    files = {file.name for file in (tmp_path / "run").iterdir()}
    assert files >= {"run.json", "metrics.jsonl", "curves.png", "events", "checkpoints", "bundle"}
    assert list((tmp_path / "run" / "events").glob("events.out.tfevents.*"))
    fields = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (fields["state"], fields["parameter_hash"]) == ("finished", result.parameter_hash)
    lines = read_metrics(tmp_path / "run")
    assert lines[-1]["step"] == STEPS
    assert result.metrics["loss"] == min(line["validation_loss"] for line in lines)
    predictor = penstock.load(tmp_path / "run" / "bundle")
    assert predictor.predict(np.zeros((3, 8))).shape == (3, 2)


def test_the_same_seed_gives_the_same_parameters_and_another_seed_others(
    found: FoundApplication, tmp_path: Path
) -> None:
    hashes = [run(found, tmp_path / str(n), seed=seed).parameter_hash for n, seed in enumerate((1, 1, 2))]
    assert hashes[0] == hashes[1] != hashes[2]


def test_an_interrupted_run_goes_on_to_the_undisturbed_end(
    found: FoundApplication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = run(found, tmp_path / "undisturbed", checkpoints=CheckpointPolicy(every_steps=7))
    asked = iter([False] * 4 + [True] * 999)
    with monkeypatch.context() as patch:
        patch.setattr(
            Interrupt, "requested", property(lambda self: next(asked), lambda self, value: None), raising=False
        )
        with pytest.raises(KeyboardInterrupt):
            run(found, tmp_path / "run", checkpoints=CheckpointPolicy(every_steps=7))
    stopped = read_metrics(tmp_path / "run")[-1]["step"]
    assert stopped < STEPS
    # What was logged after the checkpoint, as a killed run leaves it, is dropped.
    with (tmp_path / "run" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 39, "seconds": 0}\n{"step": 4')
    resumed = run(found, tmp_path / "run", checkpoints=CheckpointPolicy(every_steps=7))
    assert resumed.parameter_hash == undisturbed.parameter_hash
    assert resumed.metrics == undisturbed.metrics
    steps = [line["step"] for line in read_metrics(tmp_path / "run")]
    assert steps == [line["step"] for line in read_metrics(tmp_path / "undisturbed")]


def one_cycle(optimizer: Optimizer, steps: int) -> LRScheduler:
    return OneCycleLR(optimizer, 0.1, total_steps=steps + 1)


def cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, steps)


@pytest.mark.parametrize("schedule", [thorough(None), warm_up_cosine(0.1), thorough(one_cycle)])
def test_a_longer_run_has_the_rates_of_its_own_length(found: FoundApplication, tmp_path: Path, schedule: Any) -> None:
    run(found, tmp_path / "run", steps=20, schedule=schedule)
    run(found, tmp_path / "run", steps=30, schedule=schedule)
    run(found, tmp_path / "whole", steps=30, schedule=schedule)
    rates = [
        {line["step"]: line["learning_rate"] for line in read_metrics(tmp_path / name)} for name in ("run", "whole")
    ]
    after = [step for step in rates[1] if step > 20]
    assert after
    assert [rates[0][step] for step in after] == pytest.approx([rates[1][step] for step in after])


@pytest.mark.parametrize("schedule", [Schedule("cosine"), one_cycle])
def test_the_first_step_of_a_longer_run_has_its_rate_too(tmp_path: Path, schedule: Any) -> None:
    def rates(trainer: Trainer, steps: range) -> list[float]:
        found: list[float] = []
        for step in steps:
            found.append(trainer.optimizer.param_groups[0]["lr"])
            trainer.step((torch.ones(3, 1), torch.zeros(3, 1)), step)
        return found

    def trainer(steps: int) -> Trainer:
        recipe = recipe_with(epochs=None, steps=steps, schedule=schedule, optimizer=partial(torch.optim.SGD, lr=1.0))
        return Trainer(nn.Linear(1, 1), recipe, steps, inputs=np.ones((3, 1), np.float32))

    short, longer = trainer(5), trainer(10)
    rates(short, range(5))
    with Saver(tmp_path / "checkpoints", short.world) as saver:
        save_checkpoint(saver, short, History(step=5))
    assert resume(tmp_path, longer).step == 5
    assert rates(longer, range(5, 10)) == pytest.approx(rates(trainer(10), range(10))[5:])


def test_a_schedule_that_follows_from_its_own_rates_is_not_made_longer(found: FoundApplication, tmp_path: Path) -> None:
    run(found, tmp_path / "run", steps=20, schedule=cosine)
    run(found, tmp_path / "run", steps=20, schedule=cosine)
    with pytest.raises(TrainError, match="the schedule is a CosineAnnealingLR for the run's first number of steps"):
        run(found, tmp_path / "run", steps=30, schedule=cosine)


def test_a_folder_has_one_command_at_a_time(found: FoundApplication, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with owned(tmp_path / "run"), pytest.raises(TrainError, match="another command trains in"):
        run(found, tmp_path / "run")
    assert run(found, tmp_path / "run", steps=3).best_step


@pytest.mark.parametrize(("busy", "saves"), [(False, 40), (True, 1)])
def test_a_checkpoint_that_the_clock_asks_for_does_not_wait_for_the_one_before(
    found: FoundApplication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool, saves: int
) -> None:
    begun: list[int] = []

    def save(self: Saver, step: int, *_: Any) -> None:
        begun.append(step)

    monkeypatch.setattr(Saver, "is_busy", busy)
    monkeypatch.setattr(Saver, "save", save)
    monkeypatch.setattr(HostSync, "is_due", True)
    run(found, tmp_path / "run", checkpoints=CheckpointPolicy(every_s=1e-9))
    assert begun == list(range(STEPS - saves + 1, STEPS + 1))


def test_bf16_learns_too(found: FoundApplication, tmp_path: Path) -> None:
    full, half = (run(found, tmp_path / precision, precision=precision) for precision in ("fp32", "bf16"))
    assert half.parameter_hash != full.parameter_hash
    assert half.metrics["loss"] == pytest.approx(full.metrics["loss"], rel=0.05)


def test_a_process_that_loses_the_others_does_not_call_the_run_failed(found: FoundApplication, tmp_path: Path) -> None:
    def lost(outputs: Tensor, targets: Tensor) -> Tensor:
        raise PeersLost("rank 0 of 2 waited")

    # It may be ended with them before it finds out: the run died.
    with pytest.raises(PeersLost):
        run(found, tmp_path / "run", loss=lost)
    assert read_run(tmp_path / "run").fields["state"] == "running"


def test_a_loss_that_is_not_finite_stops_the_run(found: FoundApplication, tmp_path: Path) -> None:
    def exploding(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets) * torch.inf

    # There is no checkpoint that could be kept.
    with pytest.raises(TrainError, match=r"the loss is inf at step 1; lower the learning rate or check the data\.$"):
        run(found, tmp_path / "run", loss=exploding)
    failed = read_run(tmp_path / "run")
    assert (failed.state, failed.fields["step"]) == ("failed", 1)
    assert (failed.reason or "").startswith("the loss is inf at step 1; lower the learning rate")
    # Its settings are kept, and the corrected run goes on in the folder.
    assert failed.fields["overrides"] == {}
    run(found, tmp_path / "run")
    assert read_run(tmp_path / "run").state == "finished"
    with pytest.raises(TrainError, match=r"the loss is inf at step \d+; .*\. The last checkpoint is kept\.$"):
        run(found, tmp_path / "run", loss=exploding, steps=STEPS + 1)


def test_an_error_of_the_loss_is_recorded(found: FoundApplication, tmp_path: Path) -> None:
    def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("weights")

    with pytest.raises(KeyError) as raised:
        run(found, tmp_path / "run", loss=wrong)
    assert raised.value.__notes__[0].startswith("The loss was given outputs float32[")
    assert read_run(tmp_path / "run").reason == "KeyError: 'weights'"
    shown = CliRunner().invoke(build(), ["runs", str(tmp_path)], catch_exceptions=False).output
    assert "run failed: KeyError: 'weights'" in shown


def test_an_error_of_a_metric_names_it_and_what_it_was_given(found: FoundApplication, tmp_path: Path) -> None:
    def wrong(outputs: Tensor, targets: Tensor) -> float:
        return {}["f1"]

    with pytest.raises(KeyError) as raised:
        run(found, tmp_path / "run", metrics={"f1": wrong})
    assert raised.value.__notes__[0].startswith("The metric 'f1' was given outputs float32[")
    assert " and targets " in raised.value.__notes__[0]


def typed(*words: object) -> Any:
    return CliRunner().invoke(build(), ["train", *map(str, words)])


def test_a_run_without_a_checkpoint_begins_anew_with_other_settings(found: FoundApplication, tmp_path: Path) -> None:
    def wrong(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("weights")

    folder, app = tmp_path / "run", found.reference
    with pytest.raises(KeyError):
        run(found, folder, loss=wrong)
    command = (app, "--out", folder, "--steps", 8, "--seed", 3)
    with owned(folder):
        assert "this command does not go on with" in str(typed(*command).exception)
    done = typed(*command)
    assert "ended before its first checkpoint, so it begins anew" in done.output
    assert done.exit_code == 0, done.exception
    fields = read_run(folder).fields
    assert (fields["state"], fields["overrides"]["seed"], fields["total_steps"]) == ("finished", 3, 8)
    # One that has a checkpoint is kept.
    again = typed(app, "--out", folder, "--steps", 8, "--seed", 4)
    assert "seed is 4, the run's is 3" in str(again.exception)


def test_the_remedy_of_a_damaged_example_is_named(found: FoundApplication, tmp_path: Path) -> None:
    app = tmp_path / "damaged_app.py"
    app.write_text(APPLICATION + DAMAGED)
    said = str(typed(app, "--out", tmp_path / "run", "--steps", 8).exception)
    assert said == (
        "5.png cannot be read (truncated). Mend or remove it, or train without such examples: --bad-examples skip."
    )


def test_a_target_that_is_no_class_is_named(found: FoundApplication, tmp_path: Path) -> None:
    data = found.recipe().data()
    assert isinstance(data.train, ArraySet)
    wrong = ArraySet(inputs=data.train.inputs, targets=np.full(len(data.train), 66))
    with pytest.raises(TrainError, match=r"^a target is 66, and the network gives \d+ classes; give targets from 0 to"):
        run(found, tmp_path / "train", data=lambda: replace(data, train=wrong))
    with pytest.raises(TrainError, match=r"^a target is 66, and the network gives"):
        run(found, tmp_path / "validation", data=lambda: replace(data, validation=wrong))

    def other(outputs: Tensor, targets: Tensor) -> Tensor:
        raise IndexError("list index out of range")

    with pytest.raises(IndexError, match="list index"):
        run(found, tmp_path / "other", loss=other)


def test_numbers_that_are_not_finite_are_named_before_the_first_step(found: FoundApplication, tmp_path: Path) -> None:
    data = found.recipe().data()
    assert isinstance(data.train, ArraySet)
    inputs = data.train.inputs.copy()
    inputs[7, 3] = np.nan
    wrong = ArraySet(inputs=inputs, targets=data.train.targets)
    with pytest.raises(TrainError, match=r"the inputs of the train data have nan in row 7, column 3, counted from 0"):
        run(found, tmp_path / "run", data=lambda: replace(data, train=wrong))
    assert not (tmp_path / "run" / "run.json").exists()
    pictures = np.ones((5, 2, 2), np.float32)
    pictures[4, 1, 0] = np.inf
    with pytest.raises(TrainError, match=r"the inputs of the test data have inf in row 4, place \[1, 0\]"):
        check_finite(ArraySet(inputs=pictures, targets=np.zeros(5, np.int64)), "test")


def test_a_run_whose_process_was_killed_is_shown_as_died(found: FoundApplication, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(found, folder)
    fields = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(fields | {"state": "running"}))

    def states() -> list[str]:
        shown = CliRunner().invoke(build(), ["runs", str(tmp_path), "--format", "json"], catch_exceptions=False).output
        return [each["state"] for each in json.loads(shown)]

    assert states() == ["died"]
    with owned(folder):
        assert states() == ["running"]
    # A copy of the records says no more than they do.
    (folder / ".lock").unlink()
    assert states() == ["running"]


def test_weights_that_are_not_finite_are_never_kept(found: FoundApplication, tmp_path: Path) -> None:
    calls: list[Tensor] = []

    def overflowing(outputs: Tensor, targets: Tensor) -> Tensor:
        # In steps, not when the validation is tried.
        calls.extend([outputs] if outputs.requires_grad else [])
        # A root at 0: a finite loss with a gradient that is not.
        root = (outputs * 0).square().sum().sqrt() if len(calls) > 4 else 0
        return nn.functional.cross_entropy(outputs, targets) + root

    with pytest.raises(TrainError, match=r"weights are not finite after step 5.*The last checkpoint is kept"):
        run(
            found,
            tmp_path / "run",
            loss=overflowing,
            checkpoints=CheckpointPolicy(every_steps=1),
            selection=Selection(every_epochs=99.0),
        )
    checkpoint = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.step == 4
    assert all(weight.whole().isfinite().all() for weight in checkpoint.state["model"].values())


def test_a_metric_that_is_nan_and_inputs_of_another_spec_are_refused(found: FoundApplication, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="the metric 'q', which selects the best weights, is NaN"):
        run(
            found,
            tmp_path / "nan",
            metrics={"q": lambda outputs, targets: float("nan")},
            selection=Selection(metric="q"),
        )
    data = found.recipe().data()
    assert isinstance(data.train, ArraySet)
    doubles = ArraySet(inputs=data.train.inputs.astype(np.float64), targets=data.train.targets)
    with pytest.raises(
        TrainError, match=r"train inputs are float64\[8\]; application 'interrupted' declares float32\[8\]"
    ):
        run(found, tmp_path / "spec", data=lambda: replace(data, train=doubles))
    assert not (tmp_path / "spec" / "run.json").exists()


def test_a_folder_that_cannot_be_made_is_said(found: FoundApplication, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match=r"file cannot be made \(File exists\); choose another folder"):
        run(found, tmp_path / "file")


def test_a_folder_that_cannot_be_written_is_said(found: FoundApplication, tmp_path: Path) -> None:
    (tmp_path / "begun" / ".metrics.jsonl").mkdir(parents=True)
    with pytest.raises(
        TrainError, match=r"begun cannot be written \(Is a directory\); free disk space or repair the folder"
    ):
        run(found, tmp_path / "begun")

    def full(outputs: Tensor, targets: Tensor) -> float:
        (tmp_path / "run" / "metrics.jsonl").unlink(missing_ok=True)
        (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
        return 1.0

    with pytest.raises(TrainError, match=r"run cannot be written \(No space left on device\)"):
        run(found, tmp_path / "run", metrics={"q": full})


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("")
    for name in ("app.py", "missing", "."):
        with pytest.raises(TrainError, match=r"holds no run \(no run.json\)"):
            read_run(tmp_path / name)


def test_metrics_may_be_numpys_numbers(found: FoundApplication, tmp_path: Path) -> None:
    result = run(found, tmp_path / "run", metrics={"q": lambda outputs, targets: np.float32(0.5)})
    assert result.metrics["q"] == 0.5


def test_a_checkpoint_of_another_network_is_refused(found: FoundApplication, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(re.sub(r"\b32\b", "16", APPLICATION))
    run(found, tmp_path / "run")
    with pytest.raises(TrainError, match=r"does not fit the network \(.*; resume with its network"):
        run(find_application(str(other)), tmp_path / "run")


def test_determinism_is_put_back_as_it_was(found: FoundApplication, tmp_path: Path) -> None:
    def settings() -> tuple[object, ...]:
        cudnn = torch.backends.cudnn
        return (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore[reportAttributeAccessIssue]
            torch.get_float32_matmul_precision(),
            (cudnn.allow_tf32, cudnn.benchmark),
            torch.get_rng_state().tolist(),
        )

    before = settings()
    run(found, tmp_path / "run", execution=StepExecution(threads=1), precision="tf32")
    assert settings() == before
    assert not torch.are_deterministic_algorithms_enabled()


SMALL = ArraySet(inputs=np.zeros((3, 1)), targets=np.zeros(3))
GOOD: dict[str, Any] = {"data": lambda: None, "loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD, "epochs": 1}

FRACTION: Any = 2.5


def recipe_with(**changes: Any) -> Recipe:
    nested = {name: value for name, value in changes.items() if "." in name}
    everything: dict[str, Any] = GOOD | {name: value for name, value in changes.items() if name not in nested}
    return with_overrides(Recipe(**everything), nested)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optimizer": "adam"}, r"optimizer 'adam', which is not a function; give Optimizer\("),
        ({"schedule": "cosine"}, r"schedule 'cosine', which is not a function; give Schedule\("),
        ({"ema": 0.999}, r"ema 0.999; give EMASettings\(...\), of penstock.train.recipe"),
        ({"selection": "accuracy"}, r"selection 'accuracy'; give Selection\(...\)"),
        ({"metrics": [accuracy]}, "metrics .*; give functions by name, such as {'accuracy': accuracy}"),
        ({"metrics": {"accuracy": 1.0}}, "metrics {'accuracy': 1.0}; give functions by name"),
        ({"steps": 3}, "epochs=1 and steps=3; give exactly one"),
        ({"epochs": None}, "epochs=None and steps=None"),
        ({"epochs": 0}, "epochs 0"),
        ({"batch_size": 0}, "batch_size 0; it must be a number above 0"),
        ({"execution.threads": -1}, "execution.threads -1"),
        ({"execution.threads": 0}, "execution.threads 0"),
        ({"checkpoints.every_steps": 0}, "checkpoints.every_steps 0"),
        ({"epochs": float("nan")}, "epochs nan"),
        ({"epochs": None, "steps": 2.5}, "steps 2.5; it must be a whole number"),
        ({"batch_size": None}, "batch_size None; it must be a whole number"),
        ({"batch_size": np.int64(8)}, r"batch_size np.int64\(8\); it must be an int, not a number of NumPy"),
        ({"epochs": "2"}, "epochs '2'; it must be a number above 0"),
        ({"loading": partial(Loading, workers=FRACTION)}, "loading.workers 2.5; it must be a whole number"),
        ({"execution": partial(StepExecution, threads=FRACTION)}, "execution.threads 2.5; it must be a whole number"),
        (
            {"checkpoints": partial(CheckpointPolicy, every_steps=FRACTION)},
            "every_steps 2.5; it must be a whole number",
        ),
        ({"epochs": float("inf")}, "epochs inf"),
        ({"seed": -1}, "seed -1; it must be from 0"),
        ({"seed": 10**23}, "it must be from 0 to"),
        ({"precision": "fp8"}, "precision 'fp8'; choose one of fp32, tf32, bf16, fp16"),
        ({"selection.metric": "accuracy"}, "selection.metric 'accuracy'; choose one of loss"),
        ({"selection.mode": "most"}, "selection.mode 'most'; choose one of max, min"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TrainError, match=sentence):
        recipe_with(**{name: value() if isinstance(value, partial) else value for name, value in changes.items()})


def test_a_recipe_counts_its_steps() -> None:
    assert recipe_with(epochs=2.5, batch_size=10).total_steps(100) == 25
    assert recipe_with(epochs=None, steps=7).total_steps(100) == 7


def test_data_needs_a_target_for_each_input() -> None:
    assert len(SMALL) == 3
    with pytest.raises(TrainError, match="3 inputs and 2 targets"):
        ArraySet(inputs=np.zeros((3, 1)), targets=np.zeros(2))


def test_accuracy_takes_labels_and_one_hot_targets() -> None:
    outputs = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    assert accuracy(outputs, torch.tensor([1, 1])) == 0.5
    assert accuracy(outputs, torch.tensor([[0, 1], [1, 0]])) == 1.0


@pytest.mark.parametrize("shape", [(4, 1), (4,)])
def test_accuracy_refuses_scores_of_no_classes(shape: tuple[int, ...]) -> None:
    # The highest of one score is always the first.
    with pytest.raises(TrainError, match="accuracy compares the scores of classes"):
        accuracy(torch.randn(shape), torch.ones(shape))


def test_a_recipe_may_calibrate(found: FoundApplication, tmp_path: Path) -> None:
    seen: list[tuple[Path, Predictions, Predictions]] = []

    def calibrate(folder: Path, validation: Predictions, test: Predictions) -> dict[str, Tensor]:
        seen.append((folder, validation, test))
        return {}

    result = run(found, tmp_path / "run", calibrate=calibrate)
    ((folder, validation, test),) = seen
    data = found.recipe().data()
    assert folder == tmp_path / "run"
    np.testing.assert_array_equal(validation.targets.numpy(), data.validation.targets)
    assert found.recipe().loss(*validation).item() == pytest.approx(result.metrics["loss"])
    assert data.test is None
    assert torch.equal(test.outputs, validation.outputs)
    with pytest.raises(TrainError, match=r"calibrate returns 'warmth' of shape \[\], which is no buffer"):
        run(found, tmp_path / "other", calibrate=lambda *_: {"warmth": torch.ones(())})
