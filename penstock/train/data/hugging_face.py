"""Rows of a Hugging Face `datasets.Dataset`, read from its Arrow tables; files in it are not decoded here."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, final

import numpy as np
import pyarrow as pa
from datasets import Audio, ClassLabel, Dataset, Image, Value
from pyarrow import compute

from penstock.core.errors import TrainError
from penstock.core.spec import Array
from penstock.train.data.fingerprint import DIGITS, spread_indices
from penstock.train.data.row_source import Kind, RowSource, Values, no_value, unreadable_row
from penstock.train.data.sampler import Indices

# n rows of the dataset, B rows that are read

# Its functions are made at import, which a type checker does not see.
pc: Any = compute

# Rows of a table that a fingerprint looks at together, and of how many such tables.
TABLE_ROWS, MAX_TABLES = 1 << 16, 256


@final
class ArrowRows(RowSource):
    """Rows of a `datasets.Dataset`.

    Args:
        dataset: The dataset.

    Raises:
        TrainError: It has no rows, or transforms them on access.
    """

    def __init__(self, dataset: Dataset) -> None:
        if not len(dataset):
            raise TrainError("the dataset has no rows; give at least one.")
        if dataset.format["type"] == "custom":
            raise TrainError(
                "the dataset has a transform (set_transform), which changes rows on access, and Penstock reads its "
                "columns; give dataset.with_format(None), and the function as row=FUNCTION."
            )
        self._tables = dataset.with_format("arrow")
        self._plain = dataset.with_format(None)
        self.kinds = {name: _kind_of(feature) for name, feature in dataset.features.items()}
        self.classes = {
            name: tuple(feature.names) for name, feature in dataset.features.items() if isinstance(feature, ClassLabel)
        }
        self.rates_hz = {
            name: feature.sampling_rate
            for name, feature in dataset.features.items()
            if isinstance(feature, Audio) and feature.sampling_rate
        }
        self._views: dict[tuple[str, ...], Dataset] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def read(self, indices_B: Indices, columns: Sequence[str]) -> dict[str, Values]:
        """See `RowSource`."""
        table = self._view(columns)[indices_B.tolist()]
        found: dict[str, Values] = {}
        for name in columns:
            column = table[name].combine_chunks()
            if isinstance(column, pa.ChunkedArray):
                column = pa.concat_arrays(column.chunks)
            values = _files(column) if self.kinds[name] in ("picture", "sound") else column
            missing = [value is None for value in values] if isinstance(values, list) else _lacking(column).tolist()
            if column.null_count or any(missing):
                raise no_value(int(indices_B[missing.index(True)]), name)
            found[name] = values if isinstance(values, list) else _values(column)
        return found

    def _view(self, columns: Sequence[str]) -> Dataset:
        """Return the dataset with some columns alone, so that reading does not gather the others."""
        key = tuple(columns)
        if key not in self._views:
            self._views[key] = self._tables.select_columns(list(key))
        return self._views[key]

    def rows(self, indices_B: Indices) -> list[Any]:
        """See `RowSource`."""
        found: list[Any] = []
        for index in indices_B.tolist():
            try:
                found.append(self._plain[index])
            except Exception as error:
                raise unreadable_row(index, error) from error
        return found

    def fingerprint(self, columns: Sequence[str]) -> dict[str, str]:
        """See `RowSource`: all numbers, the lengths of all texts and files, and the content of some rows.

        `Dataset._fingerprint` is not used: it is random for datasets made of Python objects or by functions that
        cannot be pickled, and changes with the path of the files.
        """
        view, found = self._view(columns), dict[str, str]()
        for name in columns:
            digest = hashlib.sha256(str(view.features[name]).encode())
            for table in self._some_tables(view):
                for chunk in table[name].chunks:
                    for part in _summary(chunk):
                        digest.update(np.ascontiguousarray(part).data)
            found[f"column {name!r}"] = digest.hexdigest()[:DIGITS]
        for index in spread_indices(len(self)):
            row = view[[index]]
            digest = hashlib.sha256()
            try:
                for name in columns:
                    for value in row[name].to_pylist():
                        digest.update(_content(value))
            except OSError:
                # A missing file is a bad example, which the reading names.
                continue
            found[f"example {index:,}"] = digest.hexdigest()[:DIGITS]
        return found

    def _some_tables(self, view: Dataset) -> Iterator[pa.Table]:
        """Yield the whole dataset, or evenly spaced parts of one of more than 16 million rows."""
        starts = range(0, len(view), TABLE_ROWS)
        for place in spread_indices(len(starts), MAX_TABLES):
            yield view[starts[place] : starts[place] + TABLE_ROWS]


def _kind_of(feature: Any) -> Kind:
    match feature:
        case Image():
            return "picture"
        case Audio():
            return "sound"
        case ClassLabel():
            return "label"
        case Value(dtype="string" | "large_string"):
            return "text"
        case Value(dtype="binary" | "large_binary"):
            return "bytes"
        case Value(dtype=dtype) if not dtype.startswith(("int", "uint", "float", "bool")):
            return "other"
        case dict():
            return "other"
        case _:
            return "number"


def _files(column: Any) -> list[Any]:
    """Return each file's bytes, or its path where they are not in the table; None for none."""
    contents, paths = column.field("bytes").to_pylist(), column.field("path").to_pylist()
    files = [content or path for content, path in zip(contents, paths, strict=True)]
    return [_opened(file) if isinstance(file, str) else file for file in files]


