"""Shards at a URL: each file is downloaded once into the cache, by its content, while the training goes on.

cache/shards/HASH/index.json        HASH is that of this file, which has the sizes and the SHA-256 of all others
cache/shards/HASH/00000.npy         a file, whole and verified
cache/shards/HASH/.00000.npy.lock   held by the process that downloads it; the others wait
cache/shards/HASH/.00000.npy.part   what has arrived of it
cache/shards/HASH/.00000.npy.seen   the size and times of a file when its SHA-256 was verified; it is not hashed again
                                    while they are the same

See `remote_cache` for the size of the cache.
"""

import hashlib
import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import final

from penstock.core.errors import StorageError, TrainError
from penstock.core.remote.remote_cache import SHARDS, make_room, use
from penstock.core.storage.atomic_write import sync
from penstock.core.storage.remote_folder import RemoteFolder, is_inside, one_at_a_time
from penstock.train.data.shard_file import INDEX, ShardFile, sha256_of
from penstock.train.data.shard_folder import ShardFolder, wrong_size

# Downloads at the same time, beside those that readers wait for.
AT_ONCE = 4
# A bucket may not answer for some seconds; a training of days goes on.
WAITS_S = (1.0, 4.0, 16.0)
HASH_DIGITS = 32

log = logging.getLogger(__name__)


