"""Parts of a recipe that are declared by a name and arguments, so that settings reach both: optimizers, schedules."""

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self, cast

from penstock.core.errors import TrainError

_CLOSE = 3


class Declared(ABC):
    """A name and arguments, immutable.

    Args:
        name: The name.
        defaults: The default value of each argument that has one.
        given: The arguments that differ from them or have none.

    Attributes:
        name: The name.
        arguments: The arguments that were given.
        settings: All arguments, with the values in use.
    """

    KIND: ClassVar[str]
    __slots__ = ("arguments", "name", "settings")

    def __init__(self, name: str, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        # TOML has lists only.
        plain = {each: tuple(cast(list[Any], it)) if isinstance(it, list) else it for each, it in given.items()}
        self.name: str
        self.arguments: Mapping[str, Any]
        self.settings: Mapping[str, Any]
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "arguments", MappingProxyType(plain))
        object.__setattr__(self, "settings", MappingProxyType({**defaults, **plain}))

    @classmethod
    @abstractmethod
    def names(cls) -> Collection[str]:
        """List the names that can be declared."""

    @classmethod
    @abstractmethod
    def settings_of(cls, name: str) -> Collection[str]:
        """List the arguments that go with a name."""

    def value(self, name: str) -> Any:
        """Return the value of `"name"` or of an argument."""
        return self.name if name == "name" else self.settings[name]

    def with_setting(self, name: str, value: Any) -> Self:
        """Return a copy with another name, which keeps the arguments that both have, or with another argument.

        Args:
            name: `"name"`, or that of an argument.
            value: The value; None for the default.

        Raises:
            TrainError: There is no such name or argument, or the value is out of range.
        """
        if name != "name":
            return self._made(self.name, {**self.arguments, name: value} if value is not None else self._without(name))
        if not isinstance(value, str) or value.lower() not in self.names():
            raise TrainError(f"there is no {self.KIND} {value!r}; {nearest(str(value).lower(), self.names())}.")
        known = self.settings_of(value.lower())
        return self._made(value, {each: given for each, given in self.arguments.items() if each in known})

    def _without(self, name: str) -> dict[str, Any]:
        return {each: given for each, given in self.arguments.items() if each != name}

    @classmethod
    @abstractmethod
    def _made(cls, name: Any, arguments: Mapping[str, Any]) -> Self: ...

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable; make another one.")

    def __reduce__(self) -> Any:
        return _remade, (type(self), self.name, dict(self.arguments))

    def __eq__(self, other: object) -> bool:
        alike = isinstance(other, type(self))
        return alike and (other.name, dict(other.settings)) == (self.name, dict(self.settings))

    def __hash__(self) -> int:
        return hash((type(self), self.name, *sorted(self.settings)))

    def __repr__(self) -> str:
        arguments = "".join(f", {name}={value!r}" for name, value in self.arguments.items())
        return f"{type(self).__name__}({self.name!r}{arguments})"

    def describe(self) -> str:
        """Return the name and the arguments that were given, for people."""
        arguments = "".join(f", {name} {_written(value)}" for name, value in self.arguments.items())
        return f"{self.name}{arguments}"


def _remade(kind: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    return kind(name, **arguments)


def nearest(name: str, known: Collection[str]) -> str:
    """Return a phrase with the names nearest to a wrong one, or with all if none is near."""
    near = difflib.get_close_matches(name, known, _CLOSE, 0.5)
    return f"the nearest are {', '.join(near)}" if near else f"there are {', '.join(known)}"


def check_argument(what: str, name: str, value: Any, default: Any) -> None:
    """Check the type of an argument by its default value; an argument without one is a number.

    Args:
        what: The owner, for the error.
        name: The name of the argument.
        value: Its value.
        default: The default value; None permits any value.

    Raises:
        TrainError: The value has another type, or is not finite.
    """
    if default is None and value is None:
        return
    if isinstance(default, bool):
        wanted, fits = "true or false", isinstance(value, bool)
    elif isinstance(default, int | float):
        wanted, fits = "a number", _is_number(value)
    elif isinstance(default, str):
        wanted, fits = "a word", isinstance(value, str)
    elif isinstance(default, tuple) and any(isinstance(each, str) for each in cast(Sequence[Any], default)):
        fits = isinstance(value, list | tuple) and all(isinstance(each, str) for each in cast(Sequence[Any], value))
        wanted = "a list of words"
    elif isinstance(default, tuple):
        given = cast(Sequence[Any], value) if isinstance(value, list | tuple) else ()
        fits = bool(given) and all(each is None or _is_number(each) for each in given)
        wanted = "a list of numbers"
    else:
        return
    if not fits:
        raise TrainError(f"{what} has {name} {value!r}; it must be {wanted}.")


def _is_number(value: Any) -> bool:
    # A bool is an int to Python.
    return type(value) in (int, float) and math.isfinite(value)


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
