"""Trees of arrays or tensors: dictionaries, tuples, lists and dataclasses of them, or one alone.

Batches, targets and the outputs of a network are trees. `None` is a tree without leaves.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import numpy as np

from penstock.core.errors import TrainError

Tree = Any
# By the kind of the dtype, whose width is that of the longest text.
_TEXTS = {"U": "str", "S": "bytes"}


def mapped(function: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply a function to the leaves at the same place of some trees.

    Returns:
        A tree like the first one. Mappings that are no dataclasses become dictionaries.
    """
    first = trees[0]
    if first is None:
        return None
    if is_dataclass(first) and not isinstance(first, type):
        # Hugging Face's outputs are mappings too, without their fields that are None.
        names = [each.name for each in fields(first) if each.init]
        parts = {name: mapped(function, *(getattr(tree, name) for tree in trees)) for name in names}
        return replace(cast(Any, first), **parts)
    if isinstance(first, Mapping):
        return {name: mapped(function, *(tree[name] for tree in trees)) for name in cast(Mapping[str, Any], first)}
    if isinstance(first, tuple | list):
        parts = [mapped(function, *at) for at in zip(*trees, strict=True)]
        made: Any = type(cast(Any, first))
        return made(*parts) if hasattr(first, "_fields") else made(parts)
    return function(*trees)


def leaves(tree: Tree) -> list[Any]:
    """List the leaves of a tree, in its order."""
    if tree is None:
        return []
    if is_dataclass(tree) and not isinstance(tree, type):
        parts = [getattr(tree, each.name) for each in fields(tree) if each.init]
    elif isinstance(tree, Mapping):
        parts = list(cast(Mapping[str, Any], tree).values())
    elif isinstance(tree, tuple | list):
        parts = list(cast(Sequence[Any], tree))
    else:
        return [tree]
    return [leaf for part in parts for leaf in leaves(part)]


def row_forms(tree: Tree) -> Tree:
    """Return the dtype and shape of one row of each array `[n, ...]`, in a tree of the same form.

    Returns:
        Such as `{"boxes": "float32[7, 4]", "kind": "int64[]"}`, with `str` and `bytes` for text of any width; trees
        that can be joined have equal ones.
    """
    return mapped(_row_form, tree)


def _row_form(array: Any) -> str:
    dtype = _TEXTS.get(array.dtype.kind, array.dtype) if isinstance(array, np.ndarray) else array.dtype
    return f"{dtype}{list(array.shape[1:])}"


def joined_forms(tree: Tree) -> Tree:
    """Return `row_forms`, with all dtypes of numbers alike for one plain array, which NumPy's concatenation converts.

    In a tree, an array keeps the dtype that its name stands for.
    """
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biuf":
        return f"numbers{list(tree.shape[1:])}"
    return row_forms(tree)


def joined(trees: Sequence[Tree]) -> Tree:
    """Concatenate arrays `[n, ...]` at the same place of some trees.

    Raises:
        TrainError: The trees have different names, or arrays of different shapes.
    """
    try:
        return mapped(lambda *parts: np.concatenate(parts), *trees)
    except (AttributeError, KeyError, TypeError, ValueError):
        check_row_forms(trees)
        raise


def check_row_forms(trees: Sequence[Tree]) -> None:
    """Check that arrays `[n, ...]` at the same place of some trees have the same names, dtypes and shapes.

    Raises:
        TrainError: They do not.
    """
    forms = [joined_forms(tree) for tree in trees]
    for form in forms:
        if form != forms[0]:
            raise TrainError(
                f"the targets of one example are {forms[0]} and of another {form}; give all examples the same names, "
                f"dtypes and shapes."
            )


def split(tree: Tree, parts: int) -> list[Tree]:
    """Split tensors `[B, ...]` of a tree into parts of equally many rows, as `Tensor.chunk`."""
    found: list[list[Any]] = [list(tensor.chunk(parts)) for tensor in leaves(tree)]
    return [_filled(tree, iter(part)) for part in zip(*found, strict=True)]


def _filled(tree: Tree, parts: Iterator[Any]) -> Tree:
    return mapped(lambda _: next(parts), tree)
