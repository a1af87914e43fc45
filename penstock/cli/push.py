"""`penstock push` and `penstock pull`."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.documented import documented
from penstock.core.errors import StorageError
from penstock.core.storage.remote_folder import url_of


@documented
def push(
    folder: Annotated[Path, typer.Argument(metavar="BUNDLE|PACK")],
    to: Annotated[str, typer.Argument(metavar="URL")],
    private: bool = False,
) -> None:
    """Upload a bundle or a pack, verified, to a bucket or to a repository of the Hugging Face Hub.

    Args:
        folder: A bundle's or a pack's folder.
        to: Where it goes: s3://bucket/name or hf://user/name; one of the same kind there is replaced.
        private: Make a new repository private.
    """
    from penstock.core.remote.remote_copy import kind_of, upload_folder
    from penstock.core.storage.remote_folder import HUB, RemoteFolder

    url = url_of(to)
    if url is None:
        raise StorageError(f"{to} is no URL; give one such as s3://bucket/name or hf://user/name, or copy the folder.")
    kind = kind_of(folder)
    if url.startswith(f"{HUB}:"):
        from penstock.core.remote.hub_push import push_to_hub

        commit = push_to_hub(kind, folder, url, private=private)
        typer.echo(f"Pushed the {kind.name} {folder} to {url}, commit {commit}")
        return
    if private:
        raise StorageError(f"--private is of repositories; who may read {url} is set in the bucket.")
    remote = RemoteFolder(url)
    upload_folder(kind, folder, remote)
    typer.echo(f"Pushed the {kind.name} {folder} to {remote}")


@documented
def pull(
    url: Annotated[str, typer.Argument(metavar="URL")],
    out: Path | None = None,
) -> None:
    """Download a bundle or a pack, verified, to a folder.

    Args:
        url: Where it is: s3://bucket/name, hf://user/name or hf://user/name@REVISION.
        out: The new folder; the last part of the URL by default.
    """
    from penstock.core.remote.remote_copy import download_folder, kind_of
    from penstock.core.storage.remote_folder import RemoteFolder

    if url_of(url) is None:
        raise StorageError(f"{url} is no URL; give one such as s3://bucket/name or hf://user/name.")
    remote, kind = RemoteFolder(url), kind_of(url)
    place = download_folder(kind, remote, out or Path(remote.name.partition("@")[0]))
    typer.echo(f"Pulled the {kind.name} {remote} to {place}")
