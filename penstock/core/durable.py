"""What is still there after the power is gone: written whole or not at all."""

import ctypes
import errno
import os
import shutil
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_through(file: Path, data: bytes) -> None:
    """Bring a file to the disk."""
    with file.open("wb") as sink:
        sink.write(data)
        sink.flush()
        os.fsync(sink.fileno())


def put_folder(beside: Path, place: Path) -> None:
    """Rename `beside` to `place`; what was there is at `beside` then, or gone."""
    try:
        beside.rename(place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        return
    try:
        _exchange(beside, place)
    except (AttributeError, OSError):
        old = beside.with_name(f"{beside.name}-old")
        place.rename(old)
        try:
            beside.rename(place)
        except BaseException:
            old.rename(place)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> None:
    """Exchange two folders in one step, where the C library and the file system can (Linux, `renameat2`)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