def _opened(path: str) -> Any:
    if "://" not in path:
        return Path(path)
    import fsspec

    opened: Any = fsspec.open(path, "rb")
    with opened as source:
        return source.read()


def _lacking(column: Any) -> Array:
    """Return for each row of an Arrow array whether it is null, or a list that holds a null at any depth, `[B]`."""
    kind = column.type
    lacking_B: Array = column.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _lacking(column.flatten())
        if inner.any():
            lacking_B = lacking_B.copy()
            lacking_B[pc.list_parent_indices(column).to_numpy(zero_copy_only=False)[inner]] = True
    elif pa.types.is_fixed_size_list(kind) and not column.null_count:
        lacking_B = np.any(_lacking(column.flatten()).reshape(len(column), kind.list_size), axis=1)
    return lacking_B


def _values(column: Any) -> Values:
    """Return an Arrow array without nulls as an array `[B, ...]`, or as a list of B texts or arrays."""
    kind = column.type
    if isinstance(kind, pa.ExtensionType):
        return np.stack(column.to_numpy(zero_copy_only=False))
    if pa.types.is_fixed_size_list(kind):
        inner = _values(column.flatten())
        assert isinstance(inner, np.ndarray), kind
        return inner.reshape(len(column), kind.list_size, *inner.shape[1:])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type):
            ends = np.cumsum(pc.list_value_length(column).to_numpy(zero_copy_only=False))
            flat: Array = column.flatten().to_numpy(zero_copy_only=False)
            return np.split(flat, ends[:-1])
        return [np.asarray(value) for value in column.to_pylist()]
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return column.to_numpy(zero_copy_only=False)
    return column.to_pylist()


def _summary(column: Any) -> Iterator[Array]:
    """Yield what identifies an Arrow array without reading long values: numbers, and lengths of all else."""
    kind = column.type
    if isinstance(kind, pa.ExtensionType):
        column, kind = column.storage, column.storage.type
    yield column.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_struct(kind):
        for place, field in enumerate(kind):
            # Files may be moved to another folder.
            if field.name != "path":
                yield from _summary(column.field(place))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    elif any(test(kind) for test in (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string)):
        yield pc.binary_length(column).fill_null(0).to_numpy(zero_copy_only=False)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        yield column.fill_null(False if pa.types.is_boolean(kind) else 0).to_numpy(zero_copy_only=False)


def _content(value: Any) -> bytes:
    """Return the content of a value: of a file its bytes, wherever they are."""
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        if value["bytes"] or not value["path"]:
            return value["bytes"] or b""
        file = _opened(value["path"])
        name = PurePath(value["path"]).name.encode("utf-8", "surrogateescape")
        return name + (file if isinstance(file, bytes) else file.read_bytes())
    return value if isinstance(value, bytes) else repr(value).encode()
