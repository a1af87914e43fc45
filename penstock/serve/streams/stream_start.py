"""The start of a live stream, read from its JSON."""

from typing import Any

import orjson

from penstock.core.errors import InvalidInput, TooLarge
from penstock.core.speech.sound import ENCODINGS, MAX_RATE_HZ
from penstock.core.wording.shown import shown

MAX_BUDGET_MS = 600_000
MAX_START_BYTES = 4_096
# Of a text message after the start, whatever binary messages may have.
MAX_TEXT_BYTES = 16_384
_FIELDS = {"type", "rate_hz", "encoding", "events", "latency_ms", "hot_words", "tickets", "ticket"}


def read_json(message: bytes, max_bytes: int = MAX_TEXT_BYTES) -> Any:
    """Read a text message.

    Raises:
        TooLarge: It is longer than is taken.
        InvalidInput: It is no JSON.
    """
    if len(message) > max_bytes:
        raise TooLarge(f"A text message has {len(message):,} bytes; at most {max_bytes:,} are taken.")
    try:
        return orjson.loads(message)
    except orjson.JSONDecodeError:
        raise InvalidInput("A text message is no JSON that can be read.") from None


def read_start(message: bytes, max_bytes: int = MAX_TEXT_BYTES) -> dict[str, Any]:
    """Read and check the fields of a start that are given.

    Raises:
        RequestError: It is no start, or a field is unknown or out of range.
    """
    fields = read_json(message, max_bytes)
    if not isinstance(fields, dict) or fields.get("type") != "start":
        raise InvalidInput('The first message is not a start; send {"type":"start"}.')
    fields = {name: value for name, value in fields.items() if value is not None}
    if unknown := sorted(fields.keys() - _FIELDS):
        # It is the reason of a close, which has few bytes.
        taken = ", ".join(sorted(_FIELDS - {"type"}))
        raise InvalidInput(f"The start has {shown(unknown[0], 24)}; it takes {taken}.")
    for name, largest in (("rate_hz", MAX_RATE_HZ), ("latency_ms", MAX_BUDGET_MS)):
        value = fields.get(name, 1)
        if type(value) not in (int, float) or not 0 < value <= largest:
            raise InvalidInput(f"{name} is {shown(value, 40)}; it must be a number above 0, to {largest:,}.")
    for name, known in (("encoding", ENCODINGS), ("events", ("json", "binary"))):
        value = fields.get(name, known[0])
        if value not in known:
            raise InvalidInput(f"{name} is {shown(value, 40)}; it must be {', '.join(known[:-1])} or {known[-1]}.")
    for name, kind in (("tickets", bool), ("ticket", str)):
        value = fields.get(name, kind())
        if type(value) is not kind:
            wanted = "true or false" if kind is bool else "the text of a ticket"
            raise InvalidInput(f"{name} is {shown(value, 40)}; it must be {wanted}.")
    return fields
