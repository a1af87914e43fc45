"""The cache of downloads: the most recently used are kept within a limit, and those in use always.

cache/bundles/HASH/         a download; also in packs/ and shards/
cache/bundles/.HASH.lock    held by the process that changes it
cache/bundles/.HASH.used    shared by the processes that use it; its time is that of the last use
"""

import fcntl
import os
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

from penstock.core.remote_folder import one_at_a_time

DEFAULT_CACHE = Path("~/.cache/penstock")
DEFAULT_LIMIT_BYTES = 20 * 10**9
SHARDS = "shards"
_KINDS = ("bundles", "packs", SHARDS)


def use(place: Path) -> None:
    """Keep a download until this process ends, and note its use. The caller holds its lock."""
    used = _used(place)
    _hold(used)
    used.touch()


@cache
def _hold(used: Path) -> int:
    # Open until the process ends, which also releases the lock of one that is killed.
    descriptor = os.open(used, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def make_room(root: Path, limit_bytes: int) -> list[Path]:
    """Remove the downloads that were not used for longest, until the rest is within a limit.

    Args:
        root: The cache.
        limit_bytes: Sum of the sizes of all downloads. Those in use may exceed it.

    Returns:
        What was removed.
    """
    folders = [root / kind for kind in _KINDS]
    places = [place for folder in folders if folder.is_dir() for place in folder.iterdir() if _is_download(place)]
    sizes = {place: _size(place) for place in places}
    too_much = sum(sizes.values()) - limit_bytes
    removed: list[Path] = []
    for place in sorted(places, key=_last_use):
        if too_much <= 0:
            break
        if _remove(place):
            too_much -= sizes[place]
            removed.append(place)
    return removed


def _remove(place: Path) -> bool:
    """Remove a download unless a process uses it; return whether it was removed."""
    hidden = place.with_name(f".{place.name}.removed")
    try:
        with one_at_a_time(place, wait=False), _used(place).open("a") as used:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(hidden, ignore_errors=True)
            # At once, so that no reader finds a half of it.
            place.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)
    except (BlockingIOError, FileNotFoundError):
        return False
    return True


def _used(place: Path) -> Path:
    return place.with_name(f".{place.name}.used")


def _is_download(place: Path) -> bool:
    return place.is_dir() and not place.name.startswith(".")


def _last_use(place: Path) -> float:
    # A download of an earlier version has no such file, and another process may remove one meanwhile.
    for file in (_used(place), place):
        with suppress(FileNotFoundError):
            return file.stat().st_mtime
    return 0.0


def _size(place: Path) -> int:
    size = 0
    for file in place.rglob("*"):
        with suppress(FileNotFoundError):
            size += file.stat().st_size
    return size
