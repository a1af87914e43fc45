"""Shards: decoded examples in a few large files, each example one read away.

FOLDER/index.json      the form of an example, the classes, and of each file its size and SHA-256
FOLDER/00000.npy ...   the examples: NumPy's own format, without pickle

Of one array of fixed size and one target ("penstock shards 1"):

FOLDER/targets.npy     the target of every example, `[n]` or `[n, ...]`
FOLDER/00000.npy ...   raw inputs, `[examples of the shard, *shape]`

Of trees, or of lengths that vary ("penstock shards 2"):

FOLDER/lengths.npy     the lengths of every example, uint32 `[n, lengths]`
FOLDER/00000.npy ...   bytes: the arrays of each example one after another, without padding, inputs before targets

Of several sets ("penstock shard parts 1"):

FOLDER/index.json      the names of the sets
FOLDER/NAME            the shards of a set

FOLDER may be at a URL, see `remote_shards`.
"""

from collections.abc import Generator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.core.errors import BadExample, TrainError
from penstock.core.record import RecordSpec
from penstock.core.remote.cache_variables import cache_folder, cache_limit_bytes, expanded_cache
from penstock.core.spec import Array
from penstock.core.storage.remote_folder import url_of
from penstock.train.data.examples import Examples
from penstock.train.data.fingerprint import hash_of_text
from penstock.train.data.remote_shards import RemoteShards
from penstock.train.data.sampler import Indices, Seeds, draws_of
from penstock.train.data.shard_folder import LocalShards, ShardFolder
from penstock.train.data.shard_index import ShardIndex, read_index
from penstock.train.data.shard_rows import ArrayShardRows, ShardRows, TreeShardRows
from penstock.train.data.trees import Tree

# n examples, B examples of a batch, H height, W width

# Top, left, and whether the picture is mirrored.
DRAWS = 3


