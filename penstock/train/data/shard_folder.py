"""The folder of a set of shards: where a file of it is read, and its damage."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import final

from penstock.train.data.shard_file import ShardFile, sha256_of


class ShardFolder(ABC):
    """A folder with the files of a set of shards. Several threads may call its methods at once.

    Attributes:
        path: The local folder.
    """

    path: Path

    @abstractmethod
    def __str__(self) -> str:
        """The folder as the user named it."""

    @abstractmethod
    def size_damage(self, described: ShardFile) -> str | None:
        """Return the damage of a file that its size shows, or that it is missing; None if there is none."""

    @abstractmethod
    def ready(self, described: ShardFile, *, verify: bool, anew: bool = False) -> str | None:
        """Make a file readable at `path`.

        Args:
            described: Its entry in the index.
            verify: Check the SHA-256. A file in the cache that was verified and is unchanged is not read again.
            anew: Read that one too.

        Returns:
            Its damage, or None.

        Raises:
            StorageError: It cannot be downloaded or kept.
        """

    def prefetch(self, files: Sequence[ShardFile], *, verify: bool) -> None:  # noqa: B027 - local files need nothing
        """Begin to make files readable, in the background.

        Args:
            files: Their entries in the index.
            verify: Check their SHA-256 too.
        """


@final
class LocalShards(ShardFolder):
    """A local folder.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def size_damage(self, described: ShardFile) -> str | None:
        """See `ShardFolder`."""
        try:
            return wrong_size(self.path / described.file, (self.path / described.file).stat().st_size, described)
        except OSError as error:
            return unreadable(self.path / described.file, error)

    def ready(self, described: ShardFile, *, verify: bool, anew: bool = False) -> str | None:
        """See `ShardFolder`; nothing is recorded beside files of the user's, so each process reads them."""
        if not verify:
            return None
        if (wrong := self.size_damage(described)) is not None:
            return wrong
        file = self.path / described.file
        try:
            return None if sha256_of(file) == described.sha256 else f"{file} is altered; write the shards again."
        except OSError as error:
            return unreadable(file, error)


def wrong_size(shown: object, size: int, described: ShardFile) -> str | None:
    """Compare the size of a file with that in the index; return a sentence if they differ."""
    if size == described.bytes:
        return None
    return f"{shown} has {size:,} bytes where {described.bytes:,} were written; write the shards again."


def unreadable(shown: object, error: OSError) -> str:
    """Describe why a file cannot be read."""
    why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
    return f"{shown} {why}; write the shards again."
