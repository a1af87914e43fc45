"""Conversion of arrays and tensors to examples, with checks."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.errors import TrainError
from penstock.core.spec import Array
from penstock.train.data.examples import ArraySet, Examples
from penstock.train.data.loader import first_batch

# n examples

TRIED = 2
# The label that cross-entropy ignores.
IGNORED = -100


def examples_of(given: Any, name: str, network: nn.Module) -> Examples:
    """Convert `(X, y)` to examples; `Examples` are returned unchanged.

    Floats get the dtype of the network's weights, other targets int64; other inputs keep their dtype.

    Args:
        given: `Examples`, or inputs `[n, ...]` and targets `[n]` or `[n, ...]`, NumPy arrays or what can become one,
            tensors of any device included.
        name: The name of the set in messages.
        network: The network to train.

    Raises:
        TrainError: The type is wrong, there are no examples, the lengths differ, or a number is not finite.
    """
    if isinstance(given, Examples):
        if not len(given):
            raise TrainError(f"{name} has no examples; give at least one.")
        return given
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TrainError(f"{name} is {_described(given)}; give a pair (X, y) of arrays, or Examples.")
    floating = next((one.dtype for one in network.parameters() if one.is_floating_point()), torch.float32)
    # A half has no NumPy type of its own in each case, and autocast makes them anyway.
    wanted = np.dtype(np.float64 if floating == torch.float64 else np.float32)
    inputs = _array(given[0], f"X of {name}", wanted)
    targets = _array(given[1], f"y of {name}", wanted)
    if len(inputs) != len(targets):
        raise TrainError(
            f"X of {name} has {len(inputs):,} examples and y has {len(targets):,}; give one target for each input."
        )
    if targets.dtype.kind in "biu":
        targets = targets.astype(np.int64)
    return ArraySet(inputs=inputs, targets=targets)


def check_fit(network: nn.Module, examples: Examples, loss: Any, name: str) -> None:
    """Check on a few examples that a network and a loss accept them, before the training.

    Args:
        network: On its device; it is not changed.
        examples: The set.
        loss: `loss(outputs, targets)`.
        name: The name of the set in messages.

    Raises:
        TrainError: They are not accepted, or the loss is not one number.
    """
    device = next(network.parameters()).device
    inputs, targets = (part.to(device) for part in first_batch(examples, TRIED))
    what = _shape(inputs)
    before = network.training
    network.eval()
    try:
        with torch.no_grad():
            outputs = network(inputs)
            if not isinstance(outputs, Tensor):
                raise TrainError(f"the network gives a {type(outputs).__name__}; it must give one tensor.")
            of = f"outputs {_shape(outputs)} and targets {_shape(targets)}"
            squares = loss is nn.functional.mse_loss or isinstance(loss, nn.MSELoss)
            if squares and outputs.shape != targets.shape:
                raise TrainError(f"MSE needs equal shapes, and there are {of}; reshape y.")
            _check_labels(examples, outputs, loss, name)
            found = loss(outputs, targets)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        said = " ".join(str(error).split())[:300]
        raise TrainError(
            f"the network or the loss does not take {what} of {name}, targets {_shape(targets)}: {said}"
        ) from None
    finally:
        network.train(before)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise TrainError(f"the loss of {of} is {_described(found)}; it must be one number, the mean over the batch.")


def _check_labels(examples: Examples, outputs: Tensor, loss: Any, name: str) -> None:
    """Refuse labels that are not a class: on a GPU they would abort the process."""
    if loss is not nn.functional.cross_entropy or not isinstance(examples, ArraySet) or outputs.ndim < 2:
        return
    labels, classes = examples.targets, outputs.shape[1]
    if labels.dtype.kind != "i":
        return
    labels = labels[labels != IGNORED]
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        raise TrainError(
            f"y of {name} has labels from {labels.min()} to {labels.max()}, and the network gives {classes} scores; "
            f"give labels from 0 to {classes - 1}, or a network with more outputs."
        )


def _array(given: Any, name: str, floating: np.dtype[Any]) -> Array:
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        given = (given.float() if given.dtype == torch.bfloat16 else given).numpy()
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise TrainError(f"{name} is no array ({error}); give equally long rows.") from None
    if array.dtype.kind not in "fbiu":
        raise TrainError(f"{name} is {array.dtype}; give numbers, a float or an integer type.")
    if array.ndim == 0 or len(array) == 0:
        raise TrainError(f"{name} has the shape {list(array.shape)}; give at least one example, [n, ...].")
    if array.dtype.kind != "f":
        return np.ascontiguousarray(array)
    strange = ~np.isfinite(array.reshape(len(array), -1)).all(1)
    if strange.any():
        raise TrainError(
            f"{name} has NaN or infinite numbers in {strange.sum():,} of {len(array):,} examples, the first of which "
            f"is {strange.argmax():,}; remove or correct them."
        )
    return np.ascontiguousarray(array, floating)


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def _described(given: Any) -> str:
    if given is None:
        return "None"
    shape = getattr(given, "shape", None)
    return type(given).__name__ if shape is None else f"a {type(given).__name__} of shape {list(shape)}"
