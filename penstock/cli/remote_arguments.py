"""Arguments that are a folder or a URL."""

import os
from pathlib import Path

import typer

from penstock.core.remote_folder import url_of


def cache_folder() -> Path:
    """The folder of what is downloaded and exported: `PENSTOCK_CACHE`, or `~/.cache/penstock`."""
    from penstock.core.remote_copy import DEFAULT_CACHE

    return Path(os.environ.get("PENSTOCK_CACHE") or DEFAULT_CACHE).expanduser()


def bundle_at(place: str | Path, cache: Path | None = None) -> Path:
    """Return the folder of a bundle; one at a URL is downloaded first.

    Raises:
        BundleError: There is no bundle at the URL, or it is damaged.
        StorageError: The URL cannot be read.
    """
    if url_of(place) is None:
        return Path(place)
    from penstock.core.remote_copy import local_bundle

    return local_bundle(place, cache or cache_folder(), _say)


def pack_at(place: str | Path) -> Path:
    """Return the folder of a pack; one at a URL is downloaded first.

    Raises:
        PackError: There is no pack at the URL, or it is damaged.
        StorageError: The URL cannot be read.
    """
    if url_of(place) is None:
        return Path(place)
    from penstock.core.remote_copy import local_pack

    return local_pack(place, cache_folder(), _say)


def _say(sentence: str) -> None:
    # The answers of a command on stdout may be JSON.
    typer.echo(sentence, err=True)
