"""Arguments that are a folder or a URL."""

from pathlib import Path

import typer

from penstock.core.cache_variables import cache_folder, cache_limit_bytes
from penstock.core.remote_folder import url_of


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
