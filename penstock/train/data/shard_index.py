"""The index of a folder of shards, index.json: of one array and one target, of trees, or of parts in subfolders."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from penstock.core.errors import ApplicationError, BundleCorrupt, TrainError
from penstock.core.json_record import read_record, record_json
from penstock.core.record import RecordSpec
from penstock.core.spec import PROTOCOL_DATATYPES, TensorSpec
from penstock.train.data.shard_file import INDEX, ShardFile
from penstock.train.data.stored_array import StoredArray
from penstock.train.data.tree_form import TreeForm

TARGETS, LENGTHS = "targets.npy", "lengths.npy"
FORMAT, TREE_FORMAT = "penstock shards 1", "penstock shards 2"
PARTS_FORMAT = "penstock shard parts 1"
SEAL = "sha256"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardIndex:
    """The contents of index.json of examples with one array of fixed size and one target.

    Args:
        dtype: NumPy's name of an example's dtype.
        shape: The shape of an example.
        classes: The names of the targets; may be empty.
        targets: The file of the targets.
        shards: The files of the raw inputs.
    """

    dtype: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    targets: ShardFile
    shards: tuple[ShardFile, ...]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values."""
        first = {"format": FORMAT, "dtype": self.dtype, "shape": self.shape, "examples": self.beside.examples}
        return first | asdict(self)

    @property
    def beside(self) -> ShardFile:
        """The file with an entry for every example."""
        return self.targets


@dataclass(frozen=True, kw_only=True)
class TreeIndex:
    """The contents of index.json of examples with several arrays, or of varying length.

    Args:
        tensors: The named inputs, as `app.input` has them; empty for one array of fixed size.
        inputs: The stored inputs, in the order of their bytes.
        tree: The form of the targets, with the numbers of `targets`.
        targets: The stored targets, whose bytes follow those of the inputs.
        classes: The names of the targets; may be empty.
        lengths: The file of the lengths. Its first columns are those of the `Dim`s of the tensors.
        shards: The files of the examples.

    Raises:
        ValueError: The fields contradict one another.
    """

    tensors: tuple[TensorSpec, ...]
    inputs: tuple[StoredArray, ...]
    tree: TreeForm
    targets: tuple[StoredArray, ...]
    classes: tuple[str, ...]
    lengths: ShardFile
    shards: tuple[ShardFile, ...]

    def __post_init__(self) -> None:
        if sorted(self.tree.numbers) != list(range(len(self.targets))):
            raise ValueError(f"{len(self.targets)} targets are in the tree as {self.tree.numbers}")
        if [array.name for array in self.inputs] != ([spec.name for spec in self.tensors] or [""]):
            raise ValueError("the inputs are not the tensors")
        if not all(array.dtype in PROTOCOL_DATATYPES for array in self.arrays):
            raise ValueError("an array has an unknown dtype")

    def to_json(self) -> dict[str, Any]:
        """Convert to plain JSON values, with the SHA-256 of the others."""
        return sealed({"format": TREE_FORMAT, "examples": self.beside.examples} | record_json(self))

    def form(self) -> str:
        """Return the form of an example as JSON: the nesting of the targets, and the stored inputs and targets."""
        whole = record_json(self)
        return _canonical({name: whole[name] for name in ("inputs", "tree", "targets")})

    @property
    def beside(self) -> ShardFile:
        """The file with an entry for every example."""
        return self.lengths

    @property
    def arrays(self) -> Iterator[StoredArray]:
        """All arrays of an example, in the order of their bytes."""
        yield from self.inputs
        yield from self.targets

    @property
    def columns(self) -> int:
        """The number of lengths of an example."""
        used = [column for array in self.arrays for column in array.lengths if column is not None]
        return max([len(self.record.dims) if self.record else 0, *(column + 1 for column in used)])

    @cached_property
    def record(self) -> RecordSpec | None:
        """The named inputs; None for one array of fixed size."""
        return RecordSpec(self.tensors) if self.tensors else None


def sealed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Add the SHA-256 of the fields of an index to them, or replace it."""
    rest = {name: value for name, value in fields.items() if name != SEAL}
    return rest | {SEAL: hashlib.sha256(_canonical(rest).encode()).hexdigest()}


def parts_json(names: Iterable[str]) -> dict[str, Any]:
    """Return the contents of index.json of a folder with several sets of shards in subfolders."""
    return sealed({"format": PARTS_FORMAT, "parts": list(names)})


def read_parts(folder: Path) -> tuple[str, ...]:
    """Read the names of the sets of shards in the subfolders of a folder; none if the folder has shards itself.

    Raises:
        TrainError: The index is missing or damaged.
    """
    file = folder / INDEX
    return _parts_of(file, _read_fields(file))


def read_index(folder: Path) -> ShardIndex | TreeIndex:
    """Read the index of a folder of shards.

    Raises:
        TrainError: It is missing or damaged.
    """
    file = folder / INDEX
    fields = _read_fields(file)
    if parts := _parts_of(file, fields):
        named = ", ".join(str(folder / name) for name in parts)
        raise TrainError(f"{folder} has its shards in subfolders; give one of them: {named}.")
    try:
        kind = {FORMAT: ShardIndex, TREE_FORMAT: TreeIndex}.get(fields["format"])
        if kind is None or fields.get("dtype", "uint8") not in PROTOCOL_DATATYPES:
            raise TrainError(
                f"{file} has format {fields['format']!r}; this version of Penstock reads {FORMAT!r} and "
                f"{TREE_FORMAT!r}."
            )
        if kind is TreeIndex:
            _check_seal(file, fields)
        index = read_record(kind, {name: fields[name] for name in kind.__annotations__})
        whole = index.beside.examples == sum(shard.examples for shard in index.shards) > 0
        whole = whole and all(shard.examples > 0 for shard in index.shards)
        if isinstance(index, TreeIndex):
            _ = index.record, index.columns
    except _NONSENSE as error:
        raise _damaged(file, error) from None
    if not whole:
        raise TrainError(f"{file} is damaged (its counts of examples do not add up); write the shards again.")
    return index


# The errors of a read of JSON values that are no index.
_NONSENSE = (
    ApplicationError,
    AttributeError,
    BundleCorrupt,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


def _damaged(file: Path, error: Exception) -> TrainError:
    return TrainError(f"{file} is damaged ({type(error).__name__}: {error}); write the shards again.")


def _read_fields(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_bytes())
    except OSError as error:
        raise TrainError(
            f"{file} cannot be read ({error.strerror}); 'penstock shard SOURCE --out {file.parent}' makes one."
        ) from None
    except RecursionError as error:
        raise _damaged(file, error) from None
    except ValueError:
        raise TrainError(f"{file} is not JSON; write the shards again.") from None
    if not isinstance(fields, dict):
        raise _damaged(file, TypeError("it is no JSON object"))
    return cast(dict[str, Any], fields)


def _parts_of(file: Path, fields: dict[str, Any]) -> tuple[str, ...]:
    if fields.get("format") != PARTS_FORMAT:
        return ()
    _check_seal(file, fields)
    return tuple(fields["parts"])


def _check_seal(file: Path, fields: dict[str, Any]) -> None:
    """Check that the fields of an index are those that were written."""
    try:
        is_whole = fields.get(SEAL) == sealed(fields)[SEAL]
    except RecursionError as error:
        raise _damaged(file, error) from None
    if not is_whole:
        raise TrainError(f"{file} is altered (its fields do not have the SHA-256 in it); write the shards again.")


def _canonical(fields: Mapping[str, Any]) -> str:
    """Return JSON without spaces, in the order of the fields."""
    return json.dumps(fields, separators=(",", ":"))
