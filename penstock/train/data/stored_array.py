"""The bytes of one array of an example in a shard, without its padding, in C order."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from penstock.core.spec import Array
from penstock.train.data.columns import IGNORED

# n examples, B examples of a batch, V lengths of an example, A axes of one array

StoredLengths = npt.NDArray[np.uint32]
STORED_LENGTHS = np.dtype("<u4")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StoredArray:
    """The arrays at one place of all examples.

    Args:
        name: The name of the input; empty for one input of fixed size, and for targets.
        dtype: NumPy's name of the dtype.
        room: The shape of one array as it is read, with padding.
        lengths: For each axis the column of its lengths, None for an axis of fixed size.
        axes: Of `Examples.target_axes`.
        padding: The number beyond the lengths.
    """

    name: str = ""
    dtype: str
    room: tuple[int, ...]
    lengths: tuple[int | None, ...]
    axes: tuple[str | None, ...] | None = None
    padding: int = 0

    def __post_init__(self) -> None:
        numbers = [*self.room, *(column for column in self.lengths if column is not None)]
        if len(self.lengths) != len(self.room) or min(numbers, default=0) < 0:
            raise ValueError(f"an array of {self.room} has lengths {self.lengths}")
        if self.axes is not None and len(self.axes) != len(self.room):
            raise ValueError(f"an array of {self.room} has the axes {self.axes}")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype as NumPy's (little-endian)."""
        return np.dtype(self.dtype).newbyteorder("<")

    def sizes(self, lengths_V: list[int]) -> tuple[int, ...]:
        """Return the shape of one array without its padding."""
        return tuple(
            size if column is None else lengths_V[column] for size, column in zip(self.room, self.lengths, strict=True)
        )

    def nbytes(self, lengths_nV: StoredLengths) -> npt.NDArray[np.int64]:
        """Return the stored bytes of each example's array, `[n]`."""
        nbytes_n = np.full(len(lengths_nV), self.numpy_dtype.itemsize, np.int64)
        for size, column in zip(self.room, self.lengths, strict=True):
            nbytes_n *= size if column is None else lengths_nV[:, column]
        return nbytes_n

    def empty(self, count: int) -> Array:
        """Allocate arrays `[count, *room]` of padding."""
        if all(column is None for column in self.lengths):
            return np.empty((count, *self.room), self.numpy_dtype)
        return np.full((count, *self.room), self.padding, self.numpy_dtype)

    def to_bytes(self, array: Array, lengths_V: list[int]) -> bytes:
        """Return the bytes of one array `[*room]`."""
        valid = array[(*(slice(size) for size in self.sizes(lengths_V)), ...)]
        return np.asarray(valid, self.numpy_dtype).tobytes()

    def read(self, content: Array, start: int, lengths_V: list[int], into_1: Array) -> int:
        """Copy one array from the bytes of its example.

        Args:
            content: The bytes.
            start: The first byte of this array.
            lengths_V: The example's lengths.
            into_1: The destination, `[1, *room]` or larger.

        Returns:
            The first byte after it.
        """
        sizes = self.sizes(lengths_V)
        # A view of the bytes; an array may begin at any of them.
        stored = np.ndarray(sizes, self.numpy_dtype, content.data, start)
        into_1[(0, *(slice(size) for size in sizes))] = stored
        return start + stored.nbytes


def padding_of(dtype: np.dtype[Any]) -> int:
    """Return the padding of targets: -100 for signed whole numbers, which cross-entropy ignores, otherwise 0."""
    return IGNORED if dtype.kind == "i" else 0


def sizes_without_padding(array_B: Array, padding: int) -> StoredLengths:
    """Find the smallest shape of each array that holds all numbers other than padding, `[B, A]`.

    Numbers are compared by their bits, so that -0.0 and NaN are no padding.
    """
    bits = np.dtype(f"u{array_B.dtype.itemsize}")
    found_B = np.ascontiguousarray(array_B).view(bits) != np.array(padding, array_B.dtype).view(bits)
    sizes_BA = np.zeros((len(array_B), array_B.ndim - 1), STORED_LENGTHS)
    if found_B.size:
        for axis in range(1, array_B.ndim):
            others = tuple(other for other in range(1, array_B.ndim) if other != axis)
            reached = found_B.any(others) if others else found_B
            sizes_BA[:, axis - 1] = np.where(reached.any(1), reached.shape[1] - reached[:, ::-1].argmax(1), 0)
    return sizes_BA
