"""The lengths of rows that vary in size, on a small grid.

A row has one length. With one dimension it is that dimension's length. With several, each is scaled by the ratio of the
largest dimension to its own maximum, and the row's length is the largest result. Rows of the same *length bucket* are
nearly equally long: the edges of the buckets are powers of two and the largest length.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Self, cast, final

import numpy as np
import numpy.typing as npt

from penstock.core.dim import Dim
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array

# R rows

MAX_LENGTHS = 8

Lengths = npt.NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True)
class LengthGrid:
    """The length buckets of an input.

    Args:
        dims: The dimensions of the input, in the order of a record's lengths.
        edges: The largest length of each bucket, ascending.
    """

    dims: tuple[Dim, ...]
    edges: tuple[int, ...]

    @classmethod
    def of(cls, input: ChunkSpec) -> Self | None:
        """Return the grid of an input; None where its size is fixed."""
        if not isinstance(input, RecordSpec) or not input.dims:
            return None
        dims = tuple(input.dims.values())
        longest = max(map(int, dims))
        shortest = max(_scaled(dim.min, dim, longest) for dim in dims)
        powers = [1 << exponent for exponent in range(longest.bit_length()) if shortest <= 1 << exponent < longest]
        return cls(dims, (*powers[-(MAX_LENGTHS - 1) :], longest))

    @property
    def longest(self) -> int:
        """The largest length of a row."""
        return self.edges[-1]

    @property
    def shortest(self) -> tuple[int, ...]:
        """The smallest length of each bucket."""
        return (1, *(edge + 1 for edge in self.edges[:-1]))

    def bucket(self, length: int) -> int:
        """Index of the smallest bucket that holds a row of this length."""
        return bisect_left(self.edges, length)

    def length_of(self, record: Array | bytes) -> int:
        """Return the length of one record, also given as bytes: its lengths come first."""
        if isinstance(record, bytes):
            lengths = cast("tuple[int, ...]", Struct(f"{len(self.dims)}q").unpack_from(record))
        else:
            lengths = [record[dim.name].item() for dim in self.dims]
        return max(1, *(_scaled(each, dim, self.longest) for each, dim in zip(lengths, self.dims, strict=True)))

    def lengths_of(self, records: Array) -> Lengths:
        """Return the lengths `[R]` of records `[R]`."""
        scaled = [-(-records[dim.name] * self.longest // int(dim)) for dim in self.dims]
        return np.maximum.reduce([*scaled, np.ones(len(records), np.int64)])

    def sizes_at(self, length: int) -> dict[str, int]:
        """Return the largest sizes of the dimensions of a row of this length, by name."""
        return {dim.name: max(dim.min, length * int(dim) // self.longest) for dim in self.dims}


def resized(spec: RecordSpec, record: Array, sizes: dict[str, int]) -> Array:
    """Make a record of other lengths by repeating the entries of one along its dimensions.

    Args:
        spec: The spec of both.
        record: One record.
        sizes: The new length of each dimension.

    Returns:
        `[1]`, one record.
    """
    arrays: dict[str, Array] = {}
    for name, array in spec.unpack(record).items():
        for axis, size in enumerate(spec.by_name[name].shape):
            if isinstance(size, Dim):
                array = _repeated(array, axis, sizes[size.name])
        arrays[name] = array[None]
    return spec.records(arrays, {name: np.array([size]) for name, size in sizes.items()})


def _repeated(array: Array, axis: int, size: int) -> Array:
    if not array.shape[axis]:
        shape: Sequence[int] = (*array.shape[:axis], size, *array.shape[axis + 1 :])
        return np.zeros(shape, array.dtype)
    return np.take(array, np.arange(size) % array.shape[axis], axis)


def _scaled(length: int, dim: Dim, longest: int) -> int:
    return -(-length * longest // int(dim))
