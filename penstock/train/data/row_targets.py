"""Columns of a dataset as targets: numbers, numbers of labels, and lists as long as the inputs."""

from collections.abc import Mapping
from typing import Any, cast, final

import numpy as np

from penstock.core.errors import BadExample, TrainError
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.train.data.columns import Column, padded_rows
from penstock.train.data.row_source import RowSource, Values
from penstock.train.data.sampler import Indices
from penstock.train.data.trees import Tree, leaves, mapped

# B rows that are read


@final
class RowTargets:
    """Reads the targets of rows.

    Args:
        source: The rows.
        tree: The column of the targets, or a dictionary or tuple of columns.
        classes: The classes in the order of their targets; None for those of the column.
        axes: Of `Examples.target_axes`.
        record: The named inputs, whose lengths `axes` names.

    Attributes:
        columns: The columns that it needs.
        classes: The names of the targets, if there is one column and it has names.

    Raises:
        TrainError: A column cannot be a target.
    """

    def __init__(
        self, source: RowSource, tree: Any, classes: tuple[str, ...] | None, axes: Any, record: RecordSpec | None
    ) -> None:
        self._tree, self._axes, self._record = tree, axes, record
        self.columns: list[str] = list(dict.fromkeys(leaves(tree)))
        self._numbers: dict[str, dict[Any, int]] = {}
        self.classes: tuple[str, ...] = ()
        for name in self.columns:
            kind, own = source.kinds[name], source.classes.get(name)
            if kind not in ("number", "label", "text"):
                raise TrainError(
                    f"column {name!r} holds no numbers or labels, so it cannot be a target; give row=FUNCTION of a "
                    f"row, which returns its input and target."
                )
            if kind == "text" and classes is None:
                raise TrainError(
                    f"column {name!r} holds text; give classes=('FIRST', 'SECOND', ...), whose order gives their "
                    f"numbers."
                )
            if kind == "number":
                continue
            wanted = own if classes is None else tuple(classes)
            assert wanted is not None, name
            if unknown := sorted(set(own or ()) - set(wanted)):
                raise TrainError(f"column {name!r} has the class {unknown[0]!r}, which is not one of {wanted}.")
            self._numbers[name] = {
                label if kind == "text" else (own or ()).index(label): place
                for place, label in enumerate(wanted)
                if kind == "text" or label in (own or ())
            }
            self.classes = wanted if len(self.columns) == 1 else ()

    def read(self, values: Mapping[str, Values], indices_B: Indices) -> Tree:
        """Return the targets of rows.

        Args:
            values: The columns of the rows.
            indices_B: The rows, for messages.

        Raises:
            BadExample: A row has no class of the list, or its target has another shape than the others.
        """
        axes = self._axes if self._axes is not None else mapped(lambda _: None, self._tree)
        return _paired(lambda name, own: self._column(name, values[name], own, indices_B), self._tree, axes)

    def _column(self, name: str, values: Values, axes: Any, indices_B: Indices) -> Array:
        numbers = self._numbers.get(name)
        if numbers is not None:
            given: list[Any] = values.tolist() if isinstance(values, np.ndarray) else values
            found = [numbers.get(value) for value in given]
            if None in found:
                place = found.index(None)
                raise BadExample(
                    f"row {indices_B[place]:,} has {given[place]!r} in column {name!r}, which is no class.",
                    index=int(indices_B[place]),
                    name=f"row {indices_B[place]}",
                )
            return np.array(found, np.int64)
        if axes is not None:
            return padded_rows([_plain(row) for row in values], _room(axes, self._record, values), _all(values))
        if isinstance(values, np.ndarray):
            return _plain(values)
        shapes = [np.shape(row) for row in values]
        if len(set(shapes)) > 1:
            place = next(place for place, shape in enumerate(shapes) if shape != shapes[0])
            raise TrainError(
                f"the targets of column {name!r} have the shapes {list(shapes[0])} and {list(shapes[place])}; give "
                f"target_axes, the Dim that each axis is as long as, such as ('tokens',)."
            )
        return _plain(np.stack(values))


def stacked(target: Any, axes: Any, record: RecordSpec | None) -> Tree:
    """Return the target of one row as arrays `[1, ...]`, padded to the largest length where `axes` names one."""

    def one(value: Any, own: Any) -> Array:
        array = _plain(np.asarray(value))
        return array[None] if own is None else padded_rows([array], _room(own, record, [array]), np.arange(1))

    return _paired(one, target, axes if axes is not None else mapped(lambda _: None, target))


def _paired(function: Any, tree: Any, axes: Any) -> Tree:
    """Apply a function to the leaves of a tree and the axes at the same place, which are tuples or None."""
    if isinstance(tree, Mapping):
        named = cast(Mapping[str, Any], tree)
        return {name: _paired(function, part, (axes or {}).get(name)) for name, part in named.items()}
    if isinstance(tree, tuple):
        parts = cast(tuple[Any, ...], tree)
        return tuple(_paired(function, part, own) for part, own in zip(parts, axes or [None] * len(parts), strict=True))
    return function(tree, axes)


def _plain(array: Array) -> Array:
    array = np.asarray(array)
    if array.dtype.kind == "f":
        return np.asarray(array, np.float32)
    if array.dtype.kind in "biu":
        return array.astype(np.int64)
    raise TrainError(f"a target is {array.dtype}; it must be numbers.")


def _room(axes: tuple[str | None, ...], record: RecordSpec | None, values: Any) -> tuple[int, ...]:
    dims = {} if record is None else record.dims
    sizes = np.shape(values[0])
    if len(axes) != len(sizes) or any(name is not None and name not in dims for name in axes):
        raise TrainError(f"target_axes is {axes}; give a name of {list(dims)} or None for each of {len(sizes)} axes.")
    return tuple(size if name is None else int(dims[name]) for name, size in zip(axes, sizes, strict=True))


def _all(values: Column | list[Any]) -> Array:
    return np.arange(len(values))
