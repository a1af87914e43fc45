"""Conversion of arrays and tensors to examples, with checks."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.errors import ApplicationError, TrainError
from penstock.core.spec import Array
from penstock.runtime.named_network import NamedCall
from penstock.train.data.columns import IGNORED, Column, columns_in
from penstock.train.data.examples import ArraySet, Examples
from penstock.train.data.loader import first_batch
from penstock.train.data.trees import leaves, mapped
from penstock.train.named_values import checked_loss, described_error, total_loss

# n examples

TRIED = 2
# Inputs are checked for NaN before a training up to this size.
MAX_CHECKED_BYTES = 1 << 30
_CHECKED_AT_ONCE = 1 << 22


def examples_of(given: Any, name: str, network: nn.Module) -> Examples:
    """Convert `(X, y)` to examples; `Examples` are returned unchanged.

    Floats get the dtype of the network's weights, other targets int64; other inputs keep their dtype. X may be a
    dictionary of arrays by name, y a dictionary or tuple of arrays; in them, a list of arrays may have different
    lengths.

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
    inputs: Any
    if isinstance(given[0], Mapping):
        named = cast(Mapping[str, Any], given[0])
        inputs = {key: _column(part, f"X[{key!r}] of {name}", wanted) for key, part in named.items()}
        if not inputs:
            raise TrainError(f"X of {name} is an empty dictionary; give arrays by name.")
    else:
        inputs = _array(given[0], f"X of {name}", wanted)
    first = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
    targets = _targets(given[1], f"y of {name}", wanted, len(first))
    columns = [*(inputs.values() if isinstance(inputs, dict) else [inputs]), *columns_in(targets)]
    for column in columns:
        if len(column) != len(columns[0]):
            raise TrainError(
                f"X of {name} has {len(columns[0]):,} examples and {'y' if column is targets else 'another array'} has "
                f"{len(column):,}; give one target for each input."
            )
    return ArraySet(inputs=inputs, targets=targets)


def _targets(given: Any, name: str, floating: np.dtype[Any], count: int) -> Any:
    if isinstance(given, Mapping):
        named = cast(Mapping[str, Any], given)
        return {key: _targets(part, f"{name}[{key!r}]", floating, count) for key, part in named.items()}
    if isinstance(given, tuple):
        parts = cast(tuple[Any, ...], given)
        if _are_several(parts, count):
            return tuple(_targets(part, f"{name}[{place}]", floating, count) for place, part in enumerate(parts))
        given = list(parts)
    column = _column(given, name, floating, joins=True)
    return column.astype(np.int64) if isinstance(column, np.ndarray) and column.dtype.kind in "biu" else column


def _are_several(parts: tuple[Any, ...], count: int) -> bool:
    """Check that a tuple holds several targets, and is not the rows of one, as `zip(*dataset)` gives them."""
    if any(isinstance(part, Mapping) for part in parts):
        return True
    arrays = all(isinstance(part, np.ndarray | Tensor) and part.ndim > 0 for part in parts)
    return arrays and len(parts) != count


def _column(given: Any, name: str, floating: np.dtype[Any], *, joins: bool = False) -> Column:
    """Convert an array, or a list of arrays of different lengths; `joins` makes an array of equally long ones."""
    rows = cast(list[Any], given) if isinstance(given, list) else []
    lengths = {len(row) for row in rows if _has_length(row)}
    if not lengths or not all(map(_has_length, rows)) or (joins and len(lengths) == 1):
        return _array(given, name, floating)
    return [_array(row, f"{name}, example {place:,},", floating, empty=True) for place, row in enumerate(rows)]


def _has_length(row: Any) -> bool:
    return row.ndim > 0 if isinstance(row, np.ndarray | Tensor) else isinstance(row, list | tuple)


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
    try:
        call = None if examples.record is None else NamedCall(network, examples.record)
    except ApplicationError as error:
        said = str(error).replace("the application's inputs are", f"the inputs of {name} are")
        raise TrainError(said) from None
    inputs, targets = (mapped(lambda leaf: leaf.to(device), part) for part in first_batch(examples, TRIED))
    what = _shape(inputs)
    before = network.training
    network.eval()
    try:
        with torch.no_grad():
            outputs = network(inputs) if call is None else call(network, inputs)
            if not isinstance(outputs, Tensor) and loss in (nn.functional.cross_entropy, nn.functional.mse_loss):
                raise TrainError(
                    f"the network gives a {type(outputs).__name__}, and {loss.__name__} takes one tensor; give "
                    f"loss=FUNCTION, which gets it with the targets."
                )
            of = f"outputs {_shape(outputs)} and targets {_shape(targets)}"
            squares = loss is nn.functional.mse_loss or isinstance(loss, nn.MSELoss)
            if squares and isinstance(targets, Tensor) and outputs.shape != targets.shape:
                raise TrainError(f"MSE needs equal shapes, and there are {of}; reshape y.")
            _check_labels(examples, outputs, loss, name)
            found = checked_loss(loss, outputs, targets, sizes=True)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise TrainError(
            f"the network or the loss does not take {what} of {name}, targets {_shape(targets)}: "
            f"{described_error(error)}."
        ) from error
    finally:
        network.train(before)
    total_loss(found, f" of {of}")


