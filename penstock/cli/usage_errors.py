"""One sentence for each command line that typer refuses: the option, the value given, and what is expected.

A group without a command is refused with its help.
"""

import inspect
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from difflib import get_close_matches
from enum import Enum
from types import UnionType
from typing import Annotated, Any, final, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

# Typer has this class from Click or in a copy of its own, and exports only what is derived from it.
UsageError: type[Exception] = typer.BadParameter.mro()[1]
# Suggest at most so many options with the typed prefix.
MAX_SUGGESTED = 3
_NUMBERS = {int: "a whole number", float: "a number"}


@final
class CommandGroup(TyperGroup):
    """A group of commands. Without a command its help goes to stderr, as errors of a command line do."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; typer prints the help meanwhile, if there are none."""
        if args:
            return super().parse_args(ctx, args)
        with redirect_stdout(sys.stderr):
            return super().parse_args(ctx, args)


def usage_sentence(error: Any, root: Any, words: Sequence[str]) -> str:
    """Say in a sentence what is wrong with a command line, and how to write it.

    Args:
        error: The `UsageError` of typer.
        root: The command `penstock`.
        words: What was typed after it.
    """
    path, command = _command_of(root, words)
    kind = type(error).__name__
    if kind == "MissingParameter":
        return f"{_name(path)} needs {_shown(error.param)}; write {_usage(path, command)}."
    if isinstance(error, typer.BadParameter):
        return _wrong_value(error, command)
    if kind == "NoSuchOption":
        # Of -port, typer names -p alone.
        begin = error.option_name
        typed = next((word for word in words if word.startswith(begin) and not begin.startswith("--")), begin)
        return f"{_name(path)} has no option {typed}; {_suggestion(typed, path, command)}"
    if kind == "BadOptionUsage":
        return _wrong_use(error.option_name, command) or error.format_message()
    said = error.format_message().rstrip(".").replace("No such command", "there is no command", 1)
    if said.startswith("Got unexpected extra argument"):
        extra = said.partition(" (")[2].removesuffix(")")
        usage = _usage(path, command)
        if any("--source" in each.opts for each in command.params) and " " not in extra:
            # The source of a pack's inputs is an option.
            usage = f"{usage[:-1]} --source {extra}'"
        return f"{_name(path)} does not take the argument {extra!r}; write {usage}."
    # The names of commands that are close are there already.
    return said if said.endswith("?") else f"{said}; see '{path} --help'."


def _command_of(root: Any, words: Sequence[str]) -> tuple[str, Any]:
    """Find the command by what was typed: not every error has it."""
    path, command = ["penstock"], root
    for word in words:
        below = getattr(command, "commands", {}).get(word)
        if below is None:
            break
        path.append(word)
        command = below
    return " ".join(path), command


def _name(path: str) -> str:
    # The line begins with 'penstock:'.
    return path.removeprefix("penstock ")


def _shown(parameter: Any) -> str:
    """Name an option as it is typed, and an argument as the help names it."""
    return parameter.opts[0] if _is_option(parameter) else _place(parameter).strip("[]")


def _place(parameter: Any) -> str:
    """The name that stands for a value, as the help has it."""
    return parameter.metavar or parameter.name.upper()


def _usage(path: str, command: Any) -> str:
    """The shortest whole command line, with names in place of values."""
    needed = [each for each in command.params if each.required]
    options = [f"{_shown(each)} {_place(each)}" for each in needed if _is_option(each)]
    arguments = [_place(each) for each in command.params if not _is_option(each)]
    return f"'{' '.join([path, *arguments, *options])}'"


def _is_option(parameter: Any) -> bool:
    return parameter.param_type_name == "option"


def _wrong_value(error: Any, command: Any) -> str:
    if error.param is None:
        return error.format_message()
    cause, shown = error.__cause__, _shown(error.param)
    # Earlier versions of typer do not check by Pydantic, and their sentences have the value.
    given = f"{cause.errors()[0]['input']!r}" if hasattr(cause, "errors") else f"wrong ({error.message.rstrip('.')})"
    return f"{shown} is {given}; give {_expected(error.param, command)}."


def _wrong_use(name: str, command: Any) -> str | None:
    """Say that an option has no value, or has one and takes none; None for an option that is not found."""
    for parameter in command.params:
        if name in (*parameter.opts, *parameter.secondary_opts):
            if parameter.is_flag:
                forms = " or ".join([*parameter.opts, *parameter.secondary_opts])
                return f"{name} takes no value; write {forms} alone."
            return f"{name} has no value; give {_expected(parameter, command)}."
    return None


def _expected(parameter: Any, command: Any) -> str:
    """Say in words what values a parameter takes, with an example."""
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    hint, declared = hints.get(parameter.name, str), None
    if get_origin(hint) is Annotated:
        hint, declared = get_args(hint)[0], get_args(hint)[1]
    # Of `list[int] | None`, int.
    while get_origin(hint) in (UnionType, list):
        hint = get_args(hint)[0]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(str(each.value) for each in hint)
    if hint not in _NUMBERS:
        return f"one, as {_shown(parameter)} {_place(parameter)}"
    least, most = getattr(declared, "min", None), getattr(declared, "max", None)
    bounds = ("" if least is None else f" from {_number(least)}") + ("" if most is None else f" to {_number(most)}")
    default = parameter.default
    example = f", such as {_shown(parameter)} {_number(default)}" if isinstance(default, int | float) else ""
    return f"{_NUMBERS[hint]}{bounds}{example}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _suggestion(typed: str, path: str, command: Any) -> str:
    """Suggest the options that begin with what was typed, otherwise the closest one, otherwise the help."""
    name = typed.lstrip("-").lower().replace("_", "-")
    options = {
        option.lstrip("-"): option
        for each in command.params
        if _is_option(each)
        for option in (*each.opts, *each.secondary_opts)
    }
    found = sorted(each for each in options if each.startswith(name) or (len(name) > 2 and name.startswith(f"{each}-")))
    if not 0 < len(found) <= MAX_SUGGESTED:
        found = get_close_matches(name, options, n=1, cutoff=0.7)
    if not found:
        return f"see '{path} --help'."
    return f"do you mean {' or '.join(options[each] for each in found)}?"
