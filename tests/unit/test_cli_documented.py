"""Help texts of options, from the docstring of their command."""

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli.documented import documented


def copy(source: Path, to: Annotated[str, typer.Option("--onto", metavar="PLACE")] = "here", often: int = 1) -> None:
    """Copy a file.

    Never a folder.

    Args:
        source: The file: any.
        to: The place to which it is copied,
            on two lines.
        often: Times.
    """
    typer.echo(f"{source} {to} {often}")


def test_the_docstring_is_the_help() -> None:
    app = typer.Typer(add_completion=False)
    app.command()(documented(copy))
    command: Any = typer.main.get_command(app)
    assert command.help == "Copy a file.\n\nNever a folder."
    helps = {option.name: option.help for option in command.params}
    assert helps == {
        "source": "The file: any.",
        "to": "The place to which it is copied, on two lines.",
        "often": "Times.",
    }
    assert CliRunner().invoke(app, ["x", "--onto", "y", "--often", "2"]).output == "x y 2\n"


def test_an_option_without_a_help_text_is_an_error() -> None:
    def other(one: int = 1, two: int = 2) -> None:
        """Do it.

        Args:
            one: A number.
        """

    with pytest.raises(AssertionError, match="other"):
        documented(other)
