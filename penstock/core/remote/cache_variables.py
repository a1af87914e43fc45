"""The variables of the environment that place and limit the cache of downloads.

Commands read them, and so do `Shards`: a recipe makes those, and no argument of a command reaches it.
"""

import os
import re
from pathlib import Path

from penstock.core.errors import StorageError
from penstock.core.remote.remote_cache import DEFAULT_CACHE, DEFAULT_LIMIT_BYTES


def cache_folder() -> Path:
    """The folder of what is downloaded and exported: `PENSTOCK_CACHE`, or `~/.cache/penstock`."""
    return Path(os.environ.get("PENSTOCK_CACHE") or DEFAULT_CACHE).expanduser()


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
