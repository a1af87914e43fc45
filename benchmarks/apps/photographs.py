"""ResNet-50 on a folder of JPEG photographs, as it is trained on ImageNet: what its steps wait for.

PHOTOGRAPHS=FOLDER penstock train benchmarks/apps/photographs.py --out runs/photographs

The folder has a folder of pictures for each class; there may be fewer classes than the network has outputs, 1000.
"""

import os

import numpy as np
import torch

from penstock import Application, Recipe, TensorSpec
from penstock.core.errors import TrainError
from penstock.models.resnet import ResNet50
from penstock.train.data.image_folder import ImageFolder
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.recipe import ArraySet, Data, Selection, StepExecution

SIDE, CLASSES = 224, 1000
FOLDER = "PHOTOGRAPHS"
# Between validations, whose records hold the seconds of waiting so far: 100 steps, if there are 4,096 photographs.
EPOCHS = 6.25

picture = TensorSpec(dtype="uint8", shape=(SIDE, SIDE, 3), meaning="a photograph: red, green, blue, 0..255")


def data() -> Data:
    """Random crops of the photographs; the validation set is of noise, since only the steps are measured."""
    folder = os.environ.get(FOLDER)
    if not folder:
        raise TrainError(f"{FOLDER} is not set; set it to a folder with a folder of pictures for each class.")
    noise = np.random.default_rng(0).integers(0, 256, (32, SIDE, SIDE, 3), dtype=np.uint8)
    validation = ArraySet(inputs=noise, targets=np.zeros(len(noise), np.int64))
    return Data(train=ImageFolder(folder, picture, random=True), validation=validation)


app = Application(
    name="photographs",
    input=picture,
    output=TensorSpec(dtype="float32", shape=(CLASSES,), meaning="score of each class", name="scores"),
    model=ResNet50,
    recipe=Recipe(
        data=data,
        loss=CrossEntropy(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-5),
        batch_size=256,
        steps=600,
        selection=Selection(every_epochs=EPOCHS),
        precision="bf16",
        execution=StepExecution(deterministic=False, compile=True),
    ),
)
