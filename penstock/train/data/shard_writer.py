"""Writing of shards from any set of examples, to a temporary folder that is renamed at the end."""

import json
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from penstock.core.atomic_write import folder_beside, sync
from penstock.core.errors import BadExample, TrainError
from penstock.core.spec import PROTOCOL_DATATYPES, Array
from penstock.train.data.examples import Examples
from penstock.train.data.readers import OnBad, Piece, in_order, reading_threads
from penstock.train.data.sampler import one_pass
from penstock.train.data.shards import INDEX, TARGETS, ShardFile, ShardIndex, describe_file

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
    if examples.record is not None:
        raise TrainError(
            f"the examples have {examples.describe()}; shards hold one array of fixed size. Train on them as they are."
        )
    if examples.input_dtype.name not in PROTOCOL_DATATYPES:
        raise TrainError(f"the examples are {examples.input_dtype}; shards hold {', '.join(PROTOCOL_DATATYPES)}.")
    left_out: list[BadExample] = []
    targets: list[Array] = []

    def readable() -> Iterator[Array]:
        seen = 0
        for piece in _pieces(examples, workers or reading_threads()):
            if piece.bad and on_bad == "stop":
                raise piece.bad[0]
            left_out.extend(piece.bad)
            if not isinstance(piece.targets_P, np.ndarray):
                raise TrainError("the examples have several targets; shards hold one array. Train on them as they are.")
            if len(piece.targets_P):
                targets.append(piece.targets_P)
            yield piece.inputs_P
            seen += len(piece.indices_P) + len(piece.bad)
            if progress is not None:
                progress(seen)

    try:
        with folder_beside(folder) as beside:
            shards = _write_inputs(beside, examples, max(1, shard_bytes // max(1, examples.input_nbytes)), readable())
            if not targets:
                raise TrainError(f"none of {len(examples):,} examples can be read; the first: {left_out[0]}")
            with (beside / TARGETS).open("wb") as file:
                np.save(file, np.concatenate(targets), allow_pickle=False)
            index = ShardIndex(
                dtype=examples.input_dtype.name,
                shape=examples.input_shape,
                classes=classes,
                targets=describe_file(beside / TARGETS, sum(map(len, targets))),
                shards=tuple(shards),
            )
            (beside / INDEX).write_text(json.dumps(index.to_json(), indent=1) + "\n")
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


def _write_inputs(folder: Path, examples: Examples, rows: int, inputs: Iterator[Array]) -> list[ShardFile]:
    """Write raw inputs to shards of some rows each; the last one may have fewer."""
    shards: list[ShardFile] = []
    for number, parts in groupby(_numbered(inputs, rows), key=itemgetter(0)):
        place, count = folder / f"{number:05d}.npy", 0
        with place.open("wb") as file:
            _write_header(file, examples, rows)
            for _, part in parts:
                file.write(np.ascontiguousarray(part).data)
                count += len(part)
            # NumPy's header has room for a first dim of any size.
            file.seek(0)
            _write_header(file, examples, count)
        sync(place)
        shards.append(describe_file(place, count))
    return shards


def _numbered(inputs: Iterator[Array], rows: int) -> Iterator[tuple[int, Array]]:
    """Cut raw inputs at the ends of shards, each part with the number of its shard."""
    done = 0
    for inputs_P in inputs:
        while len(inputs_P):
            part, inputs_P = np.split(inputs_P, [rows - done % rows])
            yield done // rows, part
            done += len(part)


def _write_header(file: BinaryIO, examples: Examples, rows: int) -> None:
    fields: dict[str, Any] = {
        "descr": np.lib.format.dtype_to_descr(examples.input_dtype),
        "fortran_order": False,
        "shape": (rows, *examples.input_shape),
    }
    np.lib.format.write_array_header_1_0(file, fields)
