"""Files of a bundle or a pack, verified by their recorded hashes whenever they are read."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import final

from penstock.core.errors import PenstockError


@final
@dataclass(frozen=True, slots=True)
class FolderFiles:
    """Read the files of one kind of folder, and report damage as its error.

    Args:
        corrupt: The error raised.
        kind: The folder's name in messages: `"bundle"`.
    """

    corrupt: type[PenstockError]
    kind: str

    def read(self, file: Path) -> bytes:
        """Content of a file.

        Raises:
            PenstockError: `corrupt`: it is missing or cannot be read.
        """
        try:
            return file.read_bytes()
        except OSError as error:
            raise self._unreadable(file, error) from None

    def verify(self, file: Path, sha256: str, size: int | None = None) -> None:
        """Compare a file with its recorded SHA-256 and, where known, its size in bytes.

        Raises:
            PenstockError: `corrupt`: it is missing, cannot be read or differs.
        """
        found = ""
        try:
            found_size = file.stat().st_size
            # Not read if the size differs: a link to a device has no end.
            if size is None or found_size == size:
                with file.open("rb") as source:
                    found = hashlib.file_digest(source, "sha256").hexdigest()
        except OSError as error:
            raise self._unreadable(file, error) from None
        if found != sha256:
            raise self.altered(file, found_size)

    def altered(self, file: Path, size: int) -> PenstockError:
        """The error for a file that is not the one written."""
        return self.corrupt(f"{file} is not the file that was written ({size:,} bytes); copy the {self.kind} again.")

    def _unreadable(self, file: Path, error: OSError) -> PenstockError:
        if isinstance(error, FileNotFoundError):
            return self.corrupt(f"{file} is missing; copy the {self.kind} again.")
        return self.corrupt(f"{file} cannot be read ({error.strerror}); copy the {self.kind} again.")
