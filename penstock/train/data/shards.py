"""Shards: decoded examples in a few large files, each example one read away.

FOLDER/index.json      the dtype and shape of an example, the classes, and of each file its size and SHA-256
FOLDER/targets.npy     the target of every example, `[n]` or `[n, ...]`
FOLDER/00000.npy ...   raw inputs, `[examples of the shard, *shape]`: NumPy's own format, without pickle
"""

import hashlib
import io
import json
import os
import threading
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.core.errors import BadExample, TrainError
from penstock.core.json_record import read_record
from penstock.core.spec import PROTOCOL_DATATYPES, Array
from penstock.train.data.examples import Examples
from penstock.train.data.fingerprint import hash_of_text
from penstock.train.data.sampler import Indices, Seeds, draws_of

# n examples, B examples of a batch, H height, W width

INDEX, TARGETS = "index.json", "targets.npy"
FORMAT = "penstock shards 1"
# Top, left, and whether the picture is mirrored.
DRAWS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """A file as the index describes it.

    Args:
        file: The file name.
        examples: The number of examples.
        bytes: The file size.
        sha256: The hash of the file.
    """

    file: str
    examples: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardIndex:
    """The contents of index.json.

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
        first = {"format": FORMAT, "dtype": self.dtype, "shape": self.shape, "examples": self.targets.examples}
        return first | asdict(self)


@final
class Shards(Examples):
    """The examples in a folder that `penstock shard` or `write_shards` made.

    File sizes are checked now, the SHA-256 of a shard when its first example is read. All examples of a shard that is
    missing, truncated or altered are bad.

    Args:
        folder: The folder of the shards.
        size: Height and width in pixels of a crop of pictures `[H, W]` or `[H, W, channels]`; no crop by default.
        random: Random crops, mirrored half of the time, another one in every epoch. Otherwise the centre crop.
        verify: Check the SHA-256, which reads a set that is larger than memory twice.

    Raises:
        TrainError: The index or the targets are missing or damaged, or the examples are not pictures of that size.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        size: tuple[int, int] | None = None,
        random: bool = False,
        verify: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        self.classes = self.index.classes
        self._size, self.varies = size, random
        self.input_shape, self.input_dtype = self.index.shape, np.dtype(self.index.dtype)
        if size is not None or random:
            self._size = _fitting(size or self.input_shape[:2], self.input_shape)
            self.input_shape = (*self._size, *self.input_shape[2:])
        self.targets = self._read_targets()
        self._first = np.cumsum([0, *[shard.examples for shard in self.index.shards]])
        layout = self.input_dtype, self.index.shape
        self._files = [_File(self.folder / shard.file, shard, *layout, verify) for shard in self.index.shards]

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Array:
        """See `Examples`."""
        shards_B = np.searchsorted(self._first, indices_B, "right") - 1
        draws_BD = draws_of(seeds_B, DRAWS) if self.varies else np.full((len(indices_B), DRAWS), 0.5)
        whole = np.empty(self.index.shape, self.input_dtype)
        for row, (index, shard) in enumerate(zip(indices_B.tolist(), shards_B.tolist(), strict=True)):
            file = self._files[shard]
            into = inputs_B[row] if self._size is None else whole
            wrong = file.read(index - int(self._first[shard]), into)
            if wrong is not None:
                raise BadExample(wrong, index=index, name=file.described.file)
            if self._size is not None:
                _copy_part(whole, inputs_B[row], draws_BD[row].tolist())
        return self.targets[indices_B]

    def fingerprint(self) -> dict[str, str]:
        """See `Examples`; the index has the SHA-256 of all shards."""
        index = hash_of_text([self.index.targets.sha256, *(shard.sha256 for shard in self.index.shards)])
        return {"examples": f"{len(self):,}", "inputs": self.describe(), "shards": index}

    def verify(self) -> list[str]:
        """Check the SHA-256 of every file; return a sentence for each that is not as it was written."""
        return [wrong for file in self._files if (wrong := file.damage()) is not None]

    def _read_targets(self) -> Array:
        described = self.index.targets
        file = self.folder / TARGETS
        try:
            content = file.read_bytes()
        except OSError as error:
            raise TrainError(f"{file} cannot be read ({error.strerror}); write the shards again.") from None
        if len(content) != described.bytes or hashlib.sha256(content).hexdigest() != described.sha256:
            raise TrainError(f"{file} is not as it was written; write the shards again.")
        return np.load(io.BytesIO(content), allow_pickle=False)


