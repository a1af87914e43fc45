"""Tables of names and values, and lists of items left out, as several commands print them."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.device.source import DecodeFailures

# Items left out that are listed.
MAX_LISTED = 20
# Columns of a table that is piped or written to a file, where nothing says how many there are.
WIDE = 200


class Format(StrEnum):
    """`--format` of every command with a result that programs read."""

    TEXT = "text"
    JSON = "json"


def print_rows(rows: Mapping[str, str], *, title: str | None = None, console: "Console | None" = None) -> None:
    """Print a table of names and values."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, title=title, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    (console or Console()).print(table)


def table_console() -> "Console":
    """A console for a table of several columns: as wide as the terminal, or `WIDE` where there is none."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    return console


def print_left_out(failures: "DecodeFailures") -> None:
    """List the first items that could not be decoded, on stderr."""
    for sentence in failures.sentences[:MAX_LISTED]:
        typer.echo(f"Left out: {sentence}", err=True)
    if failures.count > MAX_LISTED:
        typer.echo(f"Left out: {failures.count - MAX_LISTED:,} more.", err=True)
