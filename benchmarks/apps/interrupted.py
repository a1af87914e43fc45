"""A small network for trying to interrupt.

It has every state that could be lost: dropout, batch norm, momentum, a schedule, augmentation.
"""

import numpy as np
import torch
from torch import Tensor, nn

from penstock import Application, Recipe, TensorSpec
from penstock.train.recipe import ArraySet, Data, Selection, StepExecution


class Net(nn.Module):
    """Two layers, with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[B, 2]` of `[B, 8]`."""
        return self.layers(x)


def data() -> Data:
    """Points, labelled by the sign of a product."""
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
