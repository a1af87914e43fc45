"""The command line: one module for each group of commands."""

import sys
from importlib import import_module

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.usage_errors import CommandGroup, UsageError, usage_sentence
from penstock.core.errors import EngineLost, PeersLost, PenstockError
from penstock.core.machine.version import __version__

# A process crashed or was killed: what runs the server may start it again.
EXIT_CRASHED = 1
EXIT_USER_ERROR = 2
# The launcher of several training processes ignores this status and looks for the process that failed first.
EXIT_PEERS_LOST = 3
EXIT_INTERRUPTED = 130
EXIT_STATUSES: dict[type[PenstockError], int] = {PeersLost: EXIT_PEERS_LOST, EngineLost: EXIT_CRASHED}
# Functions by their modules, in the order of the help.
COMMANDS = {
    "train": ("train",),
    "runs": ("runs",),
    "sweep": ("sweep",),
    "shard": ("shard",),
    "bundle": ("bundle",),
    "inspect": ("inspect", "apps"),
    "export": ("export",),
    "push": ("push", "pull"),
    "verify": ("verify",),
    "serve": ("serve",),
    "watch": ("watch",),
    "index": ("index", "search"),
    "tiles": ("tiles",),
    "score": ("score",),
}
# Modules whose commands have a name in front.
GROUPS = ("new", "bench")


def build() -> typer.Typer:
    """The command-line application with every command registered."""
    app = typer.Typer(
        name="penstock",
        cls=CommandGroup,
        help="Declare a network once; train it, serve it, measure it.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True)
    def penstock(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        if version:
            typer.echo(__version__)
            raise typer.Exit

    for module, names in COMMANDS.items():
        for name in names:
            app.command()(getattr(import_module(f"penstock.cli.{module}"), name))
    for group in GROUPS:
        app.add_typer(import_module(f"penstock.cli.{group}").commands, name=group)
    return app


def main() -> None:
    """Run the command line. A user's mistake is one sentence on stderr and exit status 2."""
    command = typer.main.get_command(build())
    try:
        # Not standalone, as typer would print its own errors, in boxes.
        sys.exit(command.main(prog_name="penstock", standalone_mode=False) or 0)
    except UsageError as error:
        # A group without a command: its help is printed already.
        if type(error).__name__ != "NoArgsIsHelpError":
            _print_error(usage_sentence(error, command, sys.argv[1:]))
        sys.exit(EXIT_USER_ERROR)
    except PenstockError as error:
        _print_error(str(error))
        sys.exit(EXIT_STATUSES.get(type(error), EXIT_USER_ERROR))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(EXIT_INTERRUPTED)


def _print_error(sentence: str) -> None:
    text = Text.assemble(("penstock:", "bold red"), f" {sentence}")
    Console(stderr=True, soft_wrap=True, highlight=False).print(text)
