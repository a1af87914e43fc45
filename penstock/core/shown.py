"""Values of strangers in sentences."""

import reprlib
from typing import Any


def shown(value: Any) -> str:
    """The start of a JSON value of any size and depth, for a sentence."""
    return repr(value[:80]) if isinstance(value, str) else reprlib.repr(value)
