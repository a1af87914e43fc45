"""Faults of JSON in its own words, for those who sent it."""

import json
from math import inf, isfinite
from typing import Any

from penstock.core.errors import one_line

_KINDS = {
    "NoneType": "null",
    "str": "a string",
    "dict": "an object",
    "int": "an integer",
    "bytes": "bytes",
    "bytearray": "bytes",
    "ndarray": "an array",
}
# What programs write for numbers that JSON does not have; Python's json module does.
_NOT_NUMBERS = ("NaN", "nan", "Infinity", "inf")


def json_fault(error: json.JSONDecodeError) -> str:
    """Describe why a text is not JSON.

    Args:
        error: The error of `json` or orjson.
    """
    if str(error).startswith("Input is a zero-length"):
        return "it is empty"
    if error.doc.startswith(_NOT_NUMBERS, error.pos):
        return f"it has NaN or infinity at character {error.pos + 1:,}, and JSON has finite numbers alone"
    return one_line(error)


def json_kind(kind: type) -> str:
    """Name the type of a value that came from JSON, or from a caller in Python.

    Args:
        kind: The type.
    """
    name = kind.__name__
    return _KINDS.get(name, f"{'an' if name.startswith(('a', 'e', 'i', 'o')) else 'a'} {name}")


def shown_number(number: Any) -> str:
    """Write a number for a sentence: in full, or with four digits where it is very large or very small.

    Args:
        number: A number of Python or NumPy.
    """
    try:
        value = float(number)
    except OverflowError:
        value = inf if number > 0 else -inf
    if not isfinite(value) or value == 0 or 1e-4 <= abs(value) < 1e15:
        return f"{value!r}".removesuffix(".0")
    return f"{value:.3e}"
