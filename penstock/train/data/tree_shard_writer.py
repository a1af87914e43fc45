"""Writing of examples that are trees: bytes of one example after another, and the lengths of each."""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np

from penstock.core.dim import Dim
from penstock.core.errors import TrainError
from penstock.core.spec import Array
from penstock.core.storage.atomic_write import sync
from penstock.train.data.examples import Examples
from penstock.train.data.readers import Piece
from penstock.train.data.shard_file import ShardFile, describe_file
from penstock.train.data.shard_index import LENGTHS, TreeIndex
from penstock.train.data.stored_array import (
    STORED_LENGTHS,
    StoredArray,
    StoredLengths,
    padding_of,
    sizes_without_padding,
)
from penstock.train.data.tree_form import TreeForm
from penstock.train.data.trees import Tree

# P examples of a piece, V lengths of an example


def write_trees(
    folder: Path, examples: Examples, shard_bytes: int, pieces: Iterator[Piece], classes: tuple[str, ...]
) -> TreeIndex:
    """Write the shards and lengths of examples to a folder; return their index.

    Args:
        folder: The folder.
        examples: The set.
        shard_bytes: The maximal size of a shard; one example may be larger.
        pieces: All examples in order, with targets of the same form; at least one.
        classes: The names of the targets.

    Raises:
        TrainError: The lengths of an example are not those that are declared.
    """
    first = next(pieces)
    made = _StoredExamples(examples, first.targets_P)
    lengths: list[StoredLengths] = []

    def contents() -> Iterator[bytes]:
        piece: Piece | None = first
        while piece is not None:
            lengths_PV = made.lengths(piece)
            lengths.append(lengths_PV)
            yield from made.contents(piece, lengths_PV)
            piece = next(pieces, None)

    shards = [_write_shard(folder / f"{number:05d}.npy", part) for number, part in _shards(contents(), shard_bytes)]
    with (folder / LENGTHS).open("wb") as file:
        np.save(file, np.concatenate(lengths), allow_pickle=False)
    sync(folder / LENGTHS)
    return TreeIndex(
        tensors=() if examples.record is None else examples.record.tensors,
        inputs=made.inputs,
        tree=made.tree,
        targets=made.targets,
        classes=classes,
        lengths=describe_file(folder / LENGTHS, sum(map(len, lengths))),
        shards=tuple(shards),
    )


def write_array_header(file: BinaryIO, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Write the header of an array in NumPy's format; its length is the same for any size of the first dim."""
    fields: dict[str, Any] = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(file, fields)


@final
class _StoredExamples:
    """The arrays of an example, and their bytes.

    Args:
        examples: The set.
        targets: The tree of the targets of some examples.
    """

    def __init__(self, examples: Examples, targets: Tree) -> None:
        self._record = examples.record
        dims = {} if self._record is None else self._record.dims
        columns = {name: column for column, name in enumerate(dims)}
        if self._record is None:
            shape = tuple(examples.input_shape)
            plain = StoredArray(dtype=examples.input_dtype.name, room=shape, lengths=(None,) * len(shape))
            self.inputs: tuple[StoredArray, ...] = (plain,)
        else:
            self.inputs = tuple(
                StoredArray(
                    name=spec.name,
                    dtype=spec.dtype,
                    room=tuple(int(size) for size in spec.shape),
                    lengths=tuple(columns[size.name] if isinstance(size, Dim) else None for size in spec.shape),
                )
                for spec in self._record.tensors
            )
        self.tree = TreeForm.of(targets, "targets")
        arrays = self.tree.leaves(targets)
        axes: list[Any] = self.tree.leaves(_axes_of(self.tree.form, examples.target_axes))
        used, made = len(columns), list[StoredArray]()
        for array, names in zip(arrays, axes, strict=True):
            rank = array.ndim - 1
            made.append(
                StoredArray(
                    dtype=array.dtype.name,
                    room=array.shape[1:],
                    lengths=tuple(range(used, used + rank)),
                    axes=None if names is None else tuple(names),
                    padding=padding_of(array.dtype),
                )
            )
            used += rank
        self.targets = tuple(made)

    def lengths(self, piece: Piece) -> StoredLengths:
        """Return the lengths `[P, V]` of the examples of a piece."""
        found: list[Array] = []
        for name, dim in (self._record.dims if self._record else {}).items():
            lengths_P = piece.inputs_P[name]
            wrong_P = (lengths_P < dim.min) | (lengths_P > int(dim))
            if wrong_P.any():
                row = int(wrong_P.argmax())
                raise TrainError(
                    f"example {piece.indices_P[row]:,} has {lengths_P[row]:,} {name}; it must have from {dim.min:,} to "
                    f"{int(dim):,}."
                )
            found.append(lengths_P[:, None])
        for stored, array_P in zip(self.targets, self.tree.leaves(piece.targets_P), strict=True):
            found.append(sizes_without_padding(array_P, stored.padding))
        none = np.zeros((len(piece.indices_P), 0), STORED_LENGTHS)
        return np.concatenate([none, *found], axis=1).astype(STORED_LENGTHS)

    def contents(self, piece: Piece, lengths_PV: StoredLengths) -> Iterator[bytes]:
        """Return the bytes of each example of a piece."""
        arrays = [piece.inputs_P[stored.name] if stored.name else piece.inputs_P for stored in self.inputs]
        arrays += self.tree.leaves(piece.targets_P)
        all_stored = [*self.inputs, *self.targets]
        for row, lengths_V in enumerate(lengths_PV.tolist()):
            yield b"".join(
                stored.to_bytes(array_P[row], lengths_V) for stored, array_P in zip(all_stored, arrays, strict=True)
            )


def _axes_of(form: Any, axes: Any) -> Tree:
    """Return the axes of each array in a tree of a form; None for an array without axes."""
    if isinstance(form, dict):
        return {name: _axes_of(part, (axes or {}).get(name)) for name, part in form.items()}
    if isinstance(form, tuple):
        return tuple(_axes_of(part, own) for part, own in zip(form, axes or [None] * len(form), strict=True))
    return axes


def _shards(contents: Iterator[bytes], shard_bytes: int) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Divide the bytes of examples into shards, each with its number."""

    def numbered() -> Iterator[tuple[int, bytes]]:
        number = size = 0
        for content in contents:
            if size and size + len(content) > shard_bytes:
                number, size = number + 1, 0
            size += len(content)
            yield number, content

    for number, part in groupby(numbered(), key=itemgetter(0)):
        yield number, (content for _, content in part)


def _write_shard(place: Path, contents: Iterator[bytes]) -> ShardFile:
    count = size = 0
    with place.open("wb") as file:
        write_array_header(file, np.dtype(np.uint8), (0,))
        for content in contents:
            file.write(content)
            count, size = count + 1, size + len(content)
        file.seek(0)
        write_array_header(file, np.dtype(np.uint8), (size,))
    sync(place)
    return describe_file(place, count)
