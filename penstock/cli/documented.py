"""Help texts of a command's options, taken from its docstring."""

import inspect
import re
from collections.abc import Callable
from typing import Annotated, TypeVar, get_origin

import typer

F = TypeVar("F", bound=Callable[..., None])
# A name and its text, whose further lines are indented more.
_ENTRY = re.compile(r"^    (\w+): (.*(?:\n {6,}.*)*)", re.MULTILINE)


def documented(command: F) -> F:
    """Make the `Args` of a command's docstring the help texts of its options; the rest is the help of the command.

    A parameter without a default is an argument, another one an option, unless it is annotated with either.
    """
    command.__doc__, _, arguments = inspect.cleandoc(command.__doc__ or "").partition("\n\nArgs:\n")
    hints, parameters = command.__annotations__, inspect.signature(command).parameters
    helps = dict(_ENTRY.findall(arguments))
    assert helps.keys() == parameters.keys(), (command.__name__, helps)
    for name, text in helps.items():
        if get_origin(hints[name]) is not Annotated:
            required = parameters[name].default is inspect.Parameter.empty
            hints[name] = Annotated[hints[name], typer.Argument() if required else typer.Option()]
        hints[name].__metadata__[0].help = " ".join(text.split())
    return command
