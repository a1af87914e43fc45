"""Files that somebody else may have chosen: opened only if regular and of plausible size, and read to that size."""

import hashlib
import os
from io import FileIO
from pathlib import Path
from stat import S_ISREG

# A description, or a source file; parsing JSON takes many times its size.
MAX_TEXT_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 18
# Never waiting for the other end of a pipe that took a file's place; on Windows, no line ends are translated.
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY", "O_BINARY"))


class NotRegular(OSError):
    """A path leads to a device, a pipe or a folder, or the file is too large."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.strerror = reason


def memory_bytes() -> int:
    """Memory of the machine; a larger file cannot be used, and a sparse one costs its author nothing."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 40


def open_regular(file: Path, max_bytes: int | None = None) -> tuple[FileIO, int]:
    """Open a regular file for reading.

    Args:
        file: Its path; links are followed.
        max_bytes: Its largest size; by default the machine's memory.

    Returns:
        The file, and its size in bytes.

    Raises:
        NotRegular: It is no regular file, or larger.
        OSError: It cannot be opened.
    """
    limit = memory_bytes() if max_bytes is None else max_bytes
    # Before it is opened, which some devices take for an order.
    _check(os.stat(file), limit)
    opened = FileIO(os.open(file, _FLAGS))
    try:
        status = os.fstat(opened.fileno())
        _check(status, limit)
    except NotRegular:
        opened.close()
        raise
    return opened, status.st_size


def read_regular(file: Path, max_bytes: int | None = None) -> bytes:
    """Read a regular file, see `open_regular`; what is written to it meanwhile is left out."""
    opened, size = open_regular(file, max_bytes)
    with opened:
        blocks: list[bytes] = []
        while size > 0 and (block := opened.read(size)):
            blocks.append(block)
            size -= len(block)
    return b"".join(blocks)


def sha256_of(file: Path, size: int | None = None) -> tuple[str, int]:
    """Hash a regular file.

    Args:
        file: Its path.
        size: Its only right size; a file of another one is not read.

    Returns:
        The SHA-256, empty if it was not read, and its size in bytes.

    Raises:
        NotRegular: It is no regular file, or larger than the memory.
        OSError: It cannot be read.
    """
    opened, found_size = open_regular(file)
    with opened:
        if size not in (None, found_size):
            return "", found_size
        digest, left = hashlib.sha256(), found_size
        while left > 0 and (block := opened.read(min(left, _BLOCK_BYTES))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest(), found_size


def _check(status: os.stat_result, max_bytes: int) -> None:
    if not S_ISREG(status.st_mode):
        raise NotRegular("it is no regular file")
    if status.st_size > max_bytes:
        raise NotRegular(f"it has {status.st_size:,} bytes, and {max_bytes:,} are the most")
