"""`penstock shard`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.documented import documented
from penstock.core.errors import BadExample, TrainError

if TYPE_CHECKING:
    from penstock.train.data.image_folder import ImageFolder

MAX_LISTED = 20


@documented
def shard(
    source: Annotated[Path | None, typer.Argument(metavar="[SOURCE]")] = None,
    out: Path | None = None,
    size: Annotated[str, typer.Option(metavar="HxW")] = "256x256",
    grey: bool = False,
    app: Annotated[str | None, typer.Option(metavar="APP")] = None,
    shard_mb: int = 512,
    workers: int | None = None,
    skip_bad: bool = False,
    check: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
) -> None:
    """Decode a folder of pictures into shards, which training reads without decoding.

    Args:
        source: A folder that holds a folder of pictures for each class.
        out: Folder of the shards; it must not exist yet.
        size: Height and width of the pictures, in pixels.
        grey: Grey pictures instead of colour.
        app: Decode with this application, to its input size, instead.
        shard_mb: Maximal size of a shard in megabytes.
        workers: Threads that decode; all cores but one by default.
        skip_bad: Leave out pictures that cannot be read, and list them.
        check: Verify every byte of shards instead.
    """
    if check is not None:
        if source is not None:
            raise TrainError("a check reads shards that are there; give --check FOLDER alone.")
        _check(check)
        return
    if source is None or out is None:
        raise TrainError("SOURCE or --out is missing; give 'penstock shard SOURCE --out FOLDER', or '--check FOLDER'.")
    if shard_mb < 1 or (workers is not None and workers < 1):
        raise TrainError(f"--shard-mb is {shard_mb} and --workers {workers}; both must be at least 1.")
    _write(_pictures(source, size, grey, app), out, shard_mb, workers, skip_bad)


def _pictures(source: Path, size: str, grey: bool, app: str | None) -> "ImageFolder":
    from penstock.core.find_application import find_application
    from penstock.core.spec import TensorSpec
    from penstock.train.data.image_folder import ImageFolder

    if app is not None:
        application = find_application(app).application
        return ImageFolder(source, application.input_tensor, decode=application.decode)
    height, _, width = size.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise TrainError(f"--size is {size!r}; give height and width in pixels, such as 256x256.")
    shape = (int(height), int(width)) if grey else (int(height), int(width), 3)
    return ImageFolder(source, TensorSpec(dtype="uint8", shape=shape, meaning="a picture"), share=1.0)


def _write(pictures: "ImageFolder", out: Path, shard_mb: int, workers: int | None, skip_bad: bool) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from penstock.train.data.shard_writer import write_shards

    console = Console(soft_wrap=True, highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("Decoding", total=len(pictures))
        try:
            left_out = write_shards(
                pictures,
                out,
                classes=pictures.classes,
                shard_bytes=shard_mb << 20,
                workers=workers,
                on_bad="skip" if skip_bad else "stop",
                progress=lambda seen: bar.update(task, completed=seen),
            )
        except BadExample as error:
            raise TrainError(f"{error} Mend or remove it, or leave such out with --skip-bad.") from None
    for error in left_out[:MAX_LISTED]:
        console.print(f"Left out: {error}")
    if len(left_out) > MAX_LISTED:
        console.print(f"... and {len(left_out) - MAX_LISTED:,} more.")
    count = len(pictures) - len(left_out)
    console.print(f"{count:,} examples of {len(pictures.classes):,} classes, {len(left_out):,} left out: {out}")


def _check(folder: Path) -> None:
    from penstock.train.data.shards import Shards

    shards = Shards(folder, verify=False)
    damaged = shards.verify()
    if damaged:
        raise TrainError(
            f"{len(damaged):,} of {len(shards.index.shards):,} shards are damaged. {' '.join(damaged[:MAX_LISTED])}"
        )
    typer.echo(f"{len(shards):,} examples in {len(shards.index.shards):,} shards are as they were written.")
