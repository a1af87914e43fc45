"""One file of shards: its entry in the index, and reading from it."""

import hashlib
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

INDEX = "index.json"


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


def describe_file(file: Path, examples: int) -> ShardFile:
    """Describe a file as the index does."""
    return ShardFile(file=file.name, examples=examples, bytes=file.stat().st_size, sha256=_sha256(file))


@final
class OpenShard:
    """One shard, opened and verified by the first thread that reads from it.

    Args:
        path: The file.
        described: Its entry in the index.
        dtype: The dtype of the array in the file.
        shape: The shape of that array.
        verify: Check the SHA-256.
    """

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

    def read(self, start: int, room: memoryview) -> str | None:
        """Read bytes of the array from one of them on; return the damage of the shard, or None."""
        try:
            with self._lock:
                if self._descriptor is None and self._wrong is None:
                    self._wrong = self._begin()
            if self._wrong is not None or self._descriptor is None:
                return self._wrong
            # Not mmap: a file that shrinks under a mapping kills the process.
            if os.preadv(self._descriptor, [room], self._start + start) < len(room):
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
            fits = (shape, fortran_order, dtype) == (self._shape, False, self._dtype)
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
