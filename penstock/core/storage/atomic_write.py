"""Write files and folders atomically, so that they survive a crash or a loss of power whole or not at all."""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder and all in it to the disk."""
    for entry in (folder, *folder.rglob("*")):
        sync(entry)


def write_through(file: Path, data: bytes) -> None:
    """Write a file and flush it to the disk."""
    with file.open("wb") as sink:
        sink.write(data)
        sink.flush()
        os.fsync(sink.fileno())


@contextmanager
def folder_beside(place: Path) -> Generator[Path]:
    """A new, hidden folder beside a place, to be filled and renamed to it; leftovers are removed at the end.

    Folders left by killed processes are removed first; a live process holds a lock on its folder.

    Args:
        place: The destination; its parents are created.

    Raises:
        OSError: The folder cannot be created.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(place)
    lock: int | None = None
    # A signal may end the process between any two lines.
    made: list[Path] = []
    try:
        while lock is None:
            beside = place.with_name(f"{_beside(place)}{secrets.token_hex(4)}")
            made.append(beside)
            beside.mkdir()
            lock = _lock_of(beside)
        yield made[-1]
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock_of(folder: Path) -> int | None:
    """Lock a new folder; None if another process took it for a leftover and removed it first."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    # On a file system without locks, leftovers stay.
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)
    if folder.exists():
        return lock
    os.close(lock)
    return None


def _beside(place: Path) -> str:
    return f".{place.name}-being-written-"


def _remove_leftovers(place: Path) -> None:
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


@contextmanager
def replace_folder(place: Path, check: Callable[[Path], None]) -> Generator[Path]:
    """Fill a hidden folder beside a place, then flush it to the disk and rename it to the place in one step.

    Args:
        place: The folder to write or replace.
        check: Raises if `place` must not be replaced; called before the folder is filled and before it is renamed.

    Raises:
        OSError: It cannot be written.
    """
    check(place)
    with folder_beside(place) as beside:
        yield beside
        sync_tree(beside)
        check(place)
        put_folder(beside, place)
        sync(place.parent)


def put_folder(beside: Path, place: Path) -> None:
    """Rename `beside` to `place`; the old content of `place` is then at `beside`, or removed."""
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
    """Exchange two folders in one step, where the C library and the file system support it (Linux, `renameat2`)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
