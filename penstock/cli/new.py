"""`penstock new`: write the file of a new application."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.documented import documented
from penstock.cli.usage_errors import CommandGroup
from penstock.core.errors import ApplicationError
from penstock.core.wording.counted import counted

# Unreadable pictures that are listed.
MAX_LISTED = 5


commands = typer.Typer(cls=CommandGroup, help="Write the file of a new application.", no_args_is_help=True)


@commands.command()
@documented
def images(
    file: Annotated[Path, typer.Argument(metavar="FILE.py")],
    data: Annotated[Path, typer.Option()],
    side: int = 128,
    network: str = "mobile",
) -> None:
    """Declare a classifier of the pictures in a folder; the labels are written into the file.

    Args:
        file: The file to write; it names the application.
        data: Pictures in class folders, an imagefolder, or WebDataset's tar files.
        side: Side of the network's square input, in pixels.
        network: mobile, small enough for phones, or resnet50.
    """
    from penstock.apps.images.template import application_file
    from penstock.train.data.picture_layouts import find_pictures, labels_of, unreadable

    _check_file(file)
    _write(file, application_file(data, file.stem, file=file.name, side=side, network=network))
    pictures = find_pictures(data)
    typer.echo(f"{data} holds {counted(len(pictures), 'picture')} of {counted(len(labels_of(pictures)), 'label')}.")
    if broken := unreadable(pictures):
        named = ", ".join(broken[:MAX_LISTED]) + (", ..." if len(broken) > MAX_LISTED else "")
        typer.echo(
            f"{len(broken):,} of them cannot be read: {named}. Mend or remove them, or train with --bad-examples skip."
        )
    _say_what_comes_next(file)


@commands.command()
@documented
def text(
    file: Annotated[Path, typer.Argument(metavar="FILE.py")],
    data: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Declare a classifier of texts; without --data the file makes a few itself, so that all commands work.

    Args:
        file: The file to write; it names the application.
        data: Labelled texts, one a line: a label, a tab, a text.
    """
    from penstock.apps.text.template import application_file

    _check_file(file)
    _write(file, application_file(file.stem, file=file.name, data=data))
    _say_what_comes_next(file)


@commands.command()
@documented
def detector(
    file: Annotated[Path, typer.Argument(metavar="FILE.py")],
    data: Annotated[Path | None, typer.Option()] = None,
    pictures: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Declare a detector of objects in pictures; without --data the file draws a few itself, so that all commands work.

    Args:
        file: The file to write; it names the application.
        data: Boxes in COCO's format, such as instances_train2017.json; its categories become the labels.
        pictures: The folder of its pictures; by default that of the file.
    """
    from penstock.apps.detect.template import application_file

    _check_file(file)
    text, found = application_file(file.stem, file=file.name, annotations=data, pictures=pictures)
    _write(file, text)
    if found:
        boxes = sum(len(each.boxes) for each in found)
        missing = [each.file for each in found if not each.file.is_file()]
        typer.echo(f"{data} has {counted(boxes, 'box', 'boxes')} in {counted(len(found), 'picture')}.")
        if missing:
            named = ", ".join(map(str, missing[:MAX_LISTED])) + (", ..." if len(missing) > MAX_LISTED else "")
            typer.echo(f"{len(missing):,} of them are not there: {named}. Copy them, or name another folder.")
    _say_what_comes_next(file)


@commands.command()
@documented
def translator(
    file: Annotated[Path, typer.Argument(metavar="FILE.py")],
    data: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Declare a translator of texts; without --data the file makes a few pairs itself, so that all commands work.

    Args:
        file: The file to write; it names the application. The vocabulary is written beside it.
        data: Texts and their translations, one pair a line: a text, a tab, its translation.
    """
    from penstock.apps.translate.template import application_file

    _check_file(file)
    text, vocabulary, subwords = application_file(file.stem, file=file.name, data=data)
    beside = file.with_name(vocabulary)
    if beside.exists():
        raise ApplicationError(f"{beside} exists; choose another name, or remove it.")
    _write(file, text)
    subwords.write(beside)
    typer.echo(f"{beside} has the vocabulary, {len(subwords):,} tokens.")
    _say_what_comes_next(file)


def _check_file(file: Path) -> None:
    if file.suffix != ".py":
        raise ApplicationError(f"{file} is not a Python file; choose a name that ends in .py.")
    if not all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in file.stem):
        raise ApplicationError(f"{file} would name the application {file.stem!r}; use letters, digits, '-' and '_'.")
    if file.exists():
        raise ApplicationError(f"{file} exists; choose another name, or remove it.")


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ApplicationError(f"{file} cannot be written ({error.strerror}); choose another folder.") from None


def _say_what_comes_next(file: Path) -> None:
    typer.echo(f"{file} declares {file.stem!r}. Train it: penstock train {file} --out runs/{file.stem}")
