"""Training with several named tensors of varying length on a GPU: captured steps, and resident examples."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.train.data.examples import ArraySet
from penstock.train.data.loader import ReadingLoader
from penstock.train.data.resident import Resident, ResidentLoader
from penstock.train.data.sampler import one_pass
from penstock.train.data.trees import leaves
from penstock.train.numerics import numerics
from penstock.train.overrides import with_overrides
from penstock.train.parallel.world import World
from penstock.train.recipe import Data, EMASettings, Recipe, StepExecution
from penstock.train.trainer import Trainer

pytestmark = pytest.mark.gpu

STEPS = 12


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner, self.out = nn.Embedding(10, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = self.inner(self.embed(ids)).tanh()
        return {"label": self.out((hidden * mask[..., None]).sum(1)), "tags": self.out(hidden)}


def loss_of(outputs: Any, targets: Any) -> Tensor:
    tags = nn.functional.cross_entropy(outputs["tags"].flatten(0, 1), targets["tags"].flatten())
    return nn.functional.cross_entropy(outputs["label"], targets["label"]) + tags


def texts(count: int) -> ArraySet:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 10, rng.integers(1, 30)) for _ in range(count)]
    return ArraySet(
        inputs={"ids": ids, "mask": [np.ones(len(row), np.float32) for row in ids]},
        targets={"label": np.array([row[0] % 2 for row in ids]), "tags": [row % 2 for row in ids]},
    )


def recipe(**changes: Any) -> Recipe:
    examples = texts(200)
    made = Recipe(
        data=lambda: Data(train=examples, validation=examples),
        loss=loss_of,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        batch_size=16,
        steps=STEPS,
        # The gradient of an embedding has no deterministic algorithm in each release.
        execution=StepExecution(deterministic=False),
    )
    return with_overrides(made, changes)


@pytest.mark.parametrize("changes", [{}, {"execution.accumulation_steps": 2, "ema": EMASettings(decay=0.9)}], ids=str)
def test_a_captured_step_over_trees_is_the_step(changes: dict[str, Any]) -> None:
    def losses(*, graph: bool) -> list[float]:
        asked = recipe(**changes, **{"execution.graph": graph})
        train = asked.data().train
        with numerics(asked):
            inputs = train.empty(2)
            train.read(np.arange(2), np.zeros(2, np.uint64), inputs)
            world = World(device=torch.device("cuda"))
            trainer = Trainer(Scores(), asked, STEPS, world, inputs=inputs, record=train.record)
            with trainer.feed(train, 0, lambda notice: None) as feed:
                found = [trainer.step(next(feed), step).item() for step in range(STEPS)]
            assert trainer.steps.is_captured == graph
            trainer.close()
        return found

    # Captured batches are padded to the longest of the set, others to the longest of the batch.
    assert losses(graph=True) == pytest.approx(losses(graph=False), rel=1e-3)


@pytest.mark.parametrize("to_max", [True, False])
def test_resident_trees_are_those_that_are_read(to_max: bool) -> None:
    device, examples = torch.device("cuda"), texts(50)
    read = ReadingLoader(examples, one_pass(50, 8), device=device, workers=2, to_max=to_max)
    kept = ResidentLoader(Resident(examples, device, 2), one_pass(50, 8), to_max=to_max)
    with read, kept:
        for one, other in zip(read, kept, strict=True):
            for left, right in zip(leaves(tuple(one)), leaves(tuple(other)), strict=True):
                assert left.device.type == right.device.type == "cuda"
                assert torch.equal(left, right)


def test_fit_on_a_gpu_is_fit_on_a_cpu() -> None:
    def loss_on(device: str) -> float:
        fitted = penstock.fit(
            Scores(),
            texts(400),
            validation=texts(100),
            loss=loss_of,
            device=device,
            epochs=3,
            batch_size=32,
            quiet=True,
        )
        return fitted.metrics["loss"]

    assert loss_on("cuda") == pytest.approx(loss_on("cpu"), rel=1e-3)
