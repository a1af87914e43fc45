"""A small network for training on several processes, and its runs from the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "penstock"]
LIMIT_S = 240
ROOT = Path(__file__).parents[2]
# Nothing in it depends on how many processes there are but the rounding of sums.
APPLICATION = '''"""A small network for trying several processes."""

import os
import time

import numpy as np
import torch
from torch import nn

from penstock import Application, Recipe, TensorSpec
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.placement import Placement
from penstock.train.recipe import ArraySet, Data, Parallel, Selection, StepExecution, accuracy


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4)
        )

    def forward(self, x):
        return self.layers(x)


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 8)).astype(np.float32)
    y = (x[:, 0] > 0) * 2 + (x[:, 1] * x[:, 2] > 0)
    return Data(train=ArraySet(inputs=x[:200], targets=y[:200]), validation=ArraySet(inputs=x[200:], targets=y[200:]))


def slowed(x, y, generator):
    # So that there is time to disturb it.
    time.sleep(0.1 * os.path.exists(os.path.join(os.path.dirname(__file__), "slow")))
    return x, y


recipe = Recipe(
    data=data,
    loss=CrossEntropy(0.1),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    schedule=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps + 1),
    metrics={"accuracy": accuracy},
    augment=slowed,
    batch_size=30,
    steps=60,
    clip_norm=0.5,
    selection=Selection(every_epochs=3),
    execution=StepExecution(threads=1),
    parallel=Parallel(
        placements={
            "layers.0": Placement(kind="fully-sharded"),
            "layers.2": Placement(kind="column-parallel"),
            "layers.4": Placement(kind="row-parallel"),
            "layers.6": Placement(kind="vocab-parallel"),
        }
    ),
)

app = Application(
    name="together",
    input=TensorSpec(dtype="float32", shape=(8,), meaning="eight numbers"),
    output=TensorSpec(dtype="float32", shape=(4,), meaning="four logits", name="logits"),
    model=":Net",
    recipe=":recipe",
)
'''


def penstock_run(*arguments: object, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command of Penstock in a folder."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )


def fields(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def losses(run: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["train_loss"], line["validation_loss"]) for line in lines]


def workers_of(run: Path) -> dict[int, int]:
    """Find the processes that train into a folder, by rank."""
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            variables = (entry / "environ").read_bytes().split(b"\0") if str(run).encode() in words else []
        except OSError:
            continue
        found |= {int(text.removeprefix(b"RANK=")): int(entry.name) for text in variables if text.startswith(b"RANK=")}
    return found
