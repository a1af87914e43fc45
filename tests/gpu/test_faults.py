"""What goes wrong on GPUs ends in time, with a sentence that says what to do, and leaves no process behind."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.processes import eventually, exists
from tests.support.training import APPLICATION, COMMAND, LIMIT_S, fields, penstock_run, workers_of

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.gpu
two = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

TIMEOUT_S = 12
LAUNCHED = "operation by operation"
# No validation comes between: all that processes wait for each other in are steps and looks at their losses.
QUIET = APPLICATION.replace("every_epochs=3", "every_epochs=1000")

# A batch's outputs of the first layer are 2^38 numbers, 1 TB: more than four GPUs have.
TOO_LARGE = '''"""Few weights, and a batch that fits nowhere."""

import numpy as np
import torch
from torch import nn

from penstock import Application, Recipe, TensorSpec
from penstock.train.recipe import ArraySet, Data

EXAMPLES = 1 << 18
x = np.zeros((EXAMPLES, 8), np.float32)
some = ArraySet(inputs=x, targets=np.zeros(EXAMPLES, np.int64))
app = Application(
    name="large",
    input=TensorSpec(dtype="float32", shape=(8,), meaning="eight numbers"),
    output=TensorSpec(dtype="float32", shape=(2,), meaning="two logits", name="logits"),
    model=lambda: nn.Sequential(nn.Linear(8, 1 << 20), nn.ReLU(), nn.Linear(1 << 20, 2)),
    recipe=Recipe(
        data=lambda: Data(train=some, validation=some),
        loss=nn.functional.cross_entropy,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        batch_size=EXAMPLES,
        steps=10,
    ),
)
'''


@contextmanager
def under_way(folder: Path, *options: object) -> Generator[tuple["subprocess.Popen[str]", dict[int, int], Path]]:
    """A run of two processes that has a checkpoint, and those processes by rank; nothing of it is left afterwards."""
    app, run = folder / "app.py", folder / "run"
    app.write_text(QUIET)
    (folder / "slow").touch()
    command = [*COMMAND, "train", app, "--out", run, "--gpus", 2, "--checkpoint-every-steps", 40, *options]
    workers: dict[int, int] = {}
    with (
        (folder / "said").open("w") as said,
        subprocess.Popen(list(map(str, command)), stdout=said, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            eventually(lambda: process.poll() is not None or bool(list(run.glob("checkpoints/step-*"))), within_s=120)
            assert process.poll() is None, process.communicate()[1]
            workers |= workers_of(run)
            assert workers.keys() == {0, 1}
            # Steps are captured by then: a sentence would say otherwise.
            shown = (folder / "said").read_text()
            assert "Training on 2 processes" in shown
            assert LAUNCHED not in shown
            yield process, workers, run
        finally:
            for each in workers.values():
                if exists(each):
                    os.kill(each, signal.SIGKILL)
            process.kill()


def all_ended(workers: dict[int, int]) -> bool:
    return not any(exists(each) for each in workers.values())


@two
@pytest.mark.parametrize("stopped", [1, 0])
def test_one_that_stops_coming_ends_the_run_in_time(tmp_path: Path, stopped: int) -> None:
    with under_way(tmp_path, "--timeout-s", TIMEOUT_S, "--steps", 100_000) as (process, workers, run):
        os.kill(workers[stopped], signal.SIGSTOP)
        began_s = time.monotonic()
        said = " ".join(process.communicate(timeout=LIMIT_S)[1].split())
        assert time.monotonic() - began_s < TIMEOUT_S + 15
        assert process.returncode == 2
        eventually(lambda: all_ended(workers), within_s=5)
    # In a step, or where the host looks at the losses of some.
    assert re.search(rf"rank {1 - stopped} of 2 made no progress for \d+ s in [^;]+; it is ended\.", said), said
    assert f"Go on with: penstock train --resume {run}" in said
    assert "Traceback" not in said
    assert "SIGABRT" not in said


@two
def test_one_that_is_killed_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    with under_way(tmp_path, "--steps", 400) as (process, workers, run):
        os.kill(workers[1], signal.SIGKILL)
        said = " ".join(process.communicate(timeout=LIMIT_S)[1].split())
        assert process.returncode == 2
        eventually(lambda: all_ended(workers), within_s=5)
    assert f"rank 1 of 2 (process {workers[1]}) was ended by SIGKILL; the others were ended." in said
    assert f"Go on with: penstock train --resume {run}" in said
    assert "Traceback" not in said
    (tmp_path / "slow").unlink()
    resumed = penstock_run("train", "--resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert LAUNCHED not in resumed.stdout
    found = fields(run)
    assert (found["state"], found["processes"], found["device"]) == ("finished", 2, "cuda")


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=two)])
def test_a_batch_that_fits_nowhere_is_refused_in_a_sentence(tmp_path: Path, gpus: int) -> None:
    app = tmp_path / "app.py"
    app.write_text(TOO_LARGE)
    done = penstock_run("train", app, "--out", tmp_path / "run", "--gpus", gpus)
    said = " ".join(done.stderr.split())
    assert done.returncode == 2, said
    assert "Traceback" not in said
    assert f"{'a step' if gpus == 1 else 'of 2'} needs more memory than {torch.cuda.get_device_name()} has" in said
    assert "lower the batch size (batch_size=262,144)" in said
