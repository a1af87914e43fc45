"""Help texts of a command's options, taken from its docstring."""

import inspect
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from penstock.core.errors import StorageError
from penstock.core.storage.remote_folder import url_of

F = TypeVar("F", bound=Callable[..., None])
# A name and its text, whose further lines are indented more.
_ENTRY = re.compile(r"^    (\w+): (.*(?:\n {6,}.*)*)", re.MULTILINE)


def documented(command: F) -> F:
    """Make the `Args` of a command's docstring the help texts of its options; the rest is the help of the command.

    A parameter without a default is an argument, another one an option, unless it is annotated with either.
    A bool that is False by default is a flag without a `--no-` form. A path is local: a URL is refused.
    """
    return _documented(command, ())


def documented_with_urls(*names: str) -> Callable[[F], F]:
    """Do what `documented` does for a command that takes URLs.

    Args:
        names: Parameters whose path may be a URL.
    """
    return lambda command: _documented(command, names)


def _documented(command: F, urls: Collection[str]) -> F:
    command.__doc__, _, arguments = inspect.cleandoc(command.__doc__ or "").partition("\n\nArgs:\n")
    hints, parameters = command.__annotations__, inspect.signature(command).parameters
    helps = dict(_ENTRY.findall(arguments))
    assert helps.keys() == parameters.keys(), (command.__name__, helps)
    for name, text in helps.items():
        if get_origin(hints[name]) is not Annotated:
            hints[name] = Annotated[hints[name], _declaration(name, hints[name], parameters[name].default)]
        # A bracket would begin Rich's markup.
        declaration = hints[name].__metadata__[0]
        declaration.help = " ".join(text.split()).replace("[", "\\[")
        if name not in urls and _holds_path(get_args(hints[name])[0]):
            # A path of a URL would be a folder called 's3:'.
            declaration.callback = _local(declaration, name)
    return command


def _holds_path(hint: object) -> bool:
    return hint is Path or any(map(_holds_path, get_args(hint)))


def _local(declaration: typer.models.ParameterInfo, name: str) -> Callable[[Any], Any]:
    is_option = isinstance(declaration, typer.models.OptionInfo)
    shown = f"--{name.replace('_', '-')}" if is_option else declaration.metavar or name.upper()

    def check(value: Any) -> Any:
        for place in value if isinstance(value, list | tuple) else [value]:
            if url_of(place) is not None:
                raise StorageError(f"{shown} is {url_of(place)}, and takes a local path; give one, and copy it.")
        return value

    return check


def _declaration(name: str, hint: object, default: object) -> typer.models.ParameterInfo:
    if default is inspect.Parameter.empty:
        return typer.Argument()
    if hint is bool and default is False:
        # What is off by default needs no option that turns it off.
        return typer.Option(f"--{name.replace('_', '-')}")
    return typer.Option()
