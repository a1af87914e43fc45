"""Arguments that are a folder or a URL."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock.core.remote.cache_variables import cache_folder, cache_limit_bytes
from penstock.core.storage.remote_folder import url_of

if TYPE_CHECKING:
    from penstock.train.run_place import RunPlace


def bundle_at(place: str | Path, cache: Path | None = None) -> Path:
    """Return the folder of a bundle; one at a URL is downloaded first.

    Raises:
        BundleError: There is no bundle at the URL, or it is damaged.
        StorageError: The URL cannot be read.
    """
    if url_of(place) is None:
        return Path(place)
    from penstock.core.remote.remote_copy import local_bundle

    return local_bundle(place, cache or cache_folder(), _say, cache_limit_bytes())


def pack_at(place: str | Path) -> Path:
    """Return the folder of a pack; one at a URL is downloaded first.

    Raises:
        PackError: There is no pack at the URL, or it is damaged.
        StorageError: The URL cannot be read.
    """
    if url_of(place) is None:
        return Path(place)
    from penstock.core.remote.remote_copy import local_pack

    return local_pack(place, cache_folder(), _say, cache_limit_bytes())


def run_at(place: Path) -> "RunPlace":
    """Return the place of a run, with the records of one at a URL."""
    from penstock.train.run_place import RunPlace

    found = RunPlace.of(place)
    found.fetch()
    return found


def run_beside(place: "RunPlace") -> "RunPlace":
    """Return the place of a new run beside one that is there."""
    from penstock.train.same_run import next_folder

    return run_at(next_folder(place.folder)) if place.remote is None else place.beside(cache_folder())


def _say(sentence: str) -> None:
    # The answers of a command on stdout may be JSON.
    typer.echo(sentence, err=True)
