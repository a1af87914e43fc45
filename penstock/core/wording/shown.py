"""Values of strangers in sentences."""

import reprlib
from typing import Any


def shown(value: Any, max_bytes: int = 80) -> str:
    """The start of a JSON value of any size and depth, for a sentence: at most so many bytes of UTF-8."""
    return shortened(repr(value[:max_bytes]) if isinstance(value, str) else reprlib.repr(value), max_bytes)


def shortened(text: str, max_bytes: int) -> str:
    """Cut a text to so many bytes of UTF-8, with an ellipsis where it is cut."""
    raw = text.encode(errors="replace")
    return text if len(raw) <= max_bytes else raw[: max_bytes - 3].decode(errors="ignore") + "…"
