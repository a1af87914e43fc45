"""The variables of the environment that place and limit the cache of downloads.

Commands read them, and so do `Shards`: a recipe makes those, and no argument of a command reaches it.
"""

import os
import re
from pathlib import Path

from penstock.core.errors import StorageError
from penstock.core.remote.remote_cache import DEFAULT_CACHE, DEFAULT_LIMIT_BYTES


def expanded_cache(given: str | Path) -> Path:
    """Expand the `~` of a cache folder.

    Raises:
        StorageError: The home folder is not known: a container may run as a user without one.
    """
    try:
        return Path(given).expanduser()
    except RuntimeError:
        raise StorageError(
            f"the cache {given} cannot be found: there is no such home folder; set HOME, or name another folder for "
            f"the cache (--cache, PENSTOCK_CACHE)."
        ) from None


def cache_folder() -> Path:
    """The folder of what is downloaded and exported: `PENSTOCK_CACHE`, or `~/.cache/penstock`.

    Raises:
        StorageError: The home folder is not known.
    """
    return expanded_cache(os.environ.get("PENSTOCK_CACHE") or DEFAULT_CACHE)


def cache_limit_bytes() -> int:
    """Limit of all downloads: `PENSTOCK_CACHE_GB`, or 20 GB.

    Raises:
        StorageError: It is no number from 0.
    """
    given = os.environ.get("PENSTOCK_CACHE_GB")
    if not given:
        return DEFAULT_LIMIT_BYTES
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", given):
        raise StorageError(f"PENSTOCK_CACHE_GB is {given!r}; it must be a number of gigabytes, such as 20 or 0.5.")
    return int(float(given) * 1e9)