@final
class Shards(Examples):
    """The examples in a folder that `penstock shard` or `write_shards` made, or in a copy of it at a URL.

    File sizes are checked now, the SHA-256 of a shard when its first example is read. All examples of a shard that is
    missing, truncated or altered are bad. Named inputs, lengths and trees of targets are those of the examples that
    were written, so that the batches are the same.

    At a URL the index and the targets or lengths are read now. Each shard is downloaded into the cache when its first
    example is read, or earlier: a training begins to download all of them at its start. The examples and their
    fingerprint are those of the local folder.

    Args:
        folder: The folder of the shards, or its URL: `"s3://bucket/shards"`.
        size: Height and width in pixels of a crop of pictures `[H, W]` or `[H, W, channels]`; no crop by default.
            Targets stay as they are.
        random: Random crops, mirrored half of the time, another one in every epoch. Otherwise the centre crop.
        verify: Check the SHA-256, which reads a set that is larger than memory twice. What is downloaded is always
            checked, and read again only if its size or its times have changed since.
        cache: The cache of shards at a URL; `PENSTOCK_CACHE`, or `~/.cache/penstock`, by default.

    Raises:
        TrainError: The index, targets or lengths are missing or damaged, or the examples are not pictures of that size.
        StorageError: The URL cannot be read, or the shards do not fit on the disk of the cache.

    Attributes:
        folder: The local folder; of shards at a URL, that in the cache.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        size: tuple[int, int] | None = None,
        random: bool = False,
        verify: bool = True,
        cache: str | Path | None = None,
    ) -> None:
        self._place, self._verify = _place(folder, cache), verify
        self.folder = self._place.path
        with _named(self._place):
            self.index = read_index(self.folder)
        if isinstance(self._place, RemoteShards):
            self._place.reserve([self.index.beside, *self.index.shards])
        self.classes = self.index.classes
        self._rows: ShardRows
        # In memory if each example has one target, otherwise None.
        self.targets: Any = None
        if isinstance(self.index, ShardIndex):
            self._rows = ArrayShardRows(self._place, self.index, verify)
            self.targets = self._rows.targets_n
            self.input_shape, self.input_dtype = self.index.shape, np.dtype(self.index.dtype)
        else:
            self._rows = TreeShardRows(self._place, self.index, verify)
            self.target_axes = self._rows.target_axes
            if self.index.record is not None:
                self.declare(self.index.record)
            else:
                (array,) = self.index.inputs
                self.input_shape, self.input_dtype = array.room, array.numpy_dtype
        self._size, self.varies = size, random
        self._whole = self.input_shape
        if size is not None or random:
            self._size = _fitting(size or self.input_shape[:2], self.input_shape, self.record)
            self.input_shape = (*self._size, *self.input_shape[2:])
        self._first = np.cumsum([0, *[shard.examples for shard in self.index.shards]])

    def __len__(self) -> int:
        return self.index.beside.examples

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Tree:
        """See `Examples`."""
        shards_B = np.searchsorted(self._first, indices_B, "right") - 1
        draws_BD = draws_of(seeds_B, DRAWS) if self.varies else np.full((len(indices_B), DRAWS), 0.5)
        whole_1 = None if self._size is None else np.empty((1, *self._whole), self.input_dtype)
        targets_B = self._rows.targets(indices_B)
        for row, (index, shard) in enumerate(zip(indices_B.tolist(), shards_B.tolist(), strict=True)):
            into_1 = inputs_B[row : row + 1] if whole_1 is None else whole_1
            wrong = self._rows.read(index, shard, into_1, targets_B, row)
            if wrong is not None:
                raise BadExample(wrong, index=index, name=self.index.shards[shard].file)
            if whole_1 is not None:
                _copy_part(whole_1[0], inputs_B[row], draws_BD[row].tolist())
        return self._rows.tree.filled(targets_B)

    def prefetch(self) -> None:
        """See `Examples`; download all shards that are not in the cache, and verify those that are."""
        self._place.prefetch(self.index.shards, verify=self._verify)

    def bound(self, record: RecordSpec) -> Examples:
        """See `Examples`."""
        if self.record in (None, record) or not isinstance(self._rows, TreeShardRows):
            return super().bound(record)
        made = copy(self)
        made._rows = rows = self._rows.bound(record)
        made.declare(record)
        made.target_axes = rows.target_axes
        return made

    def fingerprint(self) -> dict[str, str]:
        """See `Examples`; a hash of the form of an example and of the SHA-256 of all shards in the index."""
        form = [] if isinstance(self.index, ShardIndex) else [self.index.form()]
        index = hash_of_text([self.index.beside.sha256, *form, *(shard.sha256 for shard in self.index.shards)])
        return {"examples": f"{len(self):,}", "inputs": self.describe(), "shards": index}

    def verify(self) -> list[str]:
        """Read every file and check its SHA-256; return a sentence for each that is not as it was written."""
        return [wrong for file in self._rows.files if (wrong := file.damage()) is not None]


def _place(folder: str | Path, cache: str | Path | None) -> ShardFolder:
    url = url_of(folder)
    if url is None:
        return LocalShards(Path(folder))
    return RemoteShards(url, (expanded_cache(cache) if cache else cache_folder()).absolute(), cache_limit_bytes())


@contextmanager
def _named(place: ShardFolder) -> Generator[None]:
    """Name the folder as the user did in errors of its local path."""
    try:
        yield
    except TrainError as error:
        raise TrainError(str(error).replace(str(place.path), str(place))) from None


def _fitting(size: tuple[int, ...], shape: tuple[int, ...], record: RecordSpec | None) -> tuple[int, int]:
    picture = len(shape) == 2 or (len(shape) == 3 and shape[2] <= 4)
    if not picture or not (0 < size[0] <= shape[0] and 0 < size[1] <= shape[1]):
        described = list(shape) if record is None else record.describe()
        raise TrainError(
            f"the examples of the shards are {described}; a part of {list(size)} can be taken only of pictures "
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
