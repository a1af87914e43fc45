"""The cache of downloads: the most recently used are kept within a limit, and those in use always.

cache/bundles/HASH/         a download; also in packs/ and shards/
cache/bundles/.HASH.lock    held by the process that changes it
cache/bundles/.HASH.used    shared by the processes that use it; its time is that of the last use
cache/.over-limit           held by the process that said that what is in use exceeds the limit
"""

import fcntl
import math
import os
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path

from penstock.core.storage.remote_folder import one_at_a_time

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


def make_room(root: Path, limit_bytes: int, wanted_bytes: int = 0) -> list[str]:
    """Remove the downloads that were not used for longest, until the rest is within a limit.

    The limit is that of all downloads, in use or not. Those that a process uses are never removed: if they alone exceed
    the limit, all others are removed, and one of the processes that use the cache says so, once.

    Args:
        root: The cache.
        limit_bytes: Limit of the sum of their sizes; with 0 only those in use stay.
        wanted_bytes: Bytes that the caller is about to download.

    Returns:
        A sentence for each that was removed, and one if those in use exceed the limit.
    """
    folders = [root / kind for kind in _KINDS]
    places = [place for folder in folders if folder.is_dir() for place in folder.iterdir() if _is_download(place)]
    sizes = {place: _size(place) for place in places}
    total = sum(sizes.values()) + wanted_bytes
    sentences: list[str] = []
    for place in sorted(places, key=_last_use):
        if total <= limit_bytes:
            break
        if _remove(place):
            total -= sizes[place]
            sentences.append(f"Removed {place}, the download that was not used for longest: the cache is full")
    if total > limit_bytes > 0 and _says_excess(root / ".over-limit"):
        sentences.append(
            f"The downloads in use take {total / 1e9:.3g} GB, and the limit of the cache {root} is "
            f"{limit_bytes / 1e9:.3g} GB. They stay, and no other download does: set PENSTOCK_CACHE_GB to "
            f"{math.ceil(total / 1e9 + 0.05)} or more, or what was removed is downloaded again when it is needed."
        )
    return sentences


def _says_excess(file: Path) -> bool:
    """Tell whether the caller is the first of the processes that run now to say it, and says it for the first time."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # Held until the process ends.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    return True


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
