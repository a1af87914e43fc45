"""What is still there after the power is gone: written whole or not at all."""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
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


@contextmanager
def folder_beside(place: Path) -> Generator[Path]:
    """A new, hidden folder beside a place, to be filled and renamed there; what is left of it in the end is removed.

    So is, first, what processes left beside the place that were killed: one that lives holds a lock on its folder.

    Args:
        place: Where it is to go; its parents are made.

    Raises:
        OSError: It cannot be made.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(place)
    beside = place.with_name(f"{_beside(place)}{secrets.token_hex(4)}")
    unlocked = beside.with_name(f"{beside.name}-new")
    unlocked.mkdir()
    lock = os.open(unlocked, os.O_RDONLY)
    try:
        # Where the file system knows no locks, what is left stays.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Only under this name it may be taken for left.
        unlocked.rename(beside)
        yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        os.close(lock)


def _beside(place: Path) -> str:
    return f".{place.name}-being-written-"


def _remove_left(place: Path) -> None:
    for left in place.parent.iterdir():
        if not re.fullmatch(re.escape(_beside(place)) + "[0-9a-f]{8}", left.name):
            continue
        with suppress(OSError):
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(lock)


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
