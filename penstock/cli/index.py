"""`penstock index` and `penstock search`: find similar pictures, offline."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.documented import documented_with_urls
from penstock.cli.printing import Format, print_left_out
from penstock.core.errors import PackError, RequestError
from penstock.core.storage.remote_folder import url_of

if TYPE_CHECKING:
    from penstock.core.pictures.picture_index import SearchResult
    from penstock.device.pack_engine import PackEngine


@documented_with_urls("pack")
def index(
    pack: Annotated[Path, typer.Argument(metavar="PACK")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    out: Annotated[Path | None, typer.Option("--out", "--to")] = None,
    key: str | None = None,
    precision: str = "fp32",
    threads: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Index a folder's pictures by their embeddings; pictures that are indexed already are kept.

    Args:
        pack: A pack whose network has an embedding.
        folder: Pictures, including those in subfolders.
        out: The index's folder; PACK/index by default.
        key: Required signer of the pack.
        precision: fp32, or int8 where the pack has it.
        threads: CPU threads for the network.
    """
    from rich.console import Console
    from rich.progress import Progress

    from penstock.device.index import index_folder

    if out is None and url_of(pack) is not None:
        raise PackError(f"the pack is at {url_of(pack)}; say where its index goes with --out DIR.")
    engine = _engine(pack, key, precision, threads)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Pictures", total=None)
        report = index_folder(
            engine, folder, out, lambda done, total: progress.update(task, completed=done, total=total)
        )
    print_left_out(report.failures)
    typer.echo(
        f"Index: {report.folder}  Pictures: {report.count:,}, {report.computed:,} of them new, "
        f"{report.failures.count:,} left out"
    )


@documented_with_urls("pack")
def search(
    pack: Annotated[Path, typer.Argument(metavar="PACK")],
    picture: Annotated[Path, typer.Argument(metavar="PICTURE")],
    index: Path | None = None,
    count: Annotated[int, typer.Option(min=1)] = 5,
    format: Format = Format.TEXT,
    key: str | None = None,
    precision: str = "fp32",
    threads: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """List the pictures of an index that are most similar to one, most similar first.

    Args:
        pack: The pack with which the index was made.
        picture: The picture to search for.
        index: The index's folder; PACK/index by default.
        count: Number of results.
        format: A table, or JSON for programs.
        key: Required signer of the pack.
        precision: fp32, or int8 where the pack has it.
        threads: CPU threads for the network.
    """
    from penstock.core.packs.pack import INDEX
    from penstock.core.pictures.picture_index import read_index
    from penstock.device.picture_folder import read_picture, unusable
    from penstock.device.search import search as nearest

    if index is None and url_of(pack) is not None:
        raise PackError(f"the pack is at {url_of(pack)}; name its index with --index DIR.")
    engine = _engine(pack, key, precision, threads)
    known = read_index(index or pack / INDEX)
    try:
        found = nearest(engine, known, read_picture(picture), count)
    except RequestError as error:
        raise unusable(picture, error) from None
    typer.echo(_json(found) if format is Format.JSON else _lines(found))


def _engine(pack: Path, key: str | None, precision: str, threads: int) -> "PackEngine":
    from penstock.cli.watch import pack_of
    from penstock.device.pack_engine import PackEngine

    return PackEngine(pack_of(pack, key), precision=precision, threads=threads)


def _json(found: "list[SearchResult]") -> str:
    return json.dumps([{"file": one.item.file, "similarity": one.similarity} for one in found], ensure_ascii=False)


def _lines(found: "list[SearchResult]") -> str:
    return "\n".join(f"{one.similarity:.3f}  {one.item.file}" for one in found)