@final
class RemoteShards(ShardFolder):
    """A folder of shards at a URL.

    Args:
        url: The URL.
        cache: The cache.
        limit_bytes: Limit of all downloads in the cache, see `remote_cache.make_room`.

    Raises:
        TrainError: There are no shards at the URL.
        StorageError: The URL cannot be read, or the cache cannot be written.
    """

    def __init__(self, url: str, cache: Path, limit_bytes: int) -> None:
        self._remote, self._cache, self._limit_bytes = RemoteFolder(url), cache, limit_bytes
        index = self._remote.read(INDEX)
        if index is None:
            raise TrainError(
                f"{url} holds no shards (no {INDEX}), or there is no such bucket; 'penstock shard SOURCE --out DIR' "
                f"makes some, and then copy DIR there."
            )
        self.path = cache / SHARDS / hashlib.sha256(index).hexdigest()[:HASH_DIGITS]
        self._todo: deque[ShardFile] = deque()
        with self._kept(), one_at_a_time(self.path):
            self.path.mkdir(exist_ok=True)
            use(self.path)
            if not _holds(self.path / INDEX, index):
                _put(self.path / f".{INDEX}.part", self.path / INDEX, index)

    def __str__(self) -> str:
        return str(self._remote)

    def reserve(self, files: Sequence[ShardFile]) -> None:
        """Make room in the cache for all files.

        Raises:
            TrainError: The name of a file is none that was written.
            StorageError: The disk has not the room.
        """
        for described in files:
            name = described.file
            if not is_inside(name) or "/" in name or name.startswith(".") or name == INDEX:
                raise TrainError(f"{self}/{INDEX} names the file {name!r}; write the shards again.")
        missing = sum(described.bytes for described in files if not self._is_there(described))
        if not missing:
            return
        with self._kept():
            for sentence in make_room(self._cache, self._limit_bytes, missing):
                log.warning(sentence)
            free = shutil.disk_usage(self.path).free
        if missing > free:
            raise StorageError(
                f"{self} cannot be kept in {self.path} (it has {missing:,} bytes more, and {free:,} are free); make "
                f"room there, or name another folder in PENSTOCK_CACHE."
            )

    def size_damage(self, described: ShardFile) -> str | None:
        """See `ShardFolder`; the size at the URL, of a file that is not in the cache."""
        if self._is_there(described):
            return None
        size = self._sizes.get(described.file)
        shown = f"{self}/{described.file}"
        return f"{shown} is missing; write the shards again." if size is None else wrong_size(shown, size, described)

    def ready(self, described: ShardFile, *, verify: bool, anew: bool = False) -> str | None:
        """See `ShardFolder`; download the file if it is not in the cache, or damaged there."""
        with self._kept(), one_at_a_time(self.path / described.file):
            if self._is_there(described):
                if not verify or self._is_intact(described, anew=anew):
                    return None
                (self.path / described.file).unlink()
            # Content that differs is downloaded again: the file may have been replaced meanwhile.
            if self._download(described) or self._download(described):
                return None
        return (
            f"{self}/{described.file} is not what {INDEX} says, so it changed after the training began, or is damaged; "
            f"write the shards again, into another folder."
        )

    def prefetch(self, files: Sequence[ShardFile], *, verify: bool) -> None:
        """See `ShardFolder`; in the order of the files, except that readers download what they need at once.

        The processes of a machine divide the files among them: each goes on to the next that no other one works on.
        """
        self._todo.extend(
            described
            for described in files
            if not (self._is_there(described) and (not verify or self._is_seen(described)))
        )
        for _ in range(min(AT_ONCE, len(self._todo))):
            threading.Thread(target=self._prefetch, name="penstock-prefetch", daemon=True).start()

    def _prefetch(self) -> None:
        while True:
            try:
                described = self._todo.popleft()
            except IndexError:
                return
            # Another process has it under way, or the reader meets the same error and says it.
            with suppress(OSError, StorageError), one_at_a_time(self.path / described.file, wait=False):
                if not self._is_there(described):
                    self._try(described)
                elif not self._is_intact(described):
                    (self.path / described.file).unlink()
                    self._try(described)

    def _download(self, described: ShardFile) -> bool:
        """Download a file; return whether it is what the index says.

        Raises:
            StorageError: It cannot be downloaded, also not later.
        """
        for wait_s in WAITS_S:
            try:
                return self._try(described)
            except StorageError:
                time.sleep(wait_s)
        return self._try(described)

    def _try(self, described: ShardFile) -> bool:
        part = self.path / f".{described.file}.part"
        self._remote.download(described.file, part)
        hashed = part.stat()
        if sha256_of(part) != described.sha256:
            part.unlink()
            return False
        sync(part)
        part.rename(self.path / described.file)
        self._note(described, hashed)
        return True

    def _is_intact(self, described: ShardFile, *, anew: bool = False) -> bool:
        """Check the SHA-256 of a file in the cache, unless that was done and the file is unchanged."""
        if not anew and self._is_seen(described):
            return True
        file = self.path / described.file
        hashed = file.stat()
        if sha256_of(file) != described.sha256:
            return False
        self._note(described, hashed)
        return True

    def _is_seen(self, described: ShardFile) -> bool:
        """Tell whether a file was verified and its size and times are as they were then."""
        seen = self._seen(described)
        with suppress(OSError):
            # Whoever may write to a shared cache could vouch for a file of theirs.
            if seen.stat().st_uid == os.geteuid():
                return seen.read_text() == _state(described, (self.path / described.file).stat())
        return False

    def _note(self, described: ShardFile, hashed: os.stat_result) -> None:
        """Record that a file is verified, if it is as it was before it was hashed."""
        now = (self.path / described.file).stat()
        if (now.st_size, now.st_mtime_ns) == (hashed.st_size, hashed.st_mtime_ns):
            seen = self._seen(described)
            _put(seen.with_name(f"{seen.name}.part"), seen, _state(described, now).encode())

    def _seen(self, described: ShardFile) -> Path:
        return self.path / f".{described.file}.seen"

    def _is_there(self, described: ShardFile) -> bool:
        try:
            return (self.path / described.file).stat().st_size == described.bytes
        except OSError:
            return False

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return self._remote.sizes()

    @contextmanager
    def _kept(self) -> Generator[None]:
        """Translate errors of the cache in the context."""
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{self} cannot be kept in {self.path} ({error.strerror or error}); make room there, or name another "
                f"folder in PENSTOCK_CACHE."
            ) from None


def _state(described: ShardFile, stat: os.stat_result) -> str:
    # The time of the last change of a file's attributes cannot be set, so it shows a write that hides its own time.
    return f"{described.sha256} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}\n"


def _holds(file: Path, content: bytes) -> bool:
    try:
        return file.read_bytes() == content
    except FileNotFoundError:
        return False


def _put(part: Path, file: Path, content: bytes) -> None:
    part.write_bytes(content)
    part.rename(file)
