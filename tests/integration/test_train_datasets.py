"""Training on a Hugging Face dataset of JPEG from the command line: killed, gone on, and refused when it changed."""

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from tests.support.pictures import smooth

pytestmark = pytest.mark.thorough

COMMAND = [sys.executable, "-m", "penstock", "train"]
COUNT, STEPS = 48, 160
APP = """
from pathlib import Path

import torch
from datasets import load_from_disk
from torch import nn

from penstock import Application, Recipe, TensorSpec
from penstock.train.data.dataset_examples import DatasetExamples
from penstock.train.recipe import Data

PICTURE = TensorSpec(dtype="uint8", shape=(16, 16, 3), meaning="waves")
LABELS = ("few", "many", "more")
DATASET = Path(__file__).parent / "dataset"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(768, 3))

    def forward(self, pixels):
        return self.layers(pixels.float() / 255)


def data():
    rows = load_from_disk(str(DATASET))
    return Data(
        train=DatasetExamples(rows, PICTURE, inputs="image", targets="label", random=True, classes=LABELS),
        validation=DatasetExamples(rows.select(range(8)), PICTURE, inputs="image", targets="label", classes=LABELS),
    )


app = Application(
    name="waves",
    input=PICTURE,
    output=TensorSpec(dtype="float32", shape=(3,), meaning="scores", labels=LABELS),
    model=Net,
    recipe=Recipe(
        data=data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        batch_size=16,
        epochs=40,
    ),
)
"""


def write_dataset(folder: Path, changed: int | None = None) -> None:
    """Save pictures as JPEG in an Arrow table; one of them may be another picture."""
    rows: dict[str, list[Any]] = {"image": [], "label": []}
    for row in range(COUNT):
        sink = io.BytesIO()
        Image.fromarray(smooth(row + 1000 * (row == changed), 40, 50)).save(sink, "JPEG")
        rows["image"].append({"bytes": sink.getvalue(), "path": None})
        rows["label"].append(row % 3)
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["few", "many", "more"])}
    )
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder))


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("app") / "app.py"
    file.write_text(APP)
    write_dataset(file.parent / "dataset")
    return file


def options(app: Path, run: Path, *more: object) -> list[str]:
    return [*COMMAND, *map(str, (app, "--out", run, "--checkpoint-every-steps", 20, *more))]


def trained(app: Path, run: Path, *more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(options(app, run, *more), capture_output=True, text=True, timeout=120, check=False)


def fields(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def killed(app: Path, run: Path) -> None:
    with subprocess.Popen(options(app, run, "--steps", STEPS), stdout=subprocess.DEVNULL, text=True) as process:
        while not list(run.glob("checkpoints/step-*")):
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_a_killed_training_ends_with_the_same_parameters(app: Path) -> None:
    undisturbed, run = app.parent / "undisturbed", app.parent / "killed"
    assert trained(app, undisturbed, "--steps", STEPS).returncode == 0
    killed(app, run)
    # The number of threads changes nothing.
    resumed = trained(app, run, "--steps", STEPS, "--workers", 3)
    assert resumed.returncode == 0, resumed.stderr
    assert fields(run)["parameter_hash"] == fields(undisturbed)["parameter_hash"]
    assert fields(run)["data"] == fields(undisturbed)["data"]
    assert fields(run)["reading"]["threads"] == 3


@pytest.mark.slow
def test_two_processes_that_stop_and_go_on_end_with_the_same_parameters(app: Path) -> None:
    whole, run = app.parent / "whole", app.parent / "parts"
    assert trained(app, whole, "--steps", 60, "--processes", 2).returncode == 0
    assert trained(app, run, "--steps", 20, "--processes", 2).returncode == 0
    again = trained(app, run, "--steps", 60, "--processes", 2)
    assert again.returncode == 0, again.stderr
    assert fields(run)["processes"] == 2
    assert fields(run)["parameter_hash"] == fields(whole)["parameter_hash"]


def test_a_dataset_that_changed_under_a_run_is_refused(app: Path, tmp_path: Path) -> None:
    copy, run = tmp_path / "app.py", tmp_path / "run"
    copy.write_text(APP)
    write_dataset(tmp_path / "dataset")
    assert trained(copy, run, "--steps", 20).returncode == 0
    (tmp_path / "dataset").rename(tmp_path / "before")
    write_dataset(tmp_path / "dataset", changed=17)
    refused = trained(copy, run, "--steps", 40)
    said = " ".join(refused.stderr.split())
    assert refused.returncode == 2
    assert f"the train examples changed since the run in {run} began (the column 'image' changed" in said
    assert "--accept-changed-data" in said
    accepted = trained(copy, run, "--steps", 40, "--accept-changed-data")
    assert accepted.returncode == 0, accepted.stderr
    # The accepted data are those of the run from then on.
    assert trained(copy, run, "--steps", 60).returncode == 0
