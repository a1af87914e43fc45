"""Training from pictures on disk: the same whoever reads them, and what is damaged is named and counted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.core.application import Application
from penstock.core.errors import BadExample, TrainError
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.spec import TensorSpec
from penstock.runtime.load import as_found
from penstock.train.checkpoint.format import newest_checkpoint
from penstock.train.data.augment import in_turn, mixup, random_flip
from penstock.train.data.examples import Examples
from penstock.train.data.image_folder import ImageFolder
from penstock.train.data.shard_writer import write_shards
from penstock.train.data.shards import Shards
from penstock.train.interrupt import Interrupt
from penstock.train.overrides import with_overrides
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.recipe import CheckpointPolicy, Data, Loading, Recipe, StepExecution, accuracy
from penstock.train.report.run_log import read_metrics
from penstock.train.run import RunResult, train
from penstock.train.step.schedules import warm_up_cosine
from tests.support.pictures import COLOUR, picture_folder

SCORES = TensorSpec(dtype="float32", shape=(3,), meaning="scores", name="scores")


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16 * 20 * 3, 3)

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        return self.layer(pixels_BHWC.float().flatten(1) / 255)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return picture_folder(tmp_path / "photos", per_class=6)


def recipe_of(examples: Examples, held_out: Examples, **changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "data": lambda: Data(train=examples, validation=held_out),
        "loss": CrossEntropy(0.1),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, 0.02, momentum=0.9),
        "schedule": warm_up_cosine(0.1),
        "metrics": {"accuracy": accuracy},
        "augment": in_turn(random_flip(), mixup(3)),
        "batch_size": 10,
        "steps": 12,
        "execution": StepExecution(threads=1),
    }
    return Recipe(**(fields | changes))


def run(folder: Path, recipe: Recipe, *, quiet: bool = True) -> RunResult:
    application = Application(name="animals", input=COLOUR, output=SCORES, model=Linear)
    found: FoundApplication = as_found(application)
    return train(found, folder, recipe, overrides={}, quiet=quiet)


def pictures(root: Path) -> tuple[ImageFolder, ImageFolder]:
    return ImageFolder(root, COLOUR, random=True), ImageFolder(root, COLOUR)


def fields(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def test_what_is_learned_does_not_depend_on_the_workers(root: Path, tmp_path: Path) -> None:
    recipes = [recipe_of(*pictures(root), loading=Loading(workers=workers)) for workers in (1, 4)]
    runs = [run(tmp_path / str(each.loading.workers), each) for each in recipes]
    assert runs[0].parameter_hash == runs[1].parameter_hash
    assert runs[0].metrics == runs[1].metrics
    lines = read_metrics(tmp_path / "4")
    assert all(0 <= line["waited_s"] <= line["seconds"] + 1 for line in lines)
    assert fields(tmp_path / "4")["bad_examples"] == {}


def test_a_damaged_picture_stops_the_run_or_is_replaced(root: Path, tmp_path: Path) -> None:
    (root / "dogs" / "3.jpg").write_bytes(b"\xff\xd8 not a picture")
    examples, held_out = pictures(root)
    with pytest.raises(BadExample, match=r"dogs/3.jpg cannot be read"):
        run(tmp_path / "stopped", recipe_of(examples, held_out))
    results = [
        run(
            tmp_path / str(workers),
            recipe_of(
                examples,
                held_out,
                loading=Loading(workers=workers, bad_examples="skip"),
            ),
        )
        for workers in (1, 3)
    ]
    assert results[0].parameter_hash == results[1].parameter_hash
    counted = fields(tmp_path / "1")["bad_examples"]
    assert counted == fields(tmp_path / "3")["bad_examples"]
    assert list(counted) == ["dogs/3.jpg"]
    assert counted["dogs/3.jpg"] >= 12 * 10 // 18


@pytest.mark.thorough
def test_a_run_that_goes_on_counts_on(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "dogs" / "3.jpg").unlink()
    (root / "dogs" / "3.jpg").symlink_to("nowhere")
    recipe = recipe_of(
        *pictures(root), loading=Loading(bad_examples="skip"), checkpoints=CheckpointPolicy(every_steps=4)
    )
    whole = run(tmp_path / "whole", recipe)
    asked = iter([False] * 2 + [True] * 999)
    with monkeypatch.context() as patch:
        requested = property(lambda self: next(asked), lambda self, value: None)
        patch.setattr(Interrupt, "requested", requested, raising=False)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", recipe)
    checkpoint = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    assert 0 < checkpoint.step < 12
    resumed = run(tmp_path / "run", recipe)
    assert resumed.parameter_hash == whole.parameter_hash
    assert fields(tmp_path / "run")["bad_examples"] == fields(tmp_path / "whole")["bad_examples"] != {}


@pytest.mark.thorough
def test_shards_teach_what_the_pictures_would_have(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = ImageFolder(root, COLOUR)
    write_shards(held_out, tmp_path / "shards", classes=held_out.classes, shard_bytes=5000)
    shards = Shards(tmp_path / "shards")
    results = [run(tmp_path / name, recipe_of(part, part)) for name, part in (("files", held_out), ("shards", shards))]
    assert results[0].parameter_hash == results[1].parameter_hash
    (tmp_path / "shards" / "00001.npy").unlink()
    damaged = Shards(tmp_path / "shards")
    run(tmp_path / "skipped", recipe_of(damaged, held_out, loading=Loading(bad_examples="skip")))
    assert list(fields(tmp_path / "skipped")["bad_examples"]) == ["00001.npy"]
    # Of the validation set too, and by name.
    capsys.readouterr()
    run(tmp_path / "validated", recipe_of(held_out, damaged, loading=Loading(bad_examples="skip")), quiet=False)
    assert list(fields(tmp_path / "validated")["bad_examples"]) == ["00001.npy"]
    said = capsys.readouterr().out
    assert "It is replaced by another example." in said
    assert "1 bad example or file was replaced" in said


def test_pictures_of_another_spec_than_the_applications_are_refused(root: Path, tmp_path: Path) -> None:
    grey = ImageFolder(root, TensorSpec(dtype="uint8", shape=(16, 20), meaning="grey"))
    with pytest.raises(TrainError, match=r"the train inputs are uint8\[16, 20\]; application 'animals' declares"):
        run(tmp_path / "run", recipe_of(grey, grey))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"loading.workers": 0}, "workers 0"),
        ({"loading.bad_examples": "hide"}, "bad_examples 'hide'; choose one of stop, skip"),
    ],
)
def test_a_recipe_says_only_what_can_be_done(root: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TrainError, match=sentence):
        with_overrides(recipe_of(*pictures(root)), changes)
