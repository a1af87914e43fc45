"""Training examples, readable in any order and by several threads at once."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar, cast, final

import numpy as np

from penstock.core.errors import BadExample, TrainError
from penstock.core.record import ChunkSpec, Lengths, RecordSpec
from penstock.core.spec import Array
from penstock.train.data.columns import (
    NO_NUMBERS,
    Column,
    array_of,
    axes_of,
    column_of,
    columns_in,
    fill,
    fitted,
    joined_columns,
    padded_rows,
    record_of,
    sizes_of,
    target_columns,
)
from penstock.train.data.fingerprint import hash_of, spread_indices
from penstock.train.data.sampler import Indices, Seeds
from penstock.train.data.trees import Tree

# n examples, B examples of a batch


class Examples(ABC):
    """A set of examples. Subclass it, or use `ArraySet`, `ImageFolder` or `Shards`.

    Several threads may call `read` at once. The result depends on an example's index and seed alone.

    Examples with several named tensors, or of varying length, call `declare(app.input)` when they are made, in place of
    setting `input_dtype` and `input_shape`. `read` then fills records: `inputs_B["input_ids"][row, :n] = ids` for each
    tensor, and `inputs_B["tokens"][row] = n` for each `Dim`; or `inputs_B[row] = app.input.check({"input_ids": ids})`.
    The network gets them by name, padded with zeros to the longest of the batch.

    Attributes:
        in_memory: True if reading is no more than copying, so that workers save no time.
        in_processes: True if four workers or more read in processes of their own, because decoding holds Python's lock
            for much of its time. Each process gets a pickled copy of the set.
        input_dtype: The dtype of the raw inputs; a subclass sets it.
        input_shape: The shape of one raw input; a subclass sets it.
        varies: True if an example is read differently in each epoch, by its seed.
        record: The named tensors of one raw input, see `declare`; None for one array of fixed size.
        target_axes: For targets that are as long as the inputs: a tree like the targets, with the name of a `Dim` for
            each axis of one target, such as `("tokens",)`, or None for an axis of fixed size. `read` returns them as
            large as the `Dim`; they are cut to the length of the batch.
    """

    in_memory: ClassVar[bool] = False
    in_processes: ClassVar[bool] = False
    varies: bool = False
    record: RecordSpec | None = None
    target_axes: Any = None
    input_dtype: np.dtype[Any]
    input_shape: tuple[int, ...]

    @abstractmethod
    def __len__(self) -> int:
        """Count the examples."""

    @abstractmethod
    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Tree:
        """Read some examples.

        Args:
            indices_B: The examples, each from 0 to below `len`.
            seeds_B: The RNG seed of each example; `sampler.draws_of` makes random numbers of it.
            inputs_B: The destination of the raw inputs, `[B, *input_shape]` of `input_dtype`.

        Returns:
            The targets, `[B]` or `[B, ...]`, or a dictionary or tuple of such arrays.

        Raises:
            BadExample: An example is damaged or missing.
        """

    def prefetch(self) -> None:  # noqa: B027 - most sets have nothing to fetch
        """Begin to fetch what `read` will need, in the background. A training calls it once, before its first step."""

    def fingerprint(self) -> dict[str, str]:
        """Identify the examples, by named parts; a run is not resumed on examples of another fingerprint.

        By default the number and form of the examples, and hashes of some of them as they are read with the seed 0. A
        subclass that can identify all of its content returns that.

        Raises:
            TrainError: They cannot be read.
        """
        found = {"examples": f"{len(self):,}", "inputs": self.describe()}
        for index in spread_indices(len(self)):
            inputs_1 = self.empty(1)
            try:
                targets = self.read(np.array([index]), np.zeros(1, np.uint64), inputs_1)
            except BadExample:
                continue
            fields = inputs_1.dtype.names
            inputs = inputs_1 if fields is None else [inputs_1[name] for name in fields]
            found[f"example {index:,}"] = hash_of(inputs, targets)
        return found

    def lengths(self) -> Lengths | None:
        """Return the length of each example, `[n]`, in any unit, without reading them; None if it is not known.

        `ExampleOrder` needs it. Those of an example with several lengths are added.
        """
        return None

    def declare(self, spec: ChunkSpec) -> None:
        """Declare one raw input: a record of several named tensors or of varying length, or one tensor of fixed size.

        Args:
            spec: `app.input` of the application.
        """
        self.record = spec if isinstance(spec, RecordSpec) else None
        self.input_dtype, self.input_shape = spec.numpy_dtype, spec.shape

    def bound(self, record: RecordSpec) -> "Examples":
        """Return the examples as records of an application's inputs.

        Raises:
            TrainError: They are not.
        """
        if self.record != record:
            raise TrainError(
                f"the examples {type(self).__name__} give {self.describe()}, and the application declares "
                f"{record.describe()}; let them call declare(app.input) when they are made."
            )
        return self

    def describe(self) -> str:
        """Describe one raw input, `uint8[28, 28]`, for messages."""
        return f"{self.input_dtype}{list(self.input_shape)}" if self.record is None else self.record.describe()

    @property
    def input_nbytes(self) -> int:
        """Bytes of one raw input."""
        return prod(self.input_shape) * self.input_dtype.itemsize

    def empty(self, count: int) -> Array:
        """Allocate memory for raw inputs; records are zeros."""
        return (
            np.empty((count, *self.input_shape), self.input_dtype) if self.record is None else self.record.empty(count)
        )


@final
class ArraySet(Examples):
    """Examples in memory.

    Args:
        inputs: Raw inputs in the form that `decode` returns, `[n, *input.shape]`. Several: a dictionary of arrays
            `[n, ...]` by name, or of lists of n arrays whose lengths differ. The network gets lists padded with zeros.
        targets: The targets of the loss, `[n]` or `[n, ...]`, or a dictionary or tuple of such arrays. A list of n
            arrays whose lengths differ is padded too: floats with 0, whole numbers with -100, which cross-entropy
            ignores.
        record: The named tensors, as `app.input`. By default as the arrays are: lists vary in length, under the name
            of their tensor and `_length`.

    Raises:
        TrainError: There are no examples, not equally many of each, or they do not fit the record.
    """

    in_memory: ClassVar[bool] = True

    def __init__(
        self, *, inputs: Array | Mapping[str, Any] | Sequence[Any], targets: Any, record: ChunkSpec | None = None
    ) -> None:
        record = record if isinstance(record, RecordSpec) else None
        inputs = _rows_of(inputs)
        self.inputs: Any = inputs
        self.targets: Any = target_columns(targets)
        self._is_declared = record is not None
        named = self._named(record)
        for column in (*(named or {"inputs": inputs}).values(), *columns_in(self.targets)):
            self._check_count(column)
        self._lengths: dict[str, Lengths] = {}
        if named is None:
            self.input_dtype, self.input_shape = inputs.dtype, inputs.shape[1:]  # pyright: ignore
        else:
            self.inputs, self._lengths = fitted(named, record or record_of(named))
            self.declare(record or record_of(named))
        self._targets: list[Column] = columns_in(self.targets)
        if not self._targets:
            raise TrainError("the targets of the data are empty; give at least one array.")
        axes = [axes_of(column, self._lengths) for column in self._targets]
        if any(name is not None for names in axes for name in names):
            self.target_axes = _like(self.targets, iter(axes))
        self._rooms = [self._room(column, names) for column, names in zip(self._targets, axes, strict=True)]

    def _room(self, column: Column, names: tuple[str | None, ...]) -> tuple[int, ...]:
        """Return the shape of one target of a column: as long as the inputs may be, or as the longest target."""
        dims = {} if self.record is None else self.record.dims
        largest = sizes_of(column).max(0).tolist()
        return tuple(size if name is None else int(dims[name]) for name, size in zip(names, largest, strict=True))

    def _named(self, record: RecordSpec | None) -> dict[str, Column] | None:
        """Return the inputs by name; None for one array of fixed size."""
        if isinstance(self.inputs, Mapping):
            named = cast(Mapping[str, Any], self.inputs)
            if not named:
                raise TrainError("the inputs of the data are an empty dictionary; give arrays by name.")
            return {name: column_of(given, f"inputs[{name!r}]") for name, given in named.items()}
        if record is None and not isinstance(self.inputs, list):
            return None
        if record is not None and len(record.tensors) > 1:
            raise TrainError(f"the inputs have no names, and must be {record.describe()}; give a dictionary of arrays.")
        names = ["input"] if record is None else list(record.by_name)
        return {name: column_of(self.inputs, "inputs") for name in names}

    def _check_count(self, column: Any) -> None:
        first = next(iter(self.inputs.values())) if isinstance(self.inputs, Mapping) else self.inputs
        if len(column) == len(first) > 0:
            return
        if len(column) == len(first):
            raise TrainError("the data has no examples; give at least one input with its target.")
        if column is self.targets:
            raise TrainError(
                f"the data has {len(first):,} inputs and {len(column):,} targets; "
                f"give one target for each input, and at least one."
            )
        raise TrainError(
            f"the data has {len(first):,} and {len(column):,} examples in different arrays; give equally many, and at "
            f"least one."
        )

    def bound(self, record: RecordSpec) -> "ArraySet":
        """See `Examples`."""
        if self.record == record:
            return self
        inputs = self.inputs
        if isinstance(inputs, Mapping) and list(cast(Any, inputs)) == ["input"] and len(record.tensors) == 1:
            (inputs,) = cast(Mapping[str, Any], inputs).values()
        return ArraySet(inputs=inputs, targets=self.targets, record=record)

    def fingerprint(self) -> dict[str, str]:
        """See `Examples`; a hash of all arrays."""
        content = hash_of(self.inputs, self.targets)
        return {"examples": f"{len(self):,}", "inputs": self.describe(), "numbers": content}

    def lengths(self) -> Lengths | None:
        """See `Examples`."""
        return sum(self._lengths.values(), np.zeros(len(self), np.int64)) if self._lengths else None

    def joint_record(self, other: "ArraySet") -> RecordSpec | None:
        """Return one record of both sets: a declared one, or one made of the arrays of both.

        Returns:
            The record, with the tensors in this set's order; None if the other set has other tensors.
        """
        if self.record is None or other.record is None or set(self.inputs) != set(other.inputs):
            return None
        if self._is_declared:
            return self.record
        if other._is_declared:
            return other.record
        return record_of({name: joined_columns(column, other.inputs[name]) for name, column in self.inputs.items()})

    def __len__(self) -> int:
        return len(self._targets[0])

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Tree:
        """See `Examples`."""
        if self.record is None:
            inputs_B[...] = self.inputs[indices_B]
            if isinstance(self.targets, np.ndarray):
                return self.targets[indices_B]
        else:
            for name, column in self.inputs.items():
                fill(inputs_B[name], column, indices_B)
            for name, lengths_n in self._lengths.items():
                inputs_B[name] = lengths_n[indices_B]
        rows = (padded_rows(*of, indices_B) for of in zip(self._targets, self._rooms, strict=True))
        return _like(self.targets, rows)


def _rows_of(inputs: Any) -> Any:
    """Return inputs without names as an array; arrays whose rows are read when they are needed stay as they are.

    Raises:
        TrainError: They are no array, or have no numbers.
    """
    if isinstance(inputs, Mapping | list):
        return cast(Any, inputs)
    array = array_of(inputs)
    if not getattr(array, "shape", ()) or not hasattr(array, "dtype"):
        raise TrainError(
            f"the inputs are a {type(inputs).__name__}; give an array, [n, ...], a list of arrays, or a dictionary of "
            f"these by name."
        )
    if array.dtype.kind in NO_NUMBERS:
        raise TrainError(f"the inputs are an array of {array.dtype}; give columns of numbers alone.")
    return array


def _like(tree: Tree, parts: Any) -> Tree:
    """Make a tree like one of columns from its parts in order."""
    if isinstance(tree, Mapping):
        return {name: _like(part, parts) for name, part in cast(Mapping[str, Any], tree).items()}
    if isinstance(tree, tuple):
        return tuple(_like(part, parts) for part in cast(tuple[Any, ...], tree))
    return next(parts)
