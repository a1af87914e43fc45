"""AlexNet on pictures of noise, as `python -m benchmarks.acceptance train` lays it out, for profiles of its step.

penstock train benchmarks/apps/alexnet.py --out runs/alexnet --gpus 2 --profile 10
"""

import numpy as np
import torch

from penstock import Application, Recipe, TensorSpec
from penstock.models.alexnet import SIDE, AlexNet
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.placement import Placement
from penstock.train.recipe import ArraySet, Data, Parallel, Selection, StepExecution

CLASSES = 1000


def noise(count: int) -> ArraySet:
    """Pictures `[count, 224, 224, 3]` that show nothing."""
    rng = np.random.default_rng(count)
    pixels = rng.integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)
    return ArraySet(inputs=pixels, targets=rng.integers(0, CLASSES, count))


app = Application(
    name="alexnet-noise",
    input=TensorSpec(dtype="uint8", shape=(SIDE, SIDE, 3), meaning="a picture: red, green, blue, 0..255"),
    output=TensorSpec(dtype="float32", shape=(CLASSES,), meaning="score of each class", name="scores"),
    model=AlexNet,
    recipe=Recipe(
        data=lambda: Data(train=noise(1024), validation=noise(32)),
        loss=CrossEntropy(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4),
        batch_size=256,
        steps=400,
        selection=Selection(every_epochs=100),
        precision="bf16",
        execution=StepExecution(master_weights=True, deterministic=False, compile=True),
        parallel=Parallel(
            gradient_precision="bf16",
            placements={
                "classifier.1": Placement(kind="column-parallel"),
                "classifier.4": Placement(kind="row-parallel"),
            },
        ),
    ),
)
