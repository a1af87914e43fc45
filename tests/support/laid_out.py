"""How `penstock.bench.parity.Pictures` is laid over processes and trained, where steps of two ways are compared."""

from typing import Any

import numpy as np
from torch.optim import SGD

from penstock.train.losses import CrossEntropy
from penstock.train.placements import Placement, Placements
from penstock.train.recipe import ArraySet, Data, Recipe

COLUMNS_AND_ROWS = {
    "classifier.1": Placement(kind="columns"),
    "classifier.4": Placement(kind="rows"),
    "head": Placement(kind="classes"),
}


def pictures_recipe(placements: Placements, *, rate: float, **changes: Any) -> Recipe:
    """In bf16, by SGD with momentum, of examples that whoever takes the steps has."""
    nothing = ArraySet(inputs=np.zeros(1), targets=np.zeros(1))
    return Recipe(
        data=lambda: Data(train=nothing, validation=nothing),
        loss=CrossEntropy(0.1),
        optimizer=lambda parameters: SGD(parameters, lr=rate, momentum=0.9),
        placements=placements,
        gradient_precision="bf16",
        precision="bf16",
        **changes,
    )
