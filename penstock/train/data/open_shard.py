"""Reading from one file of shards."""

import os
import threading
import weakref
from typing import Any, final

import numpy as np

from penstock.train.data.shard_file import INDEX, ShardFile
from penstock.train.data.shard_folder import ShardFolder, unreadable


@final
class OpenShard:
    """One shard, opened and verified by the first thread that reads from it.

    Args:
        folder: The folder of the file.
        described: Its entry in the index.
        dtype: The dtype of the array in the file.
        shape: The shape of that array.
        verify: Check the SHA-256.
    """

    def __init__(
        self, folder: ShardFolder, described: ShardFile, dtype: np.dtype[Any], shape: tuple[int, ...], verify: bool
    ) -> None:
        self._folder, self.described = folder, described
        self._dtype, self._shape, self._verify = dtype, shape, verify
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._start = 0
        # Checked before the first read, so that replacements of bad examples do not depend on timing.
        self._wrong = folder.size_damage(described)

    def read(self, start: int, room: memoryview) -> str | None:
        """Read bytes of the array from one of them on; return the damage of the shard, or None.

        Raises:
            StorageError: The shard is at a URL and cannot be downloaded.
        """
        try:
            with self._lock:
                if self._descriptor is None and self._wrong is None:
                    self._wrong = self._begin()
            if self._wrong is not None or self._descriptor is None:
                return self._wrong
            # Not mmap: a file that shrinks under a mapping kills the process.
            if os.preadv(self._descriptor, [room], self._start + start) < len(room):
                self._wrong = f"{self} was cut short while it was read; write the shards again."
        except OSError as error:
            self._wrong = unreadable(self, error)
        return self._wrong

    def damage(self) -> str | None:
        """Describe the damage of the whole file; None if there is none."""
        return self._folder.size_damage(self.described) or self._folder.ready(self.described, verify=True, anew=True)

    def __str__(self) -> str:
        return f"{self._folder}/{self.described.file}"

    def _begin(self) -> str | None:
        if (wrong := self._folder.ready(self.described, verify=self._verify)) is not None:
            return wrong
        file = (self._folder.path / self.described.file).open("rb", buffering=0)
        weakref.finalize(self, file.close)
        try:
            np.lib.format.read_magic(file)
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
            fits = (shape, fortran_order, dtype) == (self._shape, False, self._dtype)
        except ValueError:
            fits = False
        if not fits:
            return f"{self} does not hold what {INDEX} says; write the shards again."
        self._start, self._descriptor = file.tell(), file.fileno()
        return None
