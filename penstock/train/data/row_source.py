"""Rows of a dataset, readable at random: the columns of Hugging Face `datasets`, or rows that are dictionaries."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from PIL import Image

from penstock.core.errors import BadExample, TrainError
from penstock.train.data.columns import Column
from penstock.train.data.fingerprint import hash_of, hash_of_text, spread_indices
from penstock.train.data.picture_reader import encoded, is_of_the_machine
from penstock.train.data.sampler import Indices

# n rows of the dataset, B rows that are read

Kind = Literal["picture", "sound", "text", "bytes", "label", "number", "other"]
# Pictures and sounds are files: bytes, a path, or a picture that is not decoded yet.
Values = Column | list[Any]


class RowSource(ABC):
    """Rows of a dataset. Several threads may call `read` and `rows` at once.

    Attributes:
        kinds: The kind of each column, by name.
        classes: The names of the labels of columns of the kind `label`.
        rates_hz: The sample rates of columns of the kind `sound` that declare one.
    """

    kinds: dict[str, Kind]
    classes: dict[str, tuple[str, ...]]
    rates_hz: dict[str, int]

    @abstractmethod
    def __len__(self) -> int:
        """Count the rows."""

    @abstractmethod
    def read(self, indices_B: Indices, columns: Sequence[str]) -> dict[str, Values]:
        """Read some columns of some rows.

        Returns:
            An array `[B, ...]` of each column, or a list of B values.

        Raises:
            BadExample: A row cannot be read, or has no value in one of the columns.
        """

    @abstractmethod
    def rows(self, indices_B: Indices) -> list[Any]:
        """Read whole rows as the dataset gives them.

        Raises:
            BadExample: A row cannot be read.
        """

    @abstractmethod
    def fingerprint(self, columns: Sequence[str]) -> dict[str, str]:
        """Identify the content of some columns, as `Examples.fingerprint`."""


@final
class MapRows(RowSource):
    """A dataset whose rows are dictionaries: `dataset[i]` and a length.

    MosaicML's `StreamingDataset` and `LocalDataset` are such, and torch's map-style datasets may be.

    Args:
        dataset: The dataset.

    Raises:
        TrainError: Its rows are no dictionaries, or cannot be counted or read.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._name = dataset, type(dataset).__name__
        # A StreamingDataset's own length is this process's share of an epoch.
        count = dataset.size if isinstance(getattr(dataset, "size", None), int | np.integer) else len(dataset)
        self._count = int(count)
        if not self._count:
            raise TrainError(f"the {self._name} has no rows; give at least one.")
        first = self._row(0)
        if not isinstance(first, Mapping):
            raise TrainError(
                f"the rows of the {self._name} are {type(first).__name__}; they must be dictionaries of columns by "
                f"name. Write a subclass of Examples for others."
            )
        self.kinds = {str(name): _kind_of(value) for name, value in first.items()}
        self.classes, self.rates_hz = {}, {}

    def __len__(self) -> int:
        return self._count

    def read(self, indices_B: Indices, columns: Sequence[str]) -> dict[str, Values]:
        """See `RowSource`."""
        rows, found = self.rows(indices_B), dict[str, Values]()
        for name in columns:
            values = [row.get(name) for row in rows]
            for index, value in zip(indices_B.tolist(), values, strict=True):
                if value is None:
                    raise no_value(index, name)
            found[name] = _arrays(values) if self.kinds[name] == "number" else values
        return found

    def rows(self, indices_B: Indices) -> list[Any]:
        """See `RowSource`."""
        return [self._row(index) for index in indices_B.tolist()]

    def _row(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            raise unreadable_row(index, error) from error

    def fingerprint(self, columns: Sequence[str]) -> dict[str, str]:
        """See `RowSource`; by the index of shards where there is one, which reads none of them."""
        shards = getattr(self._dataset, "shards", None)
        if isinstance(shards, list) and shards and all(hasattr(shard, "samples") for shard in shards):
            return {"shards": hash_of_text(f"{shard.samples} {_files_of(shard)}" for shard in shards)}
        found: dict[str, str] = {}
        for index in spread_indices(len(self)):
            try:
                row = self._row(index)
            except BadExample:
                continue
            found[f"example {index:,}"] = hash_of([_hashable(row.get(name)) for name in columns])
        return found


def _files_of(shard: Any) -> list[Any]:
    """Names, sizes and hashes of a shard's files; compression does not change the rows."""
    pairs = getattr(shard, "file_pairs", None) or [(getattr(shard, "raw_data", None), None)]
    return [(raw.basename, raw.bytes, sorted((getattr(raw, "hashes", None) or {}).items())) for raw, _ in pairs if raw]


def _kind_of(value: Any) -> Kind:
    if isinstance(value, Image.Image):
        return "picture"
    if isinstance(value, str):
        return "text"
    if isinstance(value, bytes | bytearray | memoryview):
        return "bytes"
    if value is None or isinstance(value, Mapping):
        return "other"
    try:
        return "number" if np.asarray(value).dtype.kind in "fbiu" else "other"
    except ValueError:
        return "other"


def _arrays(values: list[Any]) -> Values:
    rows = [np.asarray(value) for value in values]
    return np.stack(rows) if rows[0].ndim == 0 else rows


def _hashable(value: Any) -> Any:
    if isinstance(value, Image.Image):
        value = encoded(value)
    return np.frombuffer(value, np.uint8) if isinstance(value, bytes) else np.asarray(value)


def no_value(index: int, column: str) -> BadExample:
    """Return the error of a row that has no value."""
    return BadExample(f"row {index:,} has no value in column {column!r}.", index=index, name=f"row {index}")


def unreadable_row(index: int, error: Exception) -> Exception:
    """Return the error of a row that cannot be read: its own, or one of the machine."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
    if is_of_the_machine(error):
        return TrainError(
            f"row {index:,} cannot be read ({reason}), which is an error of the machine, not of the row; correct it "
            f"and resume."
        )
    return BadExample(f"row {index:,} cannot be read ({reason}).", index=index, name=f"row {index}")


def as_file(value: Any) -> bytes | Path | Image.Image:
    """Return a value of a column of files as `PictureReader` and `SoundReader` take it."""
    return bytes(value) if isinstance(value, bytearray | memoryview) else value
