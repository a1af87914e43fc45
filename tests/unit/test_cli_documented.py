"""Help texts of options, from the docstring of their command."""

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli import build
from penstock.cli.documented import documented
from penstock.core.errors import StorageError


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


def commands(command: Any, path: str = "penstock") -> list[tuple[str, Any]]:
    """All commands that do something, by what is typed."""
    below = getattr(command, "commands", {})
    return (
        [pair for name, sub in below.items() for pair in commands(sub, f"{path} {name}")]
        if below
        else [(path, command)]
    )


ALL = commands(typer.main.get_command(build()))


@pytest.mark.parametrize(("path", "command"), ALL, ids=[path for path, _ in ALL])
def test_help_shows_every_word_of_its_texts(path: str, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bracket in a text is not taken for Rich's markup, as the one of '[admin]' was."""
    monkeypatch.setenv("COLUMNS", "400")
    shown = CliRunner().invoke(build(), [*path.split()[1:], "--help"]).output
    for parameter in command.params:
        said = (getattr(parameter, "help", None) or "").replace("\\[", "[")
        assert said in shown, said


@pytest.mark.parametrize(("path", "command"), ALL, ids=[path for path, _ in ALL])
def test_options_follow_one_habit(path: str, command: Any) -> None:
    options = {name: parameter for parameter in command.params for name in parameter.opts if name[:2] == "--"}
    assert "--to" not in options or options["--to"].opts[0] == "--out"
    if "--format" in options:
        assert "<text|json>" in CliRunner().invoke(build(), [*path.split()[1:], "--help"]).output
    for name, parameter in options.items():
        assert name == name.lower().replace("_", "-")
        if parameter.is_flag and parameter.default is False:
            assert not parameter.secondary_opts, f"{path} {name} is off by default and has {parameter.secondary_opts}"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_shown(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    shown = CliRunner().invoke(build(), ["--show-completion", shell], prog_name="penstock")
    assert shown.exit_code == 0
    assert "_PENSTOCK_COMPLETE" in shown.output


def test_completion_knows_commands_and_options() -> None:
    found = CliRunner().invoke(
        build(),
        [],
        prog_name="penstock",
        env={"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock train --che", "COMP_CWORD": "2"},
    )
    assert found.output.split() == ["--checkpoint-every-steps"]


@pytest.mark.parametrize(
    ("typed", "option"),
    [
        ("shard pictures --out s3://bucket/x", "--out"),
        ("index pack pictures --out s3://bucket/x", "--out"),
        ("watch pack --out s3://bucket/x", "--out"),
        ("watch pack --out S3://bucket/x", "--out"),
        ("tiles slide.svs --app digits --out s3://bucket/x", "--out"),
        ("runs here --picture s3://bucket/x", "--picture"),
        ("pull s3://bucket/x --out s3://bucket/x", "--out"),
        ("push s3://bucket/x s3://bucket/y", "BUNDLE|PACK"),
        ("verify bundle s3://bucket/x", "[FILES]..."),
    ],
)
def test_a_url_where_a_command_takes_a_path_is_refused(typed: str, option: str) -> None:
    done = CliRunner().invoke(build(), typed.split())
    assert isinstance(done.exception, StorageError)
    assert str(done.exception).startswith(f"{option} is s3://bucket/x, and takes a local path")
