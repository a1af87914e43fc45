"""Placements and recipe of `acceptance.parity.Pictures`, for tests that compare the steps of two configurations."""

from typing import Any

import numpy as np
from torch.optim import SGD

from penstock.train.parallel.losses import CrossEntropy
from penstock.train.placement import Placement, Placements
from penstock.train.recipe import ArraySet, Data, Parallel, Recipe

TENSOR_PARALLEL = {
    "classifier.1": Placement(kind="column-parallel"),
    "classifier.4": Placement(kind="row-parallel"),
    "head": Placement(kind="vocab-parallel"),
}


def pictures_recipe(placements: Placements, *, rate: float, **changes: Any) -> Recipe:
    """Train in bf16, by SGD with momentum; the test passes the examples of each step itself."""
    nothing = ArraySet(inputs=np.zeros(1), targets=np.zeros(1))
    return Recipe(
        data=lambda: Data(train=nothing, validation=nothing),
        loss=CrossEntropy(0.1),
        optimizer=lambda parameters: SGD(parameters, lr=rate, momentum=0.9),
        parallel=Parallel(placements=placements, gradient_precision="bf16"),
        precision="bf16",
        **changes,
    )
