"""The textbook's multilayer perceptron on handwritten digits, as a user's own application.

penstock train examples/textbook/app.py --out runs/textbook
penstock serve runs/textbook/bundle
"""

from functools import partial

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.nn import functional

from penstock import Application, Recipe, TensorSpec
from penstock.models.mlp import MLP, Activation
from penstock.train.recipe import ArraySet, Data, StepExecution, accuracy

RATE = 0.1


def digits() -> Data:
    """Two thirds of scikit-learn's 8 x 8 digits to learn from, a third held out."""
    pixels, labels = load_digits(return_X_y=True)
    raw = pixels.reshape(-1, 8, 8).astype(np.uint8)
    train, held_out = train_test_split(np.arange(len(raw)), test_size=1 / 3, stratify=labels, random_state=0)
    labels = labels.astype(np.int64)
    return Data(
        train=ArraySet(inputs=raw[train], targets=labels[train]),
        validation=ArraySet(inputs=raw[held_out], targets=labels[held_out]),
    )


def network(activation: Activation = "relu") -> MLP:
    """64 inputs, two hidden layers of 64 units, ten outputs."""
    return MLP(inputs=64, hidden=(64, 64), classes=10, activation=activation, scale=16)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """How surprised the network is by the right digit."""
    return functional.cross_entropy(logits, labels)


def mean_square(outputs: Tensor, labels: Tensor) -> Tensor:
    """How far the outputs are from 1 for the right digit and 0 for the others."""
    return functional.mse_loss(outputs, functional.one_hot(labels, 10).float())


recipe = Recipe(
    data=digits,
    loss=cross_entropy,
    # Momentum carries a step on in the direction of the last ones; weight decay pulls every weight towards 0.
    optimizer=partial(torch.optim.SGD, lr=RATE, momentum=0.9, weight_decay=1e-4),
    # The schedule lets the rate fall to 0 along a half cosine.
    schedule=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
    metrics={"accuracy": accuracy},
    batch_size=64,
    epochs=60,
    execution=StepExecution(threads=1),
)

app = Application(
    name="textbook",
    description="Reads an 8 x 8 digit with a multilayer perceptron.",
    input=TensorSpec(dtype="uint8", shape=(8, 8), meaning="grey image of one digit", units="0..16", name="image"),
    output=TensorSpec(
        dtype="float32",
        shape=(10,),
        meaning="probability of each digit",
        labels=tuple("0123456789"),
        name="probabilities",
    ),
    model=":network",
    recipe=":recipe",
)
