"""The form of a tree of arrays, without the arrays: names, nesting and order, as JSON in the index of shards."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, cast, final

import numpy as np

from penstock.core.errors import TrainError
from penstock.core.spec import PROTOCOL_DATATYPES
from penstock.train.data.trees import Tree

# B examples


@final
@dataclass(frozen=True, slots=True)
class TreeForm:
    """The nesting of a tree of dictionaries and tuples.

    Args:
        form: The tree with the number of each array in its place, from 0 on; None is a tree without arrays.
    """

    form: Any

    @classmethod
    def of(cls, tree: Tree, name: str) -> "TreeForm":
        """Return the form of a tree of arrays.

        Args:
            tree: The tree.
            name: Its name in messages.

        Raises:
            TrainError: It has anything but dictionaries with text keys, tuples and arrays of numbers.
        """
        numbers = iter(range(_count(tree, name)))
        return cls(_numbered(tree, numbers))

    @property
    def numbers(self) -> list[int]:
        """The numbers of the arrays, in the tree's order."""
        return list(_leaves(self.form))

    def leaves(self, tree: Tree) -> list[Any]:
        """List the leaves of a tree of this form by their numbers; dictionaries may have another order."""
        found: dict[int, Any] = {}
        _collect(self.form, tree, found)
        return [found[number] for number in range(len(found))]

    def filled(self, arrays: Sequence[Any]) -> Tree:
        """Make a tree of this form from its arrays by their numbers."""
        return _filled(self.form, arrays)

    def to_json(self) -> Any:
        """The form as JSON values: objects, arrays, numbers and null."""
        return _plain(self.form)

    @classmethod
    def from_json(cls, given: Any) -> "TreeForm":
        """Read what `to_json` wrote.

        Raises:
            TypeError: It is another value.
        """
        return cls(_form(given))


def _count(tree: Tree, name: str) -> int:
    """Count the arrays of a tree, and check that shards can hold it."""
    if tree is None:
        return 0
    if isinstance(tree, Mapping) and not is_dataclass(tree):
        named = cast(Mapping[Any, Any], tree)
        for key in named:
            if not isinstance(key, str):
                raise TrainError(
                    f"{name} has the key {key!r}; shards hold dictionaries whose keys are text, such as 'boxes'."
                )
        return sum(_count(part, f"{name}[{key!r}]") for key, part in named.items())
    if isinstance(tree, tuple) and not hasattr(cast(Any, tree), "_fields"):
        parts = cast(tuple[Any, ...], tree)
        return sum(_count(part, f"{name}[{place}]") for place, part in enumerate(parts))
    if not isinstance(tree, np.ndarray):
        raise TrainError(
            f"{name} is a {type(cast(Any, tree)).__name__}; shards hold NumPy arrays, and dictionaries and tuples of "
            f"them."
        )
    if tree.dtype.name not in PROTOCOL_DATATYPES:
        raise TrainError(f"{name} is {tree.dtype}; shards hold {', '.join(PROTOCOL_DATATYPES)}.")
    return 1


def _numbered(tree: Tree, numbers: Iterator[int]) -> Any:
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return {name: _numbered(part, numbers) for name, part in cast(Mapping[str, Any], tree).items()}
    if isinstance(tree, tuple):
        return tuple(_numbered(part, numbers) for part in cast(tuple[Any, ...], tree))
    return next(numbers)


def _leaves(form: Any) -> Iterator[int]:
    if isinstance(form, int):
        yield form
    elif form is not None:
        for part in form.values() if isinstance(form, dict) else form:
            yield from _leaves(part)


def _collect(form: Any, tree: Tree, found: dict[int, Any]) -> None:
    if isinstance(form, int):
        found[form] = tree
    elif isinstance(form, dict):
        for name, part in cast(dict[str, Any], form).items():
            _collect(part, tree[name], found)
    elif form is not None:
        for part, own in zip(form, tree, strict=True):
            _collect(part, own, found)


def _filled(form: Any, arrays: Sequence[Any]) -> Tree:
    if isinstance(form, dict):
        return {name: _filled(part, arrays) for name, part in cast(dict[str, Any], form).items()}
    if isinstance(form, tuple):
        return tuple(_filled(part, arrays) for part in cast(tuple[Any, ...], form))
    return None if form is None else arrays[form]


def _plain(form: Any) -> Any:
    if isinstance(form, dict):
        return {name: _plain(part) for name, part in cast(dict[str, Any], form).items()}
    return [_plain(part) for part in cast(tuple[Any, ...], form)] if isinstance(form, tuple) else form


def _form(given: Any) -> Any:
    if isinstance(given, dict):
        return {name: _form(part) for name, part in cast(dict[str, Any], given).items()}
    if isinstance(given, list | tuple):
        return tuple(_form(part) for part in cast(Sequence[Any], given))
    if given is None or type(given) is int:
        return given
    raise TypeError(f"{given!r:.80} is not the form of a tree")
