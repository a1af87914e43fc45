"""Ranges of settings, as `penstock sweep --set` takes them: `[a, b, c]`, `range(low, high)` and `log(low, high)`."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

from penstock.core.errors import TrainError
from penstock.train.overrides import checked, parse_value, read_settings, setting_text

FORMS = "write [a, b, c], range(low, high) or log(low, high)"
# A call, as a value that is typed.
_CALL = re.compile(r"([A-Za-z_]\w*)\s*\((.*)\)", re.DOTALL)
_WHOLE = re.compile(r"[+-]?\d+")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """Values of which each trial has one.

    Args:
        values: At least two, all different.
    """

    values: tuple[Any, ...]

    def text(self) -> str:
        """Return the text that is typed for it."""
        return setting_text(list(self.values))

    def ends(self) -> tuple[Any, ...]:
        """Return the values that are checked before the first trial."""
        return self.values


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class NumberRange:
    """Numbers from `low` to `high`, both included; whole numbers if both are.

    Args:
        low: The smallest.
        high: The largest.
        is_log: Orders of magnitude are equally likely, instead of numbers.
    """

    low: float
    high: float
    is_log: bool

    @property
    def is_whole(self) -> bool:
        """True for whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def text(self) -> str:
        """Return the text that is typed for it."""
        return f"{'log' if self.is_log else 'range'}({self.low!r}, {self.high!r})"

    def ends(self) -> tuple[Any, ...]:
        """Return the values that are checked before the first trial."""
        return (self.low, self.high)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """Settings of the trials of a sweep.

    Args:
        fixed: Settings that all trials have.
        varied: Ranges of the others, by name.
    """

    fixed: Mapping[str, Any]
    varied: Mapping[str, Choices | NumberRange]

    def texts(self) -> dict[str, str]:
        """Return the texts that are typed for all settings, by name."""
        return {name: setting_text(value) for name, value in self.fixed.items()} | {
            name: values.text() for name, values in self.varied.items()
        }

    def probes(self) -> Iterator[dict[str, Any]]:
        """Yield settings of trials with the ends of each range, beside each choice of a name such as optimizer.name.

        The settings that exist depend on the names, so that each range must suit all of them.
        """
        first = {name: values.ends()[0] for name, values in self.varied.items()}
        names = [name for name in self.varied if name.endswith(".name")]
        for chosen in itertools.product(*(self.varied[name].ends() for name in names)):
            base = {**self.fixed, **first, **dict(zip(names, chosen, strict=True))}
            yield base
            for name, values in self.varied.items():
                if name not in names:
                    yield from ({**base, name: value} for value in values.ends()[1:])

    def combinations(self, at_most: int) -> list[dict[str, Any]] | None:
        """Return all combinations of the varied settings; None if there are more than `at_most`."""
        sides: list[Sequence[Any]] = []
        count = 1
        for values in self.varied.values():
            if isinstance(values, NumberRange) and not values.is_whole:
                return None
            sides.append(values.values if isinstance(values, Choices) else range(int(values.low), int(values.high) + 1))
            count *= len(sides[-1])
            if count > at_most:
                return None
        return [dict(zip(self.varied, chosen, strict=True)) for chosen in itertools.product(*sides)]


def parse_space(texts: Sequence[str], config: Path | None = None) -> SearchSpace:
    """Parse the settings of a sweep; nothing in them is executed.

    Args:
        texts: `NAME=VALUE`; a value is a range, or one of `penstock train --set`, which stays fixed.
        config: A TOML file of settings; ranges are texts in it. `texts` come before it.

    Raises:
        TrainError: A range is no range, or none is given.
    """
    fixed: dict[str, Any] = {}
    varied: dict[str, Choices | NumberRange] = {}
    found: dict[str, Any] = {}
    for name, value in ({} if config is None else read_settings(config)).items():
        found[name] = _range(name, value) if isinstance(value, str) else _choices(name, value)
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not name or not equals or not value:
            raise TrainError(f"--set has {text!r}; write NAME=VALUE, such as 'optimizer.lr=log(1e-4, 1e-1)'.")
        found[name] = _range(name, value)
    for name, value in found.items():
        if isinstance(value, Choices | NumberRange):
            checked(dict.fromkeys([name], value.ends()[0]))
            varied[name] = value
        else:
            fixed |= checked({name: value})
    if not varied:
        raise TrainError(f"the sweep varies nothing; give a range by --set 'NAME=...': {FORMS}.")
    return SearchSpace(fixed=fixed, varied=varied)


def _range(name: str, text: str) -> Any:
    """Parse a value as it is typed: a range, or a fixed value."""
    if (call := _CALL.fullmatch(text)) is not None:
        return _span(name, text, call[1], call[2])
    if text.startswith("[") and text.endswith("]"):
        value = parse_value(text)
        return _choices(name, _words(name, text) if isinstance(value, str) else value)
    return parse_value(text)


def _span(name: str, text: str, kind: str, arguments: str) -> NumberRange:
    if kind not in ("range", "log"):
        raise TrainError(f"{name} is {text}, but there is no range {kind!r}; {FORMS}.")
    numbers = [_number(part.strip()) for part in arguments.split(",")]
    if len(numbers) != 2 or None in numbers:
        raise TrainError(f"{name} is {text}; a range has two numbers, such as {kind}(0.001, 0.1).")
    low, high = cast(list[float], numbers)
    if not low < high:
        raise TrainError(f"{name} is {text}; the first number of a range must be below the second.")
    if kind == "log" and low <= 0:
        raise TrainError(f"{name} is {text}; a logarithmic range must begin above 0, or write range(...).")
    if isinstance(low, int) != isinstance(high, int):
        low, high = float(low), float(high)
    return NumberRange(low=low, high=high, is_log=kind == "log")


def _number(text: str) -> float | None:
    try:
        value = int(text) if _WHOLE.fullmatch(text) else float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _words(name: str, text: str) -> list[Any]:
    """Split a list that is no TOML because of words without quotes, `[sgd, adamw]`."""
    parts = [part.strip() for part in text[1:-1].split(",")]
    if not all(parts) or any(mark in text[1:-1] for mark in "[]\"'"):
        raise TrainError(f"{name} is {text}, which is no list of values; {FORMS}, with quotes around odd words.")
    return [parse_value(part) for part in parts]


def _choices(name: str, value: Any) -> Any:
    """Return a list as choices; one alone is a fixed value, and so is what is no list."""
    if not isinstance(value, list):
        return value
    values = cast(list[Any], value)
    if not values:
        raise TrainError(f"{name} is [], a list without choices; {FORMS}.")
    for each in values:
        checked({name: each})
        # True and 1 are equal to Python.
        if [setting_text(other) for other in values].count(setting_text(each)) > 1:
            raise TrainError(f"{name} has the choice {setting_text(each)} twice; leave one out.")
    return values[0] if len(values) == 1 else Choices(values=tuple(values))