@final
class _File:
    """One shard, opened and verified by the first thread that reads from it."""

    def __init__(
        self, path: Path, described: ShardFile, dtype: np.dtype[Any], shape: tuple[int, ...], verify: bool
    ) -> None:
        self.path, self.described = path, described
        self._dtype, self._shape, self._verify = dtype, shape, verify
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._start = 0
        # Checked before the first read, so that replacements of bad examples do not depend on timing.
        self._wrong = self.damage(content=False)

    def read(self, row: int, into: Array) -> str | None:
        """Read one example; return the damage of the shard, or None."""
        try:
            with self._lock:
                if self._descriptor is None and self._wrong is None:
                    self._wrong = self._begin()
            if self._wrong is None and self._descriptor is not None:
                # Not mmap: a file that shrinks under a mapping kills the process.
                room = memoryview(into.data).cast("B")
                if os.preadv(self._descriptor, [room], self._start + row * len(room)) < len(room):
                    self._wrong = f"{self.path} was cut short while it was read; write the shards again."
        except OSError as error:
            self._wrong = self._unreadable(error)
        return self._wrong

    def damage(self, *, content: bool = True) -> str | None:
        """Describe the damage of the whole file, or of its size alone; None if there is none."""
        try:
            size = self.path.stat().st_size
            if size != self.described.bytes:
                return (
                    f"{self.path} has {size:,} bytes where {self.described.bytes:,} were written; write the shards "
                    f"again."
                )
            found = _sha256(self.path) if content else self.described.sha256
        except OSError as error:
            return self._unreadable(error)
        return None if found == self.described.sha256 else f"{self.path} is altered; write the shards again."

    def _begin(self) -> str | None:
        if self._verify and (wrong := self.damage()) is not None:
            return wrong
        file = self.path.open("rb", buffering=0)
        weakref.finalize(self, file.close)
        try:
            np.lib.format.read_magic(file)
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
            fits = (shape, fortran_order, dtype) == ((self.described.examples, *self._shape), False, self._dtype)
        except ValueError:
            fits = False
        if not fits:
            return f"{self.path} does not hold what {INDEX} says; write the shards again."
        self._start, self._descriptor = file.tell(), file.fileno()
        return None

    def _unreadable(self, error: OSError) -> str:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        return f"{self.path} {why}; write the shards again."


def _sha256(file: Path) -> str:
    with file.open("rb", buffering=0) as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def describe_file(file: Path, examples: int) -> ShardFile:
    """Describe a file as the index does."""
    return ShardFile(file=file.name, examples=examples, bytes=file.stat().st_size, sha256=_sha256(file))


def read_index(folder: Path) -> ShardIndex:
    """Read the index of a folder of shards.

    Raises:
        TrainError: It is missing or damaged.
    """
    file = folder / INDEX
    try:
        fields = json.loads(file.read_bytes())
    except OSError as error:
        raise TrainError(
            f"{file} cannot be read ({error.strerror}); 'penstock shard SOURCE --out {folder}' makes one."
        ) from None
    except ValueError:
        raise TrainError(f"{file} is not JSON; write the shards again.") from None
    try:
        if fields["format"] != FORMAT or fields["dtype"] not in PROTOCOL_DATATYPES:
            raise TrainError(f"{file} has format {fields['format']!r}; this version of Penstock reads {FORMAT!r}.")
        index = read_record(ShardIndex, {name: fields[name] for name in ShardIndex.__annotations__})
        whole = index.targets.examples == sum(shard.examples for shard in index.shards) > 0
    except (KeyError, TypeError, ValueError) as error:
        raise TrainError(f"{file} is damaged ({type(error).__name__}: {error}); write the shards again.") from None
    if not whole:
        raise TrainError(f"{file} is damaged (its counts of examples do not add up); write the shards again.")
    return index


def _fitting(size: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    picture = len(shape) == 2 or (len(shape) == 3 and shape[2] <= 4)
    if not picture or not (0 < size[0] <= shape[0] and 0 < size[1] <= shape[1]):
        raise TrainError(
            f"the examples of the shards are {list(shape)}; a part of {list(size)} can be taken only of pictures "
            f"[H, W] or [H, W, channels] that are at least as large."
        )
    return size[0], size[1]


def _copy_part(whole_HW: Array, into_HW: Array, draws: list[float]) -> None:
    height, width = into_HW.shape[:2]
    top = int(draws[0] * (whole_HW.shape[0] - height + 1))
    left = int(draws[1] * (whole_HW.shape[1] - width + 1))
    part_HW = whole_HW[top : top + height, left : left + width]
    if draws[2] >= 0.5:
        into_HW[...] = part_HW
    elif part_HW.ndim == 2:
        into_HW[...] = part_HW[:, ::-1]
    else:
        # Copying each channel by itself takes a fifth of the time.
        for channel in range(part_HW.shape[2]):
            into_HW[..., channel] = part_HW[:, ::-1, channel]
