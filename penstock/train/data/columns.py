"""Columns of examples: one array of all rows, or a list of arrays of different lengths."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError, InvalidInput, TrainError
from penstock.core.record import Lengths, RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.core.wording.counted import counted
from penstock.train.data.trees import Tree

# n examples, B examples of a batch, A axes of one row

# `[n, ...]`, or n arrays of different lengths.
Column = Array | list[Array]
# The label that cross-entropy ignores.
IGNORED = -100
# Kinds of arrays of objects, texts and dates.
NO_NUMBERS = "OSUMm"


def array_of(given: Any) -> Any:
    """Return a tensor of torch or a table of pandas as an array, and anything else as it is."""
    # By their methods, because processes that read examples import neither.
    if hasattr(given, "detach"):
        given = given.detach().cpu()
        return (given.float() if str(given.dtype) == "torch.bfloat16" else given).numpy()
    return given.to_numpy() if hasattr(given, "to_numpy") else given


def column_of(given: Any, name: str) -> Column:
    """Make a column of an array `[n, ...]`, or of a list of arrays.

    Raises:
        TrainError: It is neither, or the arrays have different numbers of dimensions.
    """
    if not isinstance(given, list | tuple):
        array = np.asarray(array_of(given))
        if array.ndim == 0 or array.dtype.kind not in "fbiu":
            raise TrainError(f"{name} is {array.dtype}{list(array.shape)}; give an array of numbers, [n, ...].")
        return array
    try:
        rows = [np.asarray(array_of(row)) for row in cast(Sequence[Any], given)]
    except ValueError as error:
        raise TrainError(
            f"{name} has an example that is no array ({error}); give one array for each example."
        ) from None
    dtypes = {row.dtype for row in rows}
    if any(dtype.kind not in "fbiu" for dtype in dtypes):
        raise TrainError(f"{name} has {', '.join(map(str, dtypes))}; give numbers, a float or an integer type.")
    if len({row.ndim for row in rows}) > 1:
        raise TrainError(f"{name} has arrays of {sorted({row.ndim for row in rows})} dimensions; give equally many.")
    if not rows or rows[0].ndim == 0:
        return np.asarray(rows)
    dtype = np.result_type(*dtypes)
    return [np.asarray(row, dtype) for row in rows]


def target_columns(given: Any, name: str = "targets") -> Tree:
    """Make columns of targets: one, or a dictionary or tuple of them.

    Whole numbers of different lengths become int64, because they are padded with -100.

    Raises:
        TrainError: As `column_of`.
    """
    if isinstance(given, Mapping):
        named = cast(Mapping[str, Any], given)
        return {key: target_columns(part, f"{name}[{key!r}]") for key, part in named.items()}
    if isinstance(given, tuple):
        parts = cast(tuple[Any, ...], given)
        return tuple(target_columns(part, f"{name}[{place}]") for place, part in enumerate(parts))
    if isinstance(given, np.ndarray) and given.ndim and given.dtype.kind not in NO_NUMBERS:
        return given
    column = column_of(given, name)
    if isinstance(column, list) and column[0].dtype.kind in "biu":
        column = [row.astype(np.int64) for row in column]
    return column


def columns_in(tree: Tree) -> list[Column]:
    """List the columns of a tree of targets."""
    if isinstance(tree, Mapping):
        return [column for part in cast(Mapping[str, Any], tree).values() for column in columns_in(part)]
    if isinstance(tree, tuple):
        return [column for part in cast(tuple[Any, ...], tree) for column in columns_in(part)]
    return [tree]


def sizes_of(column: Column) -> npt.NDArray[np.int64]:
    """Return the shape of every row, `[n, A]`."""
    if isinstance(column, np.ndarray):
        return np.broadcast_to(np.array(column.shape[1:], np.int64), (len(column), column.ndim - 1))
    return np.array([row.shape for row in column], np.int64)


def record_of(columns: Mapping[str, Column]) -> RecordSpec:
    """Describe columns: the first axis of a list of arrays varies in length, the other axes if they do.

    A length is named after the first tensor that has it, such as `input_ids_length`. Tensors that are equally long in
    every example have the same length.

    Raises:
        TrainError: The columns cannot be the inputs of a network.
    """
    for name in columns:
        if not name.isidentifier():
            raise TrainError(f"an input of the data has the name {name!r}; give it a Python identifier, such as 'ids'.")
    dims: list[tuple[Dim, Lengths]] = []
    specs: list[TensorSpec] = []
    try:
        for name, column in columns.items():
            shape: list[int | Dim] = []
            for axis, sizes_n in enumerate(sizes_of(column).T):
                if isinstance(column, np.ndarray) or (axis and (sizes_n == sizes_n[0]).all()):
                    shape.append(int(sizes_n[0]))
                    continue
                dim = next((dim for dim, known_n in dims if np.array_equal(known_n, sizes_n)), None)
                if dim is None:
                    dim = Dim(f"{name}_length" + (f"_{axis}" if axis else ""), max=max(1, int(sizes_n.max())), min=0)
                    dims.append((dim, sizes_n))
                shape.append(dim)
            dtype = (column if isinstance(column, np.ndarray) else column[0]).dtype.name
            specs.append(TensorSpec(dtype=dtype, shape=tuple(shape), meaning="", name=name))
        return RecordSpec(tuple(specs))
    except ApplicationError as error:
        raise TrainError(f"the inputs cannot be those of a network: {error}") from None


def joined_columns(one: Column, other: Column) -> Column:
    """Join the rows of two columns, so that `record_of` describes both; a type of floats wins over whole numbers."""
    dtypes = [column.dtype if isinstance(column, np.ndarray) else column[0].dtype for column in (one, other)]
    floats = [dtype for dtype in dtypes if dtype.kind == "f"]
    dtype = np.result_type(*(floats or dtypes))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        # No more than a description needs. Arrays are of fixed size; `fitted` refuses another one of the other set.
        return one[:1].astype(dtype)
    return [np.asarray(row, dtype) for column in (one, other) for row in column]


def fitted(columns: Mapping[str, Column], record: RecordSpec) -> tuple[dict[str, Column], dict[str, Lengths]]:
    """Convert columns to the dtypes of a record's tensors and check them.

    Returns:
        The columns, and the lengths `[n]` of each dimension.

    Raises:
        TrainError: A tensor is missing, unknown or not of its spec, or lengths disagree.
    """
    try:
        columns = record.named(columns)
        made = {name: _cast(column, record.by_name[name]) for name, column in columns.items()}
        count = len(next(iter(made.values()), ()))
        made |= {name: np.repeat(filled[None], count, 0) for name, filled in record.defaults(made).items()}
    except InvalidInput as error:
        raise TrainError(f"the inputs of the examples do not fit: {error}") from None
    lengths: dict[str, Lengths] = {}
    for name, column in made.items():
        shape, sizes_nA = record.by_name[name].shape, sizes_of(column)
        if sizes_nA.shape[1] != len(shape):
            raise TrainError(
                f"{name!r} of the examples has {counted(sizes_nA.shape[1], 'dimension')}; it must be "
                f"{record.by_name[name].describe()}."
            )
        for sizes_n, size in zip(sizes_nA.T, shape, strict=True):
            wrong_n, known_n = ~_fits(sizes_n, size), sizes_n
            if isinstance(size, Dim):
                known_n = lengths.setdefault(size.name, np.ascontiguousarray(sizes_n))
                wrong_n |= known_n != sizes_n
            if wrong_n.any():
                row = int(wrong_n.argmax())
                known = int(known_n[row]) if known_n[row] != sizes_n[row] else None
                raise TrainError(_wrong(record.by_name[name], row, sizes_nA[row].tolist(), size, known))
    return made, lengths


def _fits(sizes_n: Lengths, size: int) -> npt.NDArray[np.bool_]:
    return (sizes_n >= size.min) & (sizes_n <= int(size)) if isinstance(size, Dim) else sizes_n == size


def _wrong(spec: TensorSpec, row: int, shape: list[int], size: int, known: int | None) -> str:
    """Describe a wrong row; `known` is the length of another input in the same dimension, if that differs."""
    rule = f"it must be {spec.describe()}"
    if isinstance(size, Dim):
        rule += f", with from {size.min:,} to {int(size):,} {size.name}"
    if known is not None:
        rule += f", and another input has {known:,}"
    return f"{spec.name!r} of example {row:,} has the shape {shape}; {rule}."


def _cast(column: Column, spec: TensorSpec) -> Column:
    if isinstance(column, np.ndarray):
        return spec.cast(column)
    flat = spec.cast(np.concatenate([row.reshape(-1) for row in column]))
    ends = np.cumsum([row.size for row in column])[:-1]
    return [part.reshape(row.shape) for part, row in zip(np.split(flat, ends), column, strict=True)]


def fill(into_B: Array, column: Column, indices_B: Array) -> None:
    """Copy rows of a column into the first places of an array that has room for the largest."""
    if isinstance(column, np.ndarray):
        into_B[(slice(None), *(slice(size) for size in column.shape[1:]))] = column[indices_B]
        return
    for place, index in enumerate(indices_B.tolist()):
        row = column[index]
        into_B[(place, *(slice(size) for size in row.shape))] = row


def padded_rows(column: Column, room: tuple[int, ...], indices_B: Array) -> Array:
    """Return rows of a column of targets; a list's are padded to a shape, floats with 0 and others with -100."""
    if isinstance(column, np.ndarray):
        return column[indices_B]
    dtype = column[0].dtype
    rows_B = np.full((len(indices_B), *room), 0 if dtype.kind == "f" else IGNORED, dtype)
    fill(rows_B, column, indices_B)
    return rows_B


def axes_of(column: Column, lengths: Mapping[str, Lengths]) -> tuple[str | None, ...]:
    """Name, for each axis of a column of targets, the dimension of the inputs that is as long in every example."""
    if isinstance(column, np.ndarray):
        return (None,) * (column.ndim - 1)
    return tuple(
        next((name for name, known_n in lengths.items() if np.array_equal(known_n, sizes_n)), None)
        for sizes_n in sizes_of(column).T
    )
