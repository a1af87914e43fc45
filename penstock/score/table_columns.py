"""Arrow columns of tensors as the inputs of a network, without a copy where a tensor's size is fixed.

A tensor is a column of fixed-size lists, of lists where its first dimension varies in length, of numbers where it has
no dimensions, or of its raw little-endian bytes. Lists may be flat or nested.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.core.dim import Dim
from penstock.core.errors import InvalidInput, ScoreError
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.score.chunks import Chunks, check_chunks, nulls_of, numpy_numbers

# n rows

Bounds = npt.NDArray[np.int64]
_NULL = "the row has no {} (null); give a value."


def is_bytes(type: Any) -> bool:
    """True for a column of binary values."""
    types = pa.types
    return types.is_binary(type) or types.is_large_binary(type) or types.is_fixed_size_binary(type)


def is_text(type: Any) -> bool:
    """True for a column of texts."""
    types = pa.types
    return types.is_string(type) or types.is_large_string(type) or types.is_string_view(type)


def check_column(name: str, type: Any, spec: TensorSpec, *, signal: bool = False) -> None:
    """Check that a column can hold a tensor.

    Args:
        name: The column, for messages.
        type: Its Arrow type.
        spec: The tensor.
        signal: It is a whole signal: its first dimension has any size.

    Raises:
        ScoreError: It is of another type or size.
    """
    if is_bytes(type):
        fits = not pa.types.is_fixed_size_binary(type) or spec.dims or signal or type.byte_width == spec.nbytes
    else:
        sizes, leaf = _levels(type)
        free = [(signal and not at) or isinstance(size, Dim) for at, size in enumerate(spec.shape)]
        fits = leaf == _leaf(spec)
        if len(sizes) == 1 and spec.shape:
            # Flat, whatever the shape.
            fits = fits and not any(free[1:]) and (free[0] or sizes[0] in (None, spec.size))
        else:
            fits = fits and len(sizes) == len(spec.shape)
            fits = fits and all(
                any_size or size is None or size == int(expected)
                for any_size, size, expected in zip(free, sizes, spec.shape, strict=True)
            )
    if not fits:
        raise ScoreError(
            f"column {name!r} is {type}, and the input {spec.name!r} is {spec.describe()}; give lists of "
            f"{_leaf(spec)}, or the raw bytes of each tensor."
        )


def _leaf(spec: TensorSpec) -> Any:
    return pa.from_numpy_dtype(spec.numpy_dtype)


def _is_list(type: Any) -> bool:
    return pa.types.is_list(type) or pa.types.is_large_list(type) or pa.types.is_fixed_size_list(type)


def _levels(leaf: Any) -> tuple[list[int | None], Any]:
    """The sizes of nested lists, None where any, and the type of what is in them."""
    sizes: list[int | None] = []
    while _is_list(leaf):
        sizes.append(leaf.list_size if pa.types.is_fixed_size_list(leaf) else None)
        leaf = leaf.value_type
    return sizes, leaf


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """A column of tensors.

    Args:
        flat: The numbers of all rows, `[m]`.
        bounds: Where each row begins and ends in them, `[n + 1]`.
        errors: Rows without a tensor.
    """

    flat: Array
    bounds: Bounds
    errors: dict[int, str]


def column_chunks(columns: Mapping[str, Any], spec: ChunkSpec, *, signal: bool = False) -> Chunks:
    """Make the inputs of the rows of a batch.

    Args:
        columns: A checked column for each tensor by its name, `[n]`; one with a default may be missing.
        spec: One input.
        signal: The inputs are whole signals.
    """
    if signal:
        assert isinstance(spec, TensorSpec)
        return _signals(columns[spec.name], spec)
    if isinstance(spec, TensorSpec):
        array, errors = _fixed(columns[spec.name], spec)
        chunks = Chunks(array=array, errors=errors)
    else:
        chunks = _records(columns, spec)
    check_chunks(spec, chunks)
    return chunks


def _signals(column: Any, spec: TensorSpec) -> Chunks:
    inner = spec.shape[1:]
    size = int(np.prod(inner, dtype=np.int64))
    rows = _rows(column, spec, size)
    frames = rows.flat.reshape(-1, *inner)
    ends = (rows.bounds // size).tolist()
    chunks = Chunks(array=[frames[ends[row] : ends[row + 1]] for row in range(len(column))], errors=rows.errors)
    for row, signal in enumerate(chunks.array):
        if not len(signal):
            chunks.errors.setdefault(row, f"the signal of {spec.name!r} is empty; give one frame at least.")
            continue
        try:
            spec.check_numbers(signal)
        except InvalidInput as error:
            chunks.errors.setdefault(row, str(error))
    return chunks


def _fixed(column: Any, spec: TensorSpec) -> tuple[Array, dict[int, str]]:
    """A column of tensors of one size, `[n, *shape]`: a view of its memory where every row is whole."""
    rows, count = _rows(column, spec, spec.size), len(column)
    lengths = np.diff(rows.bounds)
    errors = rows.errors
    for row in np.flatnonzero(lengths != spec.size).tolist():
        errors.setdefault(
            row, f"{spec.title} has {lengths[row]:,} numbers; it must be {spec.describe()}, {spec.size:,} of them."
        )
    if (lengths == spec.size).all():
        return rows.flat[rows.bounds[0] : rows.bounds[-1]].reshape(count, *spec.shape), errors
    array = np.zeros((count, spec.size), spec.numpy_dtype)
    for row in np.flatnonzero(lengths == spec.size).tolist():
        array[row] = rows.flat[rows.bounds[row] : rows.bounds[row + 1]]
    return array.reshape(count, *spec.shape), errors


def _records(columns: Mapping[str, Any], spec: RecordSpec) -> Chunks:
    count = len(next(iter(columns.values())))
    records, errors = spec.empty(count), dict[int, str]()
    lengths: dict[str, tuple[str, Bounds]] = {}
    ragged: list[tuple[TensorSpec, _Rows]] = []
    for tensor in spec.tensors:
        if tensor.name not in columns:
            records[tensor.name] = tensor.filled
        elif not tensor.dims:
            records[tensor.name], wrong = _fixed(columns[tensor.name], tensor)
            errors |= wrong
        elif tensor.dims[1:] or not isinstance(tensor.shape[0], Dim):
            # Lengths inside: one by one.
            return _nested(columns, spec)
        else:
            inner = tensor.size // int(tensor.shape[0])
            rows = _rows(columns[tensor.name], tensor, inner)
            errors |= rows.errors
            found = np.diff(rows.bounds) // inner
            _check_lengths(tensor, tensor.shape[0], found, lengths, errors)
            ragged.append((tensor, rows))
    for dim, (_, found) in lengths.items():
        records[dim] = found
    if errors:
        records[sorted(errors)] = np.zeros((), spec.numpy_dtype)
    for tensor, rows in ragged:
        _fill(records[tensor.name], tensor, rows, errors)
    return Chunks(array=records, errors=errors)


def _check_lengths(
    tensor: TensorSpec, dim: Dim, found: Bounds, lengths: dict[str, tuple[str, Bounds]], errors: dict[int, str]
) -> None:
    for row in np.flatnonzero((found < dim.min) | (found > int(dim))).tolist():
        errors.setdefault(
            row, f"{tensor.name} has {found[row]:,} {dim.name}; it must have from {dim.min:,} to {int(dim):,}."
        )
    other, first = lengths.setdefault(dim.name, (tensor.name, found))
    for row in np.flatnonzero(found != first).tolist():
        errors.setdefault(
            row,
            f"{tensor.name} has {found[row]:,} {dim.name} and {other} has {first[row]:,}; give both equally long.",
        )


def _fill(into: Array, tensor: TensorSpec, rows: _Rows, errors: Mapping[int, str]) -> None:
    """Copy the numbers of each row to its record."""
    inner = tensor.shape[1:]
    size = int(np.prod(inner, dtype=np.int64))
    flat, bounds = rows.flat.reshape(-1, *inner), rows.bounds // size
    if errors:
        for row in range(len(into)):
            if row not in errors:
                into[row, : bounds[row + 1] - bounds[row]] = flat[bounds[row] : bounds[row + 1]]
        return
    lengths = np.diff(bounds)
    room = int(lengths.max(initial=0))
    into[:, :room][np.arange(room) < lengths[:, None]] = flat[bounds[0] : bounds[-1]]


def _nested(columns: Mapping[str, Any], spec: RecordSpec) -> Chunks:
    values = {name: column.to_pylist() for name, column in columns.items()}
    records, errors = spec.empty(len(next(iter(values.values())))), dict[int, str]()
    for row in range(len(records)):
        try:
            records[row] = spec.from_numbers({name: given[row] for name, given in values.items()})
        except InvalidInput as error:
            errors[row] = str(error)
    return Chunks(array=records, errors=errors)


def _rows(column: Any, spec: TensorSpec, multiple: int) -> _Rows:
    """The numbers of a column; a row has a multiple of so many, or an error and none."""
    errors: dict[int, str] = {}
    if column.null_count:
        nulls = np.flatnonzero(nulls_of(column)).tolist()
        errors = dict.fromkeys(nulls, _NULL.format(repr(spec.name)))
    if is_bytes(column.type):
        rows = _of_bytes(column, spec, multiple)
    else:
        rows = _of_lists(column, spec)
    if errors or rows.errors or (np.diff(rows.bounds) % multiple).any():
        return _without_bad(rows, spec, multiple, errors)
    return rows


def _without_bad(rows: _Rows, spec: TensorSpec, multiple: int, errors: dict[int, str]) -> _Rows:
    lengths = np.diff(rows.bounds)
    errors = errors | {row: each for row, each in rows.errors.items() if row not in errors}
    for row in np.flatnonzero(lengths % multiple).tolist():
        errors.setdefault(row, f"{spec.title} has {lengths[row]:,} numbers; it must be {spec.describe()}.")
    keep = np.ones(len(lengths), np.bool_)
    keep[sorted(errors)] = False
    flat = np.concatenate(
        [
            np.zeros(0, rows.flat.dtype),
            *(rows.flat[rows.bounds[row] : rows.bounds[row + 1]] for row in np.flatnonzero(keep)),
        ]
    )
    return _Rows(flat=flat, bounds=np.concatenate([[0], np.cumsum(np.where(keep, lengths, 0))]), errors=errors)


def _of_bytes(column: Any, spec: TensorSpec, multiple: int) -> _Rows:
    dtype, count = spec.numpy_dtype, len(column)
    if pa.types.is_fixed_size_binary(column.type):
        width, data = column.type.byte_width, column.buffers()[1]
        bounds = (np.arange(count + 1) + column.offset) * width
    else:
        _, offsets, data = column.buffers()
        kind = np.int64 if pa.types.is_large_binary(column.type) else np.int32
        bounds = np.zeros(1, np.int64)
        if offsets is not None and count:
            bounds = np.frombuffer(offsets, kind)[column.offset : column.offset + count + 1].astype(np.int64)
    body = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
    bounds = bounds - bounds[0]
    lengths, errors = np.diff(bounds), dict[int, str]()
    wrong = lengths % (dtype.itemsize * multiple) != 0
    if wrong.any():
        for row in np.flatnonzero(wrong).tolist():
            errors[row] = f"{spec.title} has {lengths[row]:,} raw bytes; it must be {spec.describe()}."
        keep = np.repeat(~wrong, lengths)
        body, bounds = body[keep], np.concatenate([[0], np.cumsum(np.where(wrong, 0, lengths))])
    if body.ctypes.data % dtype.alignment:
        body = body.copy()
    if spec.dtype == "bool" and body.size and body.max() > 1:
        for row in range(count):
            if (body[bounds[row] : bounds[row + 1]] > 1).any():
                errors[row] = f"{spec.title} holds a byte above 1; each bool is one byte, 0 or 1."
    return _Rows(flat=body.view(dtype), bounds=bounds // dtype.itemsize, errors=errors)


def _of_lists(column: Any, spec: TensorSpec) -> _Rows:
    count, errors = len(column), dict[int, str]()
    bounds: Bounds = np.arange(count + 1)
    is_flat = _is_list(column.type) and not _is_list(column.type.value_type)
    values, depth = column, 0
    while _is_list(values.type):
        if depth:
            _note_nulls(values, bounds, spec, errors)
        # `values` of a list is what it lists, without regard to its offset.
        if pa.types.is_fixed_size_list(values.type):
            bounds = (bounds + values.offset) * values.type.list_size
        else:
            offsets = numpy_numbers(values.offsets)
            if not is_flat and depth and (size := _size_at(spec, depth)) is not None:
                _note_sizes(np.diff(offsets), bounds, size, spec, errors)
            bounds = offsets[bounds].astype(np.int64)
        values, depth = values.values, depth + 1
    begin, end = int(bounds[0]), int(bounds[-1])
    used, bounds = values.slice(begin, end - begin), bounds - begin
    _note_nulls(used, bounds, spec, errors)
    return _Rows(flat=numpy_numbers(used), bounds=bounds, errors=errors)


def _note_nulls(values: Any, bounds: Bounds, spec: TensorSpec, errors: dict[int, str]) -> None:
    if not values.null_count:
        return
    nulls = np.concatenate([[0], np.cumsum(nulls_of(values))])
    for row in np.flatnonzero(np.diff(nulls[bounds])).tolist():
        errors.setdefault(row, f"{spec.title} holds null; give numbers.")


def _note_sizes(sizes: Bounds, bounds: Bounds, size: int, spec: TensorSpec, errors: dict[int, str]) -> None:
    wrong = np.concatenate([[0], np.cumsum(sizes != size)])
    for row in np.flatnonzero(np.diff(wrong[bounds])).tolist():
        errors.setdefault(row, f"{spec.title} has lists of other lengths than {size:,}; it must be {spec.describe()}.")


def _size_at(spec: TensorSpec, depth: int) -> int | None:
    if depth >= len(spec.shape) or isinstance(spec.shape[depth], Dim):
        return None
    return int(spec.shape[depth])