def check_finite(examples: Examples, name: str) -> None:
    """Refuse inputs in memory that have NaN or infinite numbers, as a server refuses them.

    Args:
        examples: The set. Other sets than an `ArraySet`, and one of more than `MAX_CHECKED_BYTES`, are not read.
        name: The name of the set in messages.

    Raises:
        TrainError: A number is not finite.
    """
    if not isinstance(examples, ArraySet) or not isinstance(examples.inputs, np.ndarray):
        # Named arrays were checked when the set was made.
        return
    inputs = cast(Array, examples.inputs)
    if inputs.dtype.kind != "f" or inputs.nbytes > MAX_CHECKED_BYTES:
        return
    rows = max(1, _CHECKED_AT_ONCE // max(1, inputs[:1].size))
    for first in range(0, len(inputs), rows):
        part = inputs[first : first + rows]
        if (finite := np.isfinite(part)).all():
            continue
        place = [int(at) for at in np.argwhere(~finite)[0]]
        column = f", column {place[1]:,}" if len(place) == 2 else f", place {place[1:]}" if len(place) > 2 else ""
        raise TrainError(
            f"the inputs of the {name} data have {part[tuple(place)]} in row {first + place[0]:,}{column}, counted "
            f"from 0; remove or correct what is NaN or infinite."
        )


def describe_nonfinite_targets(examples: Examples, name: str) -> str:
    """Say where the targets of examples in memory have NaN or infinity; empty if they do not, or are not in memory.

    Args:
        examples: The set.
        name: The name of the set in the sentence.
    """
    for column in columns_in(examples.targets) if isinstance(examples, ArraySet) else ():
        if isinstance(column, np.ndarray):
            finite_n = np.isfinite(column).reshape(len(column), -1).all(1) if column.dtype.kind == "f" else np.ones(1)
        else:
            finite_n = np.array([each.dtype.kind != "f" or np.isfinite(each).all() for each in column])
        if not finite_n.all():
            row = int(finite_n.argmin())
            return f"row {row:,} of the targets of the {name} data, counted from 0, has NaN or infinity"
    return ""


def _check_labels(examples: Examples, outputs: Any, loss: Any, name: str) -> None:
    """Refuse labels that are not a class: on a GPU they would abort the process."""
    if loss is not nn.functional.cross_entropy or not isinstance(examples, ArraySet) or outputs.ndim < 2:
        return
    labels, classes = examples.targets, outputs.shape[1]
    if isinstance(labels, list):
        labels = np.concatenate([row.reshape(-1) for row in cast(list[Array], labels)])
    if not isinstance(labels, np.ndarray) or labels.dtype.kind != "i":
        return
    labels = labels[labels != IGNORED]
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        raise TrainError(
            f"y of {name} has labels from {labels.min()} to {labels.max()}, and the network gives {classes} scores; "
            f"give labels from 0 to {classes - 1}, or a network with more outputs."
        )


def _array(given: Any, name: str, floating: np.dtype[Any], *, empty: bool = False) -> Array:
    if isinstance(given, Tensor):
        given = given.detach().cpu()
        given = (given.float() if given.dtype == torch.bfloat16 else given).numpy()
    try:
        array = np.asarray(given)
    except ValueError as error:
        raise TrainError(f"{name} is no array ({error}); give equally long rows.") from None
    if array.dtype.kind not in "fbiu":
        raise TrainError(f"{name} is {array.dtype}; give numbers, a float or an integer type.")
    if array.ndim == 0 or (len(array) == 0 and not empty):
        raise TrainError(f"{name} has the shape {list(array.shape)}; give at least one example, [n, ...].")
    if array.dtype.kind != "f":
        # torch has no other byte order than the machine's.
        return np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    within = tuple(range(1, array.ndim))
    strange = ~np.isfinite(array).all(within)
    if strange.any():
        raise TrainError(
            f"{name} has NaN or infinite numbers in {strange.sum():,} of {len(array):,} examples, first in "
            f"example {strange.argmax():,}; remove or correct them."
        )
    with np.errstate(over="ignore"):
        made = np.ascontiguousarray(array, floating)
    large = ~np.isfinite(made).all(within) if made.itemsize < array.itemsize else strange
    if large.any():
        raise TrainError(
            f"{name} has numbers that {floating} cannot hold in {large.sum():,} of {len(array):,} examples, first in "
            f"example {large.argmax():,}; scale them, or give a float64 network."
        )
    return made


def _shape(tensor: Any) -> str:
    if isinstance(tensor, Mapping):
        return ", ".join(f"{name!r}: {_shape(part)}" for name, part in cast(Mapping[str, Any], tensor).items())
    if not isinstance(tensor, Tensor):
        return ", ".join(_shape(leaf) if isinstance(leaf, Tensor) else str(leaf) for leaf in leaves(tensor))
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")


def _described(given: Any) -> str:
    if given is None:
        return "None"
    shape = getattr(given, "shape", None)
    return type(given).__name__ if shape is None else f"a {type(given).__name__} of shape {list(shape)}"
