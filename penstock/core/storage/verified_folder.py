"""Files of a bundle or a pack, verified by their recorded hashes whenever they are read."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays

from penstock.core.errors import PenstockError
from penstock.core.spec import Array
from penstock.core.storage.regular_file import read_regular, sha256_of

# Stands here and not with the pack, which the readers of bundles do not load.
PACK_DESCRIPTION = "pack.json"


@final
@dataclass(frozen=True, slots=True)
class FolderFiles:
    """Read the files of one kind of folder, and report damage as its error.

    Args:
        corrupt: The error raised.
        kind: The folder's name in messages: `"bundle"`.
        remake: The advice for a file that cannot be used: `"write the bundle again"`.
        schema_version: The only version that is read.
    """

    corrupt: type[PenstockError]
    kind: str
    remake: str
    schema_version: int

    def read(self, file: Path, max_bytes: int | None = None) -> bytes:
        """Content of a file.

        Args:
            file: Its path.
            max_bytes: Its largest size; by default the machine's memory.

        Raises:
            PenstockError: `corrupt`: it is missing, no regular file, too large, or cannot be read.
        """
        try:
            return read_regular(file, max_bytes)
        except OSError as error:
            raise self._missing(file, error) from None

    def parse(self, file: Path, data: bytes) -> Any:
        """Parse the JSON content of a file.

        Raises:
            PenstockError: `corrupt`: it is not JSON.
        """
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self.corrupt(f"{file} is not JSON ({error}); copy the {self.kind} again.") from None

    def check_version(self, file: Path | str, given: Any) -> None:
        """Check the schema version of a description.

        Raises:
            PenstockError: `corrupt`: it is another, or there is none.
        """
        version = given.get("schema_version") if isinstance(given, dict) else None
        if version != self.schema_version:
            raise self.corrupt(
                f"{file} has schema version {version!r}; this penstock reads {self.schema_version}. "
                f"{self.remake.capitalize()} with this version."
            )

    def arrays(self, file: Path, names: Iterable[str]) -> list[Array]:
        """Read some arrays of a safetensors file.

        Raises:
            PenstockError: `corrupt`: it cannot be read, or lacks one of them.
        """
        try:
            found: dict[str, Array] = load_arrays(self.read(file))
            return [found[name] for name in names]
        except (SafetensorError, KeyError) as error:
            raise self.unusable(file, error) from None

    def unusable(self, file: Path | str, cause: object) -> PenstockError:
        """The error for a file whose content is not as written."""
        return self.corrupt(f"{file} is not readable ({cause}); {self.remake}.")

    def verify(self, file: Path, sha256: str, size: int | None = None) -> None:
        """Compare a file with its recorded SHA-256 and, where known, its size in bytes.

        Raises:
            PenstockError: `corrupt`: it is missing, cannot be read or differs.
        """
        try:
            found, found_size = sha256_of(file, size)
        except OSError as error:
            raise self._missing(file, error) from None
        if found != sha256:
            raise self.altered(file, found_size)

    def altered(self, file: Path, size: int) -> PenstockError:
        """The error for a file that is not the one written."""
        return self.corrupt(f"{file} is not the file that was written ({size:,} bytes); copy the {self.kind} again.")

    def _missing(self, file: Path, error: OSError) -> PenstockError:
        if isinstance(error, FileNotFoundError):
            return self.corrupt(f"{file} is missing; copy the {self.kind} again.")
        remedy = f"copy the {self.kind} again"
        if isinstance(error, PermissionError):
            remedy = "let the user who runs this read it"
        return self.corrupt(f"{file} cannot be read ({error.strerror}); {remedy}.")
