"""Writing of shards from any set of examples, to a temporary folder that is renamed at the end."""

import errno
import json
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import BadExample, TrainError
from penstock.core.spec import PROTOCOL_DATATYPES, Array
from penstock.core.storage.atomic_write import folder_beside, sync, sync_tree, write_through
from penstock.train.data.examples import Examples
from penstock.train.data.readers import OnBad, Piece, in_order, reading_threads
from penstock.train.data.sampler import one_pass
from penstock.train.data.shard_file import INDEX, ShardFile, describe_file
from penstock.train.data.shard_index import TARGETS, ShardIndex, parts_json
from penstock.train.data.tree_form import TreeForm
from penstock.train.data.tree_shard_writer import write_array_header, write_trees
from penstock.train.data.trees import Tree, joined_forms, leaves, row_forms

# P examples of a piece

SHARD_BYTES = 1 << 29
AT_ONCE_BYTES = 1 << 23
_NO_FORM = object()


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
        examples: The set, read as in the first epoch of seed 0: one array or several named ones, of fixed or varying
            length, with targets that are an array, or dictionaries and tuples of arrays.
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
        TrainError: The folder exists or cannot be written, no example could be read, or the arrays of an example have
            other names, dtypes or shapes than those of the first.
    """
    with _new_folder(Path(folder)) as beside:
        return _fill(beside, examples, classes, shard_bytes, workers, on_bad, progress)


def write_parts(
    parts: Mapping[str, Examples],
    folder: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    workers: int | None = None,
    on_bad: OnBad = "stop",
    progress: Callable[[str, int], object] | None = None,
) -> dict[str, list[BadExample]]:
    """Write several sets as shards, FOLDER/NAME each; the folder appears when all are written.

    Args:
        parts: The sets by name, such as `"train"`. Their `classes` are written too.
        folder: The new folder.
        shard_bytes: As of `write_shards`.
        workers: As of `write_shards`.
        on_bad: As of `write_shards`.
        progress: Called with the name of a set and the number of its examples read so far.

    Returns:
        The examples left out of each set.

    Raises:
        BadExample: As `write_shards`; the message names the set.
        TrainError: As `write_shards`, and the message names the set; or there is no set, or a name is not plain.
    """
    if not parts:
        raise TrainError("there are no sets to write; give at least one, such as {'train': ...}.")
    if wrong := [name for name in parts if name == INDEX or not re.fullmatch(r"\w[\w.-]*", name)]:
        raise TrainError(f"a set has the name {wrong[0]!r}; use letters, digits, '_', '-' and '.', such as 'train'.")
    left_out: dict[str, list[BadExample]] = {}
    with _new_folder(Path(folder)) as beside:
        for name, examples in parts.items():
            (beside / name).mkdir()

            def seen(count: int, name: str = name) -> None:
                if progress is not None:
                    progress(name, count)

            classes: tuple[str, ...] = tuple(getattr(examples, "classes", ()))
            try:
                left_out[name] = _fill(beside / name, examples, classes, shard_bytes, workers, on_bad, seen)
            except BadExample as error:
                raise BadExample(f"the {name} data: {error}", index=error.index, name=error.name) from error
            except TrainError as error:
                raise TrainError(f"the {name} data: {error}") from None
        _write_index(beside, parts_json(parts))
    return left_out


@contextmanager
def _new_folder(folder: Path) -> Generator[Path]:
    """Yield a hidden folder to fill, then flush it to the disk and rename it."""
    if folder.exists():
        raise TrainError(f"{folder} exists; choose another folder, or remove it.")
    try:
        with folder_beside(folder) as beside:
            yield beside
            sync_tree(beside)
            _rename(beside, folder)
            sync(folder.parent)
    except OSError as error:
        raise TrainError(f"{folder} cannot be written ({error.strerror}); free some room or choose another.") from None


def _rename(beside: Path, folder: Path) -> None:
    try:
        beside.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise TrainError(
            f"{folder} was written meanwhile by another process; choose another folder, or remove it."
        ) from None


def _fill(
    folder: Path,
    examples: Examples,
    classes: tuple[str, ...],
    shard_bytes: int,
    workers: int | None,
    on_bad: OnBad,
    progress: Callable[[int], object] | None,
) -> list[BadExample]:
    """Write shards to an empty folder; return the examples left out."""
    if not len(examples):
        raise TrainError("there are no examples; give at least one.")
    if examples.record is None and examples.input_dtype.name not in PROTOCOL_DATATYPES:
        raise TrainError(f"the examples are {examples.input_dtype}; shards hold {', '.join(PROTOCOL_DATATYPES)}.")
    left_out: list[BadExample] = []

    def readable() -> Iterator[Piece]:
        seen = 0
        for piece in _pieces(examples, workers or reading_threads()):
            if piece.bad and on_bad == "stop":
                raise piece.bad[0]
            left_out.extend(piece.bad)
            if len(piece.indices_P):
                yield piece
            seen += len(piece.indices_P) + len(piece.bad)
            if progress is not None:
                progress(seen)

    pieces = _alike(readable(), examples.record is None)
    first = next(pieces, None)
    if first is None:
        raise TrainError(f"none of {len(examples):,} examples can be read; the first: {left_out[0]}")
    pieces = chain([first], pieces)
    if examples.record is None and isinstance(first.targets_P, np.ndarray):
        index = _write_arrays(folder, examples, shard_bytes, pieces, classes)
    else:
        index = write_trees(folder, examples, shard_bytes, pieces, classes)
    _write_index(folder, index.to_json())
    return left_out


def _write_index(folder: Path, fields: dict[str, Any]) -> None:
    """Write index.json, in the order of the fields and of the names in trees."""
    write_through(folder / INDEX, f"{json.dumps(fields, indent=1)}\n".encode())


def _pieces(examples: Examples, workers: int) -> Iterator[Piece]:
    at_once = max(1, AT_ONCE_BYTES // max(1, examples.input_nbytes))
    try:
        yield from in_order(examples, one_pass(len(examples), at_once), workers)
    except OSError as error:
        raise TrainError(
            f"the examples cannot be read ({error.strerror or error}); correct that and try again."
        ) from error


def _alike(pieces: Iterator[Piece], has_one: bool) -> Iterator[Piece]:
    """Check that the targets of all pieces are trees of the same form.

    Args:
        pieces: The pieces.
        has_one: The examples have one input of fixed size; then one target may have any dtype but objects.
    """
    # Not None, which is the form of a tree without arrays.
    first: Tree = _NO_FORM
    for piece in pieces:
        if not has_one or not isinstance(piece.targets_P, np.ndarray) or piece.targets_P.dtype.hasobject:
            TreeForm.of(piece.targets_P, "targets")
        index, count = piece.indices_P[0], len(piece.indices_P)
        forms = joined_forms(piece.targets_P) if has_one else row_forms(piece.targets_P)
        first = forms if first is _NO_FORM else first
        if forms != first:
            raise TrainError(
                f"the targets from example {index:,} on are {forms}, and those of the first examples {first}; give all "
                f"examples the same names, dtypes and shapes."
            )
        shapes = [array.shape for array in leaves(piece.targets_P)]
        if wrong := [list(shape) for shape in shapes if shape[:1] != (count,)]:
            raise TrainError(f"a target of {count:,} examples has the shape {wrong[0]}; give [{count}, ...].")
        yield piece


def _write_arrays(
    folder: Path, examples: Examples, shard_bytes: int, pieces: Iterator[Piece], classes: tuple[str, ...]
) -> ShardIndex:
    """Write examples of one array of fixed size and one target."""
    targets: list[Array] = []

    def inputs() -> Iterator[Array]:
        for piece in pieces:
            targets.append(piece.targets_P)
            yield piece.inputs_P

    shards = _write_inputs(folder, examples, max(1, shard_bytes // max(1, examples.input_nbytes)), inputs())
    with (folder / TARGETS).open("wb") as file:
        np.save(file, np.concatenate(targets), allow_pickle=False)
    sync(folder / TARGETS)
    return ShardIndex(
        dtype=examples.input_dtype.name,
        shape=examples.input_shape,
        classes=classes,
        targets=describe_file(folder / TARGETS, sum(map(len, targets))),
        shards=tuple(shards),
    )


def _write_inputs(folder: Path, examples: Examples, rows: int, inputs: Iterator[Array]) -> list[ShardFile]:
    """Write raw inputs to shards of some rows each; the last one may have fewer."""
    shards: list[ShardFile] = []
    dtype = examples.input_dtype.newbyteorder("<")
    for number, parts in groupby(_numbered(inputs, rows), key=itemgetter(0)):
        place, count = folder / f"{number:05d}.npy", 0
        with place.open("wb") as file:
            write_array_header(file, dtype, (rows, *examples.input_shape))
            for _, part in parts:
                file.write(np.ascontiguousarray(part, dtype).data)
                count += len(part)
            # NumPy's header has room for a first dim of any size.
            file.seek(0)
            write_array_header(file, dtype, (count, *examples.input_shape))
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
