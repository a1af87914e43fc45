"""Inputs of some rows as the network takes them, and the rows that have none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core.errors import InvalidInput
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array

# n rows

Places = npt.NDArray[np.int64]


@final
@dataclass(kw_only=True, slots=True)
class Chunks:
    """The inputs of n rows.

    Args:
        array: `[n, *input.shape]`, or whole signals, one for each row. What a row with an error has is never used.
        errors: Why a row has no input, in a sentence, by its place.
        sizes: Height and width of the decoded picture of each row, where answers are given in its pixels.
    """

    array: Array | list[Array]
    errors: dict[int, str] = field(default_factory=dict[int, str])
    sizes: list[tuple[int, int]] | None = None

    @property
    def good(self) -> Places:
        """The places of the rows without an error."""
        places = np.arange(len(self.array))
        return np.delete(places, sorted(self.errors)) if self.errors else places


def arrow_numbers(array: Array, kind: Any, null: Array | None = None) -> Any:
    """An Arrow array over the memory of numbers `[n]`.

    `pa.array` would import pandas, which takes a second.

    Args:
        array: The numbers.
        kind: Their Arrow type.
        null: `[n]`, true where a value is null.
    """
    packed = np.packbits(array, bitorder="little") if pa.types.is_boolean(kind) else np.ascontiguousarray(array)
    validity = None if null is None else pa.py_buffer(np.packbits(~null, bitorder="little"))
    return pa.Array.from_buffers(kind, len(array), [validity, pa.py_buffer(packed)])


def arrow_texts(texts: Sequence[str | bytes | None]) -> Any:
    """An Arrow array of texts, some of them null."""
    null = np.array([text is None for text in texts], np.bool_)
    encoded = [text.encode() if isinstance(text, str) else text or b"" for text in texts]
    offsets = np.zeros(len(encoded) + 1, np.int32)
    np.cumsum([len(each) for each in encoded], out=offsets[1:])
    validity = pa.py_buffer(np.packbits(~null, bitorder="little")) if null.any() else None
    return pa.StringArray.from_buffers(len(encoded), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)), validity)


def numpy_type(kind: Any) -> np.dtype[Any]:
    """The NumPy dtype of an Arrow type of numbers."""
    return np.dtype({"float": "float32", "double": "float64", "halffloat": "float16"}.get(str(kind), str(kind)))


def numpy_numbers(array: Any) -> Array:
    """The memory of an Arrow array of numbers, whatever its nulls hold; bools are unpacked.

    `to_numpy` would import pandas too.
    """
    data, count = array.buffers()[1], len(array)
    if data is None or not count:
        return np.zeros(count, numpy_type(array.type))
    if pa.types.is_boolean(array.type):
        bits = np.frombuffer(data, np.uint8)[array.offset // 8 :]
        first = array.offset % 8
        return np.unpackbits(bits, count=first + count, bitorder="little")[first:].view(np.bool_)
    return np.frombuffer(data, numpy_type(array.type))[array.offset : array.offset + count]


def nulls_of(array: Any) -> Array:
    """A mask `[n]` of the values of an Arrow array that are null."""
    return numpy_numbers(array.is_null())


def empty_chunks(spec: ChunkSpec, count: int) -> Array:
    """Allocate `[n, *shape]` of zeros."""
    return spec.empty(count) if isinstance(spec, RecordSpec) else np.zeros((count, *spec.shape), spec.numpy_dtype)


def check_chunks(spec: ChunkSpec, chunks: Chunks) -> None:
    """Note an error for each row whose numbers are not valid: NaN, infinity, or beyond the limits."""
    array = chunks.array
    assert isinstance(array, np.ndarray)
    good = chunks.good

    def check(rows: Places | slice) -> str:
        try:
            spec.check_numbers(array[rows])
        except InvalidInput as error:
            return str(error)
        return ""

    if good.size and check(good if chunks.errors else slice(None)):
        note_each(chunks, good, lambda row: check(slice(row, row + 1)))


def note_each(chunks: Chunks, rows: Places, check: Callable[[int], str]) -> None:
    """Note the error of each row that `check` gives a sentence for."""
    for row in rows.tolist():
        if sentence := check(row):
            chunks.errors[row] = sentence
