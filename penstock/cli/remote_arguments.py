"""Arguments that are a folder or a URL."""

import os
import re
from pathlib import Path

import typer

from penstock.core.errors import StorageError
from penstock.core.remote_folder import url_of


def cache_folder() -> Path:
    """The folder of what is downloaded and exported: `PENSTOCK_CACHE`, or `~/.cache/penstock`."""
    from penstock.core.remote_copy import DEFAULT_CACHE

    return Path(os.environ.get("PENSTOCK_CACHE") or DEFAULT_CACHE).expanduser()


def cache_limit_bytes() -> int:
    """Limit of all downloads: `PENSTOCK_CACHE_GB`, or 20 GB.

    Raises:
        StorageError: It is no number from 0.
    """
    from penstock.core.remote_cache import DEFAULT_LIMIT_BYTES

    given = os.environ.get("PENSTOCK_CACHE_GB")
    if not given:
        return DEFAULT_LIMIT_BYTES
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", given):
        raise StorageError(f"PENSTOCK_CACHE_GB is {given!r}; it must be a number of gigabytes, such as 20 or 0.5.")
    return int(float(given) * 1e9)


def bundle_at(place: str | Path, cache: Path | None = None) -> Path:
    """Return the folder of a bundle; one at a URL is downloaded first.

    Raises:
        BundleError: There is no bundle at the URL, or it is damaged.
        StorageError: The URL cannot be read.
    """
    if url_of(place) is None:
        return Path(place)
    from penstock.core.remote_copy import local_bundle

    return local_bundle(place, cache or cache_folder(), _say, cache_limit_bytes())


def pack_at(place: str | Path) -> Path:
    """Return the folder of a pack; one at a URL is downloaded first.

    Raises:
        PackError: There is no pack at the URL, or it is damaged.
        StorageError: The URL cannot be read.
    """
    if url_of(place) is None:
        return Path(place)
    from penstock.core.remote_copy import local_pack

    return local_pack(place, cache_folder(), _say, cache_limit_bytes())


def _say(sentence: str) -> None:
    # The answers of a command on stdout may be JSON.
    typer.echo(sentence, err=True)
