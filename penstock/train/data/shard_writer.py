"""Writing of shards from any set of examples, to a temporary folder that is renamed at the end."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from io import BufferedWriter
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.core.atomic_write import folder_beside
from penstock.core.errors import BadExample, TrainError
from penstock.core.spec import PROTOCOL_DATATYPES, Array
from penstock.train.data.examples import Examples
from penstock.train.data.readers import OnBad, Piece, in_order, reading_threads
from penstock.train.data.sampler import one_pass
from penstock.train.data.shards import INDEX, TARGETS, ShardFile, ShardIndex

SHARD_BYTES = 1 << 29
AT_ONCE_BYTES = 1 << 23


def write_shards(
    examples: Examples,
    folder: str | Path,
    *,
    classes: tuple[str, ...] = (),
    shard_bytes: int = SHARD_BYTES,
    workers: int | None = None,
    on_bad: OnBad = "stop",
    progress: Callable[[int], object] | None = None,
) -> list[BadExample]:
    """Read every example once and write them as shards; the bytes are the same for any number of workers.

    Args:
        examples: The set, read as in the first epoch of seed 0.
        folder: The new folder of the shards.
        classes: The names of the targets.
        shard_bytes: The maximal size of a shard's examples.
        workers: Reading threads; by default one for each core but one.
        on_bad: `"stop"` at an example that cannot be read, or `"skip"`: leave it out.
        progress: Called with the number of examples read so far.

    Returns:
        The examples left out.

    Raises:
        BadExample: An example cannot be read, and `on_bad` is `"stop"`.
        TrainError: The folder exists or cannot be written, or no example could be read.
    """
    folder = Path(folder)
    if folder.exists():
        raise TrainError(f"{folder} exists; choose another folder, or remove it.")
    if examples.input_dtype.name not in PROTOCOL_DATATYPES:
        raise TrainError(f"the examples are {examples.input_dtype}; shards hold {', '.join(PROTOCOL_DATATYPES)}.")
    left_out: list[BadExample] = []
    try:
        with folder_beside(folder) as beside:
            writer = _Writer(beside, examples, max(1, shard_bytes // max(1, examples.input_nbytes)))
            seen = 0
            for piece in _pieces(examples, workers or reading_threads()):
                if piece.bad and on_bad == "stop":
                    raise piece.bad[0]
                left_out += piece.bad
                writer.add(piece)
                seen += len(piece.indices_P) + len(piece.bad)
                if progress is not None:
                    progress(seen)
            if not writer.targets:
                raise TrainError(f"none of {len(examples):,} examples can be read; the first: {left_out[0]}")
            writer.finish(classes)
            beside.rename(folder)
    except OSError as error:
        raise TrainError(f"{folder} cannot be written ({error.strerror}); free some room or choose another.") from None
    return left_out


def _pieces(examples: Examples, workers: int) -> Iterator[Piece]:
    at_once = max(1, AT_ONCE_BYTES // max(1, examples.input_nbytes))
    try:
        yield from in_order(examples, one_pass(len(examples), at_once), workers)
    except OSError as error:
        raise TrainError(
            f"the examples cannot be read ({error.strerror or error}); correct that and try again."
        ) from error


@final
class _Writer:
    def __init__(self, folder: Path, examples: Examples, rows: int) -> None:
        self._folder, self._rows = folder, rows
        self._dtype, self._shape = examples.input_dtype, examples.input_shape
        self.targets: list[Array] = []
        self._shards: list[ShardFile] = []
        self._open: BufferedWriter | None = None
        self._count = 0

    def add(self, piece: Piece) -> None:
        if len(piece.targets_P):
            self.targets.append(piece.targets_P)
        inputs_P = piece.inputs_P
        while len(inputs_P):
            if self._open is None:
                self._open = (self._folder / self._name()).open("wb")
                self._header(self._rows)
            now = inputs_P[: self._rows - self._count]
            self._open.write(np.ascontiguousarray(now).data)
            self._count += len(now)
            inputs_P = inputs_P[len(now) :]
            if self._count == self._rows:
                self._close()

    def finish(self, classes: tuple[str, ...]) -> None:
        if self._open is not None:
            self._close()
        targets = np.concatenate(self.targets)
        with (self._folder / TARGETS).open("wb") as file:
            np.save(file, targets, allow_pickle=False)
        index = ShardIndex(
            dtype=self._dtype.name,
            shape=self._shape,
            classes=classes,
            targets=_described(self._folder / TARGETS, len(targets)),
            shards=tuple(self._shards),
        )
        (self._folder / INDEX).write_text(json.dumps(index.to_json(), indent=1) + "\n")

    def _name(self) -> str:
        return f"{len(self._shards):05d}.npy"

    def _header(self, rows: int) -> None:
        assert self._open is not None
        fields: dict[str, Any] = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (rows, *self._shape),
        }
        np.lib.format.write_array_header_1_0(self._open, fields)

    def _close(self) -> None:
        assert self._open is not None
        if self._count < self._rows:
            # NumPy's header has room for a first dim of any size.
            self._open.seek(0)
            self._header(self._count)
        self._open.flush()
        os.fsync(self._open.fileno())
        self._open.close()
        self._shards.append(_described(self._folder / self._name(), self._count))
        self._open, self._count = None, 0


def _described(file: Path, examples: int) -> ShardFile:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return ShardFile(file=file.name, examples=examples, bytes=file.stat().st_size, sha256=digest)
