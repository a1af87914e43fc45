"""Write dataclass records as JSON values, and read them by the type hints of their fields."""

import json
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import repeat
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from penstock.core.errors import ApplicationError, BundleCorrupt

R = TypeVar("R")


def read_record(kind: type[R], given: Any) -> R:
    """Make a record of what `JsonRecord.to_json` or `dataclasses.asdict` made of it.

    Raises:
        KeyError, TypeError, ValueError: A field is missing, unknown or of another type.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"{given!r:.80} is no object")
    hints = _hints_of(kind)
    if unknown := [name for name in given if name not in hints]:
        raise TypeError(f"unknown field {unknown[0]!r}")
    return kind(**{name: _value(hints[name], value) for name, value in given.items()})


def compute_hints(kind: type[Any]) -> None:
    """Compute the type hints of a record and of those in its fields, for which its first `read_record` would wait."""
    for hint in _hints_of(kind).values():
        for part in (hint, *get_args(hint)):
            if isinstance(part, type) and is_dataclass(part):
                compute_hints(part)


@cache
def _hints_of(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


class JsonRecord:
    """Base of the dataclasses that a bundle or a pack holds as JSON.

    Attributes:
        unreadable: The sentence for a record that cannot be read, with a place for the reason.
    """

    __slots__ = ()
    unreadable: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        return record_json(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Self:
        """Read what `to_json` wrote.

        Raises:
            BundleCorrupt: A field is missing, unknown or wrong.
        """
        try:
            return read_record(cls, given)
        except (ApplicationError, KeyError, TypeError) as error:
            raise BundleCorrupt(cls.unreadable.format(error)) from None


def json_bytes(given: Mapping[str, Any], *, ascii: bool = True) -> bytes:
    """The bytes of a JSON file with sorted names; the same values give the same bytes."""
    return (json.dumps(given, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=ascii) + "\n").encode()


def record_json(record: Any) -> dict[str, Any]:
    """The fields of a dataclass record as JSON values."""
    return {field.name: _json(getattr(record, field.name)) for field in fields(record) if field.init}


def _json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [*map(_json, value)]
    if isinstance(value, dict):
        return {name: _json(each) for name, each in value.items()}
    if hasattr(value, "to_json"):
        return value.to_json()
    return record_json(value) if is_dataclass(value) else value


def _value(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None and NoneType in arguments else _first_fit(arguments, value)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = repeat(arguments[0], len(value)) if arguments[-1] is ... else arguments
        return tuple(map(_value, kinds, value))
    if origin is dict and isinstance(value, dict):
        return {key: _value(arguments[1], each) for key, each in value.items()}
    if hasattr(kind, "from_json"):
        return kind.from_json(value)
    if is_dataclass(kind):
        return read_record(kind, value)  # pyright: ignore[reportArgumentType]
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if origin is Literal:
        fits = value in arguments
    elif kind is float and type(value) is int:
        # JSON has whole numbers that no float can be.
        fits = abs(value) <= sys.float_info.max
    else:
        fits = type(value) is kind
    if not fits:
        raise TypeError(f"a field is of another type: {value!r:.80}")
    return value


def _first_fit(kinds: tuple[Any, ...], value: Any) -> Any:
    errors: list[TypeError] = []
    for kind in kinds:
        try:
            return _value(kind, value)
        except TypeError as error:
            errors.append(error)
    raise errors[0]
