"""`penstock tiles`: run a dense network over a whole slide."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.documented import documented
from penstock.core.errors import SourceError
from penstock.core.machine.cores import available_cores
from penstock.core.remote.cache_variables import expanded_cache

if TYPE_CHECKING:
    from penstock.core.pictures.dense import Dense
    from penstock.device.dense_run import SlideFinds
    from penstock.device.slides import Slide

# A slide whose pixels differ by more than this share from those that the network learned gets a warning.
PIXEL_TOLERANCE = 0.15


@documented
def tiles(
    source: Annotated[str, typer.Argument(metavar="SOURCE")],
    slide: Annotated[Path, typer.Argument(metavar="SLIDE")],
    out: Path | None = None,
    overview: Path | None = None,
    threshold: Annotated[float | None, typer.Option(min=0.001, max=1)] = None,
    app: str | None = None,
    accept_changed_app: bool = False,
    device: str = "auto",
    precision: str = "fp32",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    cache: Annotated[Path, typer.Option(metavar="DIR", envvar="PENSTOCK_CACHE")] = Path("~/.cache/penstock"),
) -> None:
    """Find what a dense network finds on a whole slide, tile by tile.

    Args:
        source: A pack, a bundle, or the URL of a server.
        slide: A slide in any format of OpenSlide, or another picture.
        out: Write the finds to this JSON file; by default they are printed.
        overview: Write a reduced picture of the slide with the finds marked: .png or .jpg.
        threshold: Least score of a find; by default the application's.
        app: Application on a server that has several dense ones.
        accept_changed_app: For a bundle: accept an application whose sources changed.
        device: For a bundle: cpu, cuda, cuda:N, or auto.
        precision: For a bundle on a GPU: fp32, bf16 or fp16.
        threads: Threads that read tiles and run them.
        cache: The folder of exported networks.
    """

    from rich.console import Console
    from rich.progress import Progress

    from penstock.cli.tile_sources import dense_run
    from penstock.device.slides import open_slide

    cores = available_cores()
    console = Console(stderr=True)
    with open_slide(slide) as opened:
        _check_written(slide, out, overview)
        with (
            dense_run(
                source,
                app=app,
                accept_changed=accept_changed_app,
                device=device,
                precision=precision,
                threads=threads,
                cores=cores,
                cache=expanded_cache(cache),
            ) as run,
            Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
        ):
            _warn_of_scale(opened, run.dense)
            if threshold is not None:
                run = replace(run, dense=replace(run.dense, threshold=threshold))
            task = progress.add_task("Tiles", total=None)
            found = run.over(opened, lambda done, total: progress.update(task, completed=done, total=total))
    _write(found, opened, out, overview)


def _check_written(slide: Path, out: Path | None, overview: Path | None) -> None:
    """Refuse files that cannot be written before a long run, not after it."""
    import os

    from PIL import Image

    for file in (out, overview):
        if file is None:
            continue
        if file.exists() and file.samefile(slide):
            raise SourceError(f"{file} is the slide itself; name another file.")
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            reason = "is a folder" if file.is_dir() else "is not writable" if file.parent.is_dir() else "has no folder"
            raise _unwritable(f"{file} {reason}")
    if overview is not None and Image.registered_extensions().get(overview.suffix.lower()) not in Image.SAVE:
        raise _unwritable(f"unknown file extension: {overview.suffix or 'none'}")


def _unwritable(reason: object) -> SourceError:
    return SourceError(f"the finds cannot be written ({reason}); name another file.")


def _warn_of_scale(slide: "Slide", dense: "Dense") -> None:
    given, expected = slide.pixel_um, dense.pixel_um
    if given is not None and expected is not None and abs(given / expected - 1) > PIXEL_TOLERANCE:
        typer.echo(
            f"{slide.name} has {given:.3g} um a pixel, but the network expects {expected:.3g}: the finds may be wrong.",
            err=True,
        )


def _write(found: "SlideFinds", slide: "Slide", out: Path | None, overview: Path | None) -> None:
    content = {
        "slide": slide.name,
        "width": slide.width,
        "height": slide.height,
        "finds": [find.to_json() for find in found.finds],
    }
    text = json.dumps(content, indent=2) + "\n"
    try:
        if out is None:
            typer.echo(text, nl=False)
        else:
            out.write_text(text)
        if overview is not None:
            found.marked().save(overview)
    except (OSError, ValueError) as error:
        raise _unwritable(error) from None
    typer.echo(
        f"Finds: {len(found.finds):,}  Tiles: {found.tiles:,}, {found.empty:,} of them empty  "
        f"Seconds: {found.seconds:.2f}",
        err=True,
    )
