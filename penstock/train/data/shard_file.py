"""One file of shards, as the index describes it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

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
    return ShardFile(file=file.name, examples=examples, bytes=file.stat().st_size, sha256=sha256_of(file))


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb", buffering=0) as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
