"""Examples of shards by their number: of one array and one target, or of trees."""

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any, final

import numpy as np
import numpy.typing as npt

from penstock.core.dim import Dim
from penstock.core.errors import TrainError
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.train.data.open_shard import OpenShard
from penstock.train.data.sampler import Indices
from penstock.train.data.shard_file import ShardFile
from penstock.train.data.shard_folder import ShardFolder
from penstock.train.data.shard_index import LENGTHS, TARGETS, ShardIndex, TreeIndex
from penstock.train.data.stored_array import STORED_LENGTHS, StoredArray, StoredLengths
from penstock.train.data.tree_form import TreeForm

# n examples, B examples of a batch, V lengths of an example


class ShardRows(ABC):
    """The examples in shards. Several threads may call `read` at once.

    Attributes:
        files: The shards.
        tree: The form of the targets.
    """

    files: list[OpenShard]
    tree: TreeForm

    @abstractmethod
    def targets(self, indices_B: Indices) -> list[Array]:
        """Return the arrays of the targets, `[B, ...]`, with padding where `read` fills them."""

    @abstractmethod
    def read(self, index: int, shard: int, inputs_1: Array, targets_B: Sequence[Array], row: int) -> str | None:
        """Read one example.

        Args:
            index: Its number.
            shard: Its shard.
            inputs_1: The destination of the raw input.
            targets_B: What `targets` returned.
            row: The example's row of the targets.

        Returns:
            The damage of the shard, or None.
        """


@final
class ArrayShardRows(ShardRows):
    """Examples of one array of fixed size and one target; the targets are in memory."""

    def __init__(self, folder: ShardFolder, index: ShardIndex, verify: bool) -> None:
        self.tree = TreeForm(0)
        self.targets_n = _load(folder, TARGETS, index.targets)
        dtype = np.dtype(index.dtype)
        self.files = [OpenShard(folder, shard, dtype, (shard.examples, *index.shape), verify) for shard in index.shards]
        self._first = np.cumsum([0, *(shard.examples for shard in index.shards)]).tolist()

    def targets(self, indices_B: Indices) -> list[Array]:
        """See `ShardRows`."""
        return [self.targets_n[indices_B]]

    def read(self, index: int, shard: int, inputs_1: Array, targets_B: Sequence[Array], row: int) -> str | None:
        """See `ShardRows`."""
        if not inputs_1.nbytes:
            return None
        room = memoryview(inputs_1.data).cast("B")
        return self.files[shard].read((index - self._first[shard]) * len(room), room)


