"""`penstock shard`."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.documented import documented
from penstock.core.errors import BadExample, TrainError
from penstock.core.wording.counted import counted

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.train.data.examples import Examples
    from penstock.train.data.image_folder import ImageFolder

MAX_LISTED = 20
PARTS = ("train", "validation", "test")
# Folders of these names alone are the splits of a data set, not classes.
SPLITS = ("train", "val", "valid", "validation", "test")
MAX_CLASSES_NAMED = 5
DEFAULT_SIZE = "256x256"


@documented
def shard(
    source: Annotated[Path | None, typer.Argument(metavar="[SOURCE]")] = None,
    out: Path | None = None,
    size: Annotated[str | None, typer.Option(metavar="HxW")] = None,
    grey: bool = False,
    app: Annotated[str | None, typer.Option(metavar="APP")] = None,
    shard_mb: Annotated[int, typer.Option(min=1)] = 512,
    workers: Annotated[int | None, typer.Option(min=1)] = None,
    skip_bad: bool = False,
    check: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
) -> None:
    """Write shards, which training reads without decoding: of a folder of pictures, or of an application's examples.

    Without SOURCE, --app APP writes the examples of that application's recipe, of any form, to --out FOLDER/train and
    FOLDER/validation, and FOLDER/test if there is a test set.

    Args:
        source: A folder that holds a folder of pictures for each class.
        out: Folder of the shards; it must not exist yet.
        size: Height and width of the pictures, in pixels; 256x256 by default.
        grey: Grey pictures instead of colour.
        app: Decode the pictures with this application, to its input size; without SOURCE, write its examples.
        shard_mb: Maximal size of a shard in megabytes.
        workers: Threads that read; all cores but one by default.
        skip_bad: Leave out examples that cannot be read, and list them.
        check: Verify every byte of shards instead.
    """
    if check is not None:
        if source is not None:
            raise TrainError("a check reads shards that are there; give --check FOLDER alone.")
        _check(check)
        return
    if (source is None and app is None) or out is None:
        raise TrainError(
            "SOURCE or --out is missing; give 'penstock shard SOURCE --out FOLDER', 'penstock shard --app APP --out "
            "FOLDER' for the examples of an application, or '--check FOLDER'."
        )
    if app is not None and (size is not None or grey):
        raise TrainError("--app decides the size and the colours of the examples; leave --size and --grey out.")
    options = {"shard_bytes": shard_mb << 20, "workers": workers, "on_bad": "skip" if skip_bad else "stop"}
    if source is not None:
        _write_pictures(_pictures(source, size or DEFAULT_SIZE, grey, app), out, options)
    else:
        assert app is not None
        _write_parts(_examples(app), out, options)


def _pictures(source: Path, size: str, grey: bool, app: str | None) -> "ImageFolder":
    from penstock.core.source_files.find_application import find_application
    from penstock.core.spec import TensorSpec
    from penstock.train.data.image_folder import ImageFolder, folders_in

    names = [folder.name for folder in folders_in(source)]
    if names and all(name.lower() in SPLITS for name in names):
        raise TrainError(
            f"{source} has the folders of splits, {' and '.join(sorted(names, key=_split_order))}, not of classes; "
            f"shard each: penstock shard {source}/{min(names, key=_split_order)} --out FOLDER."
        )
    if app is not None:
        application = find_application(app).application
        return ImageFolder(source, application.input_tensor, decode=application.decode)
    height, _, width = size.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise TrainError(f"--size is {size!r}; give height and width in pixels, such as 256x256.")
    shape = (int(height), int(width)) if grey else (int(height), int(width), 3)
    return ImageFolder(source, TensorSpec(dtype="uint8", shape=shape, meaning="a picture"), share=1.0)


def _split_order(name: str) -> int:
    return SPLITS.index(name.lower())


def _examples(app: str) -> "dict[str, Examples]":
    from penstock.core.source_files.find_application import find_application
    from penstock.train.run_folder import bound

    found = find_application(app)
    data = bound(found.application, found.recipe().data())
    parts = {name: getattr(data, name) for name in PARTS}
    return {name: examples for name, examples in parts.items() if examples is not None}


def _write_pictures(pictures: "ImageFolder", out: Path, options: dict[str, Any]) -> None:
    from penstock.train.data.shard_writer import write_shards

    with _progress({"Decoding": len(pictures)}) as (console, seen):
        left_out = write_shards(
            pictures, out, classes=pictures.classes, progress=lambda count: seen("Decoding", count), **options
        )
    _print_written(console, "", pictures, left_out, out)


def _write_parts(parts: "dict[str, Examples]", out: Path, options: dict[str, Any]) -> None:
    from penstock.train.data.shard_writer import write_parts

    with _progress({name: len(examples) for name, examples in parts.items()}) as (console, seen):
        left_out = write_parts(parts, out, progress=seen, **options)
    for name, examples in parts.items():
        _print_written(console, f"{name}: ", examples, left_out[name], out / name)
        if examples.varies:
            console.print(f"The {name} examples change from epoch to epoch; the shards hold those of the first epoch.")


@contextmanager
def _progress(counts: dict[str, int]) -> "Generator[tuple[Console, Callable[[str, int], object]]]":
    """Show a bar for each name; the second value takes the name and the number of its examples read so far."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(soft_wrap=True, highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks = {name: bar.add_task(name, total=count) for name, count in counts.items()}
        try:
            yield console, lambda name, seen: bar.update(tasks[name], completed=seen)
        except BadExample as error:
            raise TrainError(f"{error} Mend or remove it, or leave such out with --skip-bad.") from None


def _print_written(
    console: "Console", title: str, examples: "Examples", left_out: list[BadExample], folder: Path
) -> None:
    for error in left_out[:MAX_LISTED]:
        console.print(f"Left out: {error}")
    if len(left_out) > MAX_LISTED:
        console.print(f"... and {len(left_out) - MAX_LISTED:,} more.")
    classes = getattr(examples, "classes", ())
    shown = [str(name) for name in classes[:MAX_CLASSES_NAMED]] + ["..."] * (len(classes) > MAX_CLASSES_NAMED)
    named = f" of {counted(len(classes), 'class', 'classes')} ({', '.join(shown)})" if classes else ""
    count = len(examples) - len(left_out)
    console.print(f"{title}{counted(count, 'example')}{named}, {len(left_out):,} left out: {folder}")


def _check(folder: Path) -> None:
    """Check the shards in a folder, or in all of its parts; print those that are whole, then refuse the others."""
    from penstock.train.data.shard_index import read_parts
    from penstock.train.data.shards import Shards

    wrong: list[str] = []
    for name in read_parts(folder) or ("",):
        title = f"{name}: " if name else ""
        try:
            shards = Shards(folder / name, verify=False)
            damaged = shards.verify()
        except TrainError as error:
            wrong.append(f"{title}{error}")
            continue
        count = len(shards.index.shards)
        if damaged:
            listed = " ".join(damaged[:MAX_LISTED])
            wrong.append(f"{title}{len(damaged):,} of {count:,} shards are damaged. {listed}")
        else:
            held = f"{counted(len(shards), 'example')} in {counted(count, 'shard')}"
            typer.echo(f"{title}{held}, all as they were written.")
    if wrong:
        raise TrainError("\n".join(wrong))
