"""Parameter hashes of runs that are killed at a random moment and resumed."""

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from penstock.core.errors import BenchError

KILLS = 20
STEPS = 600
SEED = 0

# Small, with every state that could be lost: dropout, batch norm, momentum, a schedule, augmentation.
APPLICATION = '''"""A small network for trying to interrupt."""

import numpy as np
import torch
from torch import nn

from penstock import Application, Recipe, TensorSpec
from penstock.train.recipe import ArraySet, Data, Selection, StepExecution


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))

    def forward(self, x):
        return self.layers(x)


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 8)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
    return Data(train=ArraySet(inputs=x[:200], targets=y[:200]), validation=ArraySet(inputs=x[200:], targets=y[200:]))


recipe = Recipe(
    data=data,
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    schedule=lambda optimizer, steps: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps + 1),
    augment=lambda x, y, generator: (x + 0.1 * torch.randn(x.shape, generator=generator).to(x.device), y),
    batch_size=32,
    epochs=10,
    selection=Selection(every_epochs=10),
    execution=StepExecution(threads=1),
)

app = Application(
    name="interrupted",
    input=TensorSpec(dtype="float32", shape=(8,), meaning="eight numbers"),
    output=TensorSpec(dtype="float32", shape=(2,), meaning="two logits", name="logits"),
    model=":Net",
    recipe=":recipe",
)
'''


def same_hash() -> list[float]:
    """Return 1 for each killed and resumed run with the hash of an uninterrupted run, 0 for each other."""
    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "app.py").write_text(APPLICATION)
        uninterrupted = _hash_of(_start(folder, "uninterrupted"), folder / "uninterrupted")
        return [float(_killed_hash(folder, f"killed-{index}", rng) == uninterrupted) for index in range(KILLS)]


def _killed_hash(folder: Path, name: str, rng: random.Random) -> str:
    run = folder / name
    process = _start(folder, name)
    # Any moment after the first checkpoint: in a step, in a validation, in the write of a checkpoint.
    while not list(run.glob("checkpoints/step-*")):
        if process.poll() is not None:
            raise BenchError(f"the training ended with status {process.returncode} before its first checkpoint.")
        time.sleep(0.005)
    time.sleep(rng.uniform(0.0, 0.5))
    process.send_signal(signal.SIGKILL)
    process.wait()
    if (run / "bundle").exists():
        raise BenchError("the run finished before it was killed; raise STEPS.")
    return _hash_of(_penstock("train", "--resume", str(run)), run)


def _start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    steps = ("--steps", str(STEPS), "--checkpoint-every-steps", "25")
    return _penstock("train", str(folder / "app.py"), "--out", str(folder / name), *steps)


def _penstock(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "penstock", *arguments], stdout=subprocess.DEVNULL)


def _hash_of(process: subprocess.Popen[bytes], run: Path) -> str:
    if process.wait():
        raise BenchError(f"the training ended with status {process.returncode}; run it by hand to see why.")
    return json.loads((run / "run.json").read_text())["parameter_hash"]
