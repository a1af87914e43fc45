"""`penstock index` and `penstock search`: which of my pictures is this one most like, without a network connection."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.errors import RequestError, SourceError

if TYPE_CHECKING:
    from penstock.device.engine import Engine
    from penstock.device.search import Found

NAMED = 20


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(index)
    app.command()(search)


def index(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="A pack whose network has an embedding.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of pictures; those in its folders too.")],
    to: Annotated[Path | None, typer.Option(help="The index's folder; PACK/index by default.")] = None,
    key: Annotated[str | None, typer.Option(help="Who must have signed the pack.")] = None,
    precision: Annotated[str, typer.Option(help="fp32, or int8 where the pack has it.")] = "fp32",
    threads: Annotated[int, typer.Option(min=1, help="Threads of the network.")] = 1,
) -> None:
    """Index a folder's pictures by what a pack's network makes of them; what is in the index already is kept."""
    from rich.console import Console
    from rich.progress import Progress

    from penstock.device.index import index_folder

    engine = _engine(pack, key, precision, threads)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Pictures", total=None)
        made = index_folder(engine, folder, to, lambda done, total: progress.update(task, completed=done, total=total))
    for sentence in made.broken.named[:NAMED]:
        typer.echo(f"Left out: {sentence}", err=True)
    if made.broken.count > NAMED:
        typer.echo(f"Left out: {made.broken.count - NAMED:,} more.", err=True)
    typer.echo(
        f"Index: {made.folder}  Pictures: {made.count:,}, of which {made.looked_at:,} are new, "
        f"{made.broken.count:,} left out"
    )


def search(
    pack: Annotated[Path, typer.Argument(metavar="PACK", help="The pack with which the index was made.")],
    picture: Annotated[Path, typer.Argument(metavar="PICTURE", help="What is looked for.")],
    index: Annotated[Path | None, typer.Option(help="The index's folder; PACK/index by default.")] = None,
    count: Annotated[int, typer.Option(min=1, help="How many are given.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    key: Annotated[str | None, typer.Option(help="Who must have signed the pack.")] = None,
    precision: Annotated[str, typer.Option(help="fp32, or int8 where the pack has it.")] = "fp32",
    threads: Annotated[int, typer.Option(min=1, help="Threads of the network.")] = 1,
) -> None:
    """Give the pictures of an index that are most like one, the likest first."""
    from penstock.core.pack import INDEX
    from penstock.device.pictures import read_picture
    from penstock.device.search import read_index
    from penstock.device.search import search as nearest

    engine = _engine(pack, key, precision, threads)
    known = read_index(index or pack / INDEX)
    try:
        found = nearest(engine, known, read_picture(picture), count)
    except RequestError as error:
        raise SourceError(f"{picture} cannot be used: {str(error)[:1].lower()}{str(error)[1:]}") from None
    typer.echo(_json(found) if as_json else _lines(found))


def _engine(pack: Path, key: str | None, precision: str, threads: int) -> "Engine":
    from penstock.cli.watch import pack_of
    from penstock.device.engine import Engine

    return Engine(pack_of(pack, key), precision=precision, threads=threads)


def _json(found: "list[Found]") -> str:
    return json.dumps([{"file": one.item.file, "similarity": one.similarity} for one in found], ensure_ascii=False)


def _lines(found: "list[Found]") -> str:
    return "\n".join(f"{one.similarity:.3f}  {one.item.file}" for one in found)