@final
class TreeShardRows(ShardRows):
    """Examples that are trees. The bytes of an example are contiguous, so that one read loads it.

    Attributes:
        record: The named inputs; None for one array of fixed size.
        target_axes: Of `Examples.target_axes`.
    """

    def __init__(self, folder: ShardFolder, index: TreeIndex, verify: bool) -> None:
        self._folder, self.tree, self.record = folder, index.tree, index.record
        self._inputs, self._targets = index.inputs, index.targets
        self._tensors = {spec.name: spec for spec in index.tensors}
        self._dims = {name: column for column, name in enumerate(index.record.dims if index.record else ())}
        self._lengths_nV: StoredLengths = _load(folder, LENGTHS, index.lengths)
        if self._lengths_nV.shape != (index.lengths.examples, index.columns) or self._lengths_nV.dtype.kind != "u":
            raise TrainError(f"{folder}/{LENGTHS} does not hold what the index says; write the shards again.")
        self._nbytes_n = np.zeros(len(self._lengths_nV), np.int64)
        for array in index.arrays:
            self._nbytes_n += array.nbytes(self._lengths_nV)
        ends = np.cumsum(np.concatenate(([0], self._nbytes_n)))
        counts = [shard.examples for shard in index.shards]
        starts = ends[np.cumsum([0, *counts])]
        self._starts_n = ends[:-1] - np.repeat(starts[:-1], counts)
        self.files = [
            OpenShard(folder, shard, np.dtype(np.uint8), (size,), verify)
            for shard, size in zip(index.shards, np.diff(starts).tolist(), strict=True)
        ]

    @property
    def target_axes(self) -> Any:
        """The axes of the targets, in a tree of their form; None if no axis has a name."""
        axes = [array.axes for array in self._targets]
        named = any(name is not None for each in axes for name in each or ())
        return self.tree.filled(axes) if named else None

    def targets(self, indices_B: Indices) -> list[Array]:
        """See `ShardRows`."""
        return [array.empty(len(indices_B)) for array in self._targets]

    def read(self, index: int, shard: int, inputs_1: Array, targets_B: Sequence[Array], row: int) -> str | None:
        """See `ShardRows`."""
        content = np.empty(int(self._nbytes_n[index]), np.uint8)
        wrong = self.files[shard].read(int(self._starts_n[index]), content.data)
        if wrong is not None:
            return wrong
        lengths_V, start = self._lengths_nV[index].tolist(), 0
        for name, column in self._dims.items():
            inputs_1[name] = lengths_V[column]
        for array in self._inputs:
            start = array.read(content, start, lengths_V, inputs_1[array.name] if array.name else inputs_1)
        for array, target_B in zip(self._targets, targets_B, strict=True):
            start = array.read(content, start, lengths_V, target_B[row : row + 1])
        assert start == len(content), (start, len(content))
        return None

    def bound(self, record: RecordSpec) -> "TreeShardRows":
        """Return the examples as records of an application's inputs, such as those with another `max` of a `Dim`.

        Raises:
            TrainError: They do not fit.
        """
        made, lengths, renamed = copy(self), list(self._lengths_nV.T), dict[int, Dim]()
        made.record, made._dims = record, {}
        made._inputs, made._tensors = self._inputs_for(record)
        stored = {array.name: array for array in made._inputs}
        for name, spec in record.by_name.items():
            made._check_spec(spec)
            for size, room, column in zip(spec.shape, stored[name].room, stored[name].lengths, strict=True):
                sizes_n = np.full(len(self._lengths_nV), room, STORED_LENGTHS) if column is None else lengths[column]
                if not isinstance(size, Dim):
                    self._check_sizes(spec, sizes_n, sizes_n == size, f"and the application declares {spec.describe()}")
                    continue
                self._check_range(spec, sizes_n, size)
                if size.name not in made._dims:
                    made._dims[size.name] = len(lengths) if column is None else column
                    lengths += [sizes_n] if column is None else []
                same_n = sizes_n == lengths[made._dims[size.name]]
                self._check_sizes(spec, sizes_n, same_n, f"and another array has another number of {size.name}")
                if column is not None:
                    # As in `ArraySet`, the first name of equal lengths is that of the targets.
                    renamed.setdefault(column, size)
        if len(lengths) > self._lengths_nV.shape[1]:
            made._lengths_nV = np.stack(lengths, 1)
        old = {name: renamed.get(column) for name, column in self._dims.items()}
        made._targets = tuple(self._renamed(array, old) for array in self._targets)
        return made

    def _inputs_for(self, record: RecordSpec) -> tuple[tuple[StoredArray, ...], dict[str, TensorSpec]]:
        """Return the stored inputs and their tensors under the names of an application's."""
        if list(self._tensors) == ["input"] and len(record.tensors) == 1:
            # A list that was given without a name.
            (name,) = record.by_name
            return (replace(self._inputs[0], name=name),), {name: replace(self._tensors["input"], name=name)}
        if set(self._tensors) != set(record.by_name):
            raise TrainError(
                f"the shards in {self._folder} have the inputs {', '.join(map(repr, self._tensors))}, and the "
                f"application {', '.join(map(repr, record.by_name))}; write the shards again."
            )
        return self._inputs, self._tensors

    def _check_spec(self, spec: TensorSpec) -> None:
        own = self._tensors[spec.name]
        if (own.dtype, len(own.shape)) != (spec.dtype, len(spec.shape)):
            raise TrainError(
                f"{spec.name!r} of the shards in {self._folder} is {own.describe()}, and the application declares "
                f"{spec.describe()}; write the shards again."
            )
        if spec.limits not in (None, own.limits):
            raise TrainError(
                f"{spec.name!r} of the shards in {self._folder} has the limits {own.limits}, and the application "
                f"declares {spec.limits}; write the shards again, of examples that are the application's "
                f"('penstock shard --app APP', or record=app.input)."
            )

    def _check_range(self, spec: TensorSpec, sizes_n: StoredLengths, dim: Dim) -> None:
        self._check_sizes(spec, sizes_n, sizes_n >= dim.min, f"and {dim.name} must be at least {dim.min:,}")
        self._check_sizes(spec, sizes_n, sizes_n <= int(dim), f"and {dim.name} may be at most {int(dim):,}")

    def _check_sizes(self, spec: TensorSpec, sizes_n: StoredLengths, fits_n: npt.NDArray[np.bool_], why: str) -> None:
        if not fits_n.all():
            row = int(fits_n.argmin())
            raise TrainError(
                f"{spec.name!r} of example {row:,} of the shards in {self._folder} has {sizes_n[row]:,} entries along "
                f"an axis, {why}; change the application, or write shards of examples that fit."
            )

    def _renamed(self, array: StoredArray, dims: dict[str, Dim | None]) -> StoredArray:
        """Return a target whose axes have the names and the largest lengths of an application's dimensions."""
        axes, room = list(array.axes or ()), list(array.room)
        for axis, name in enumerate(axes):
            dim = None if name is None else dims[name]
            axes[axis] = None if dim is None else dim.name
            column = array.lengths[axis]
            if dim is None or column is None:
                continue
            largest = int(self._lengths_nV[:, column].max())
            if largest > int(dim):
                raise TrainError(
                    f"a target of the shards in {self._folder} has {largest:,} {dim.name}, and the application "
                    f"declares {dim}; write the shards again."
                )
            room[axis] = int(dim)
        return replace(array, axes=None if array.axes is None else tuple(axes), room=tuple(room))


def _load(folder: ShardFolder, name: str, described: ShardFile) -> Array:
    """Read the file with an entry for every example."""
    wrong = folder.ready(replace(described, file=name), verify=False)
    if wrong is not None:
        raise TrainError(wrong)
    try:
        content = (folder.path / name).read_bytes()
    except OSError as error:
        raise TrainError(f"{folder}/{name} cannot be read ({error.strerror}); write the shards again.") from None
    if len(content) != described.bytes or hashlib.sha256(content).hexdigest() != described.sha256:
        raise TrainError(f"{folder}/{name} is not as it was written; write the shards again.")
    return np.load(io.BytesIO(content), allow_pickle=False)
