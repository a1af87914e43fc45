"""The breakdown of real steps on a GPU: captured in a CUDA graph or not, and of a run by `penstock.fit`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.train.parallel.world import World
from penstock.train.recipe import ArraySet, Data, Recipe, StepExecution
from penstock.train.trainer import Trainer
from tests.support.profiled import profiled

pytestmark = pytest.mark.gpu


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


@pytest.mark.parametrize("graph", [True, False])
def test_steps_on_a_gpu_add_up(tmp_path: Path, graph: bool) -> None:
    rng = np.random.default_rng(0)
    examples = ArraySet(
        inputs=rng.normal(size=(5000, 512)).astype(np.float32), targets=rng.integers(0, 10, 5000).astype(np.int64)
    )
    recipe = Recipe(
        data=lambda: Data(train=examples, validation=examples),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01),
        batch_size=2048,
        steps=99,
        execution=StepExecution(deterministic=False, graph=graph),
    )
    trainer = Trainer(network(), recipe, 99, World(device=torch.device("cuda", 0)), inputs=examples.inputs[:2])
    with trainer.feed(examples, 0, print) as feed:
        breakdown = profiled(trainer, feed, 10, tmp_path)
    assert breakdown is not None
    assert trainer.steps.is_captured == graph
    print(breakdown.describe())
    (steps,) = breakdown.shares
    assert all(share.wall_ns == sum(share.parts.values()) for share in steps)
    # Without kernels, or with those of other steps, that would not be so.
    assert breakdown.undisturbed_ms is not None
    assert 0.5 < breakdown.step_ms / breakdown.undisturbed_ms < (1.5 if graph else 10)
    assert breakdown.fraction("compute") > (0.3 if graph else 0.02)
    assert max(share.wall_ns for share in steps) < 5 * min(share.wall_ns for share in steps)
    assert json.loads((tmp_path / "step-time.json").read_text())["steps"] == 10


def test_fit_takes_the_gpu_and_says_its_mfu() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5000, 512))
    fitted = penstock.fit(
        network(), (x, (x[:, 0] > 0).astype(int)), validation=(x, (x[:, 0] > 0).astype(int)), epochs=5
    )
    assert next(fitted.network.parameters()).is_cuda
    assert fitted.metrics["accuracy"] > 0.9
    known = any(name in torch.cuda.get_device_name() for name in ("H100", "H200", "A100"))
    assert all(("mfu" in line) == known and 0 < line.get("mfu", 0.5) < 1 for line in fitted.history)
