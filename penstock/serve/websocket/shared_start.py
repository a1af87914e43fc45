"""Start of a stream on a shared connection, and what of it may wait there."""

import math

import orjson

from penstock.core.errors import InvalidInput, TooLarge
from penstock.serve.streams.stream_start import MAX_START_BYTES
from penstock.serve.streams.streams import Streams

# Signal of one stream that may wait for room in its slot, in seconds.
MAX_WAITING_S = 2.0


def max_waiting_of(streams: Streams) -> int:
    """Number of chunks of one stream that may wait for room in its slot."""
    chunk_s = streams.live.chunk_s(streams.application.input_tensor)
    return max(streams.application.chunks, math.ceil(MAX_WAITING_S / chunk_s))


def start_of(payload: bytes) -> tuple[str, bytes]:
    """The application that a start names, and the start as on a connection of its own."""
    if len(payload) > MAX_START_BYTES:
        raise TooLarge(f"A start has {len(payload):,} bytes; at most {MAX_START_BYTES:,} are taken.")
    try:
        fields = orjson.loads(payload)
    except orjson.JSONDecodeError:
        raise InvalidInput("A text message is no JSON that can be read.") from None
    if not isinstance(fields, dict) or fields.get("type") != "start":
        raise InvalidInput('The first message of a stream is not a start; send {"type":"start","app":"NAME"}.')
    name = fields.pop("app", None)
    if not isinstance(name, str):
        raise InvalidInput('The start of a stream names no application; send {"type":"start","app":"NAME"}.')
    return name, orjson.dumps(fields)
