"""Parsing of live streams: bytes to messages, and messages to chunks."""

from itertools import pairwise

import orjson

from penstock.core.errors import RequestError
from penstock.serve.websocket.frames import CLOSE, FRAGMENT, FrameReader, Message, close_code, close_frame
from tests.support.session import CHUNK, talk

MOST_MESSAGE = 1_000
CUTS = 8
# A refusal is the reason of a close.
MOST_SENTENCE = 123


def frames(data: bytes) -> None:
    """`FrameReader`. The first 16 bytes say where the rest is cut; however it is, the same comes out."""
    places, stream = data[: 2 * CUTS], data[2 * CUTS :]
    chosen = [int.from_bytes(places[at : at + 2]) for at in range(0, len(places), 2)]
    whole = _read(stream, [])
    assert whole == _read(stream, chosen)
    assert whole == _read(stream, list(range(len(stream))))


def _read(stream: bytes, places: list[int]) -> tuple[list[Message], str]:
    reader = FrameReader(MOST_MESSAGE)
    found: list[Message] = []
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    try:
        for begin, end in pairwise(edges):
            reader.feed(stream[begin:end])
            while (message := reader.next()) is not None:
                if message is FRAGMENT:
                    continue
                assert len(message[1]) <= MOST_MESSAGE
                found.append(message)
                if message[0] == CLOSE:
                    _closes(message[1])
    except RequestError as error:
        _is_a_reason(error)
        return found, str(error)
    return found, ""


def _closes(payload: bytes) -> None:
    try:
        code = close_code(payload)
    except RequestError as error:
        _is_a_reason(error)
    else:
        assert 1000 <= code < 5000
        assert len(close_frame(code, payload[2:].decode())) <= 127


def _is_a_reason(error: RequestError) -> None:
    assert 400 <= error.status < 500, error
    assert 0 < len(str(error).encode()) <= MOST_SENTENCE, error


def live(data: bytes) -> None:
    """`Session`. The first line is the start; before each message behind it is its length, 0 for the end, 255 for text.

    A message is numbered as it should be, unless its first byte is above 240.
    """
    start, _, rest = data.partition(b"\n")
    stream = talk()
    number = 0
    try:
        stream.text(start)
        at = 0
        while at < len(rest):
            size, at = rest[at], at + 1
            payload, at = rest[at : at + size], at + size
            if size in (0, 255):
                stream.text(payload if size else b'{"type":"end"}')
            else:
                stream.binary((number + (payload[:1] > b"\xf0")).to_bytes(4, "little") + payload)
                number += 1
            if size & 1:
                stream.answer_all()
        stream.answer_all()
    except RequestError as error:
        _is_a_reason(error)
    for index, (chunk, frames, last) in enumerate(stream.chunks):
        assert len(chunk) == 2 * frames
        assert frames <= CHUNK
        assert frames or last
        assert not last or index == len(stream.chunks) - 1
    results = [said for said in stream.sent if isinstance(said, bytes) or said["type"] == "result"]
    numbers = [int.from_bytes(said[:4], "little") if isinstance(said, bytes) else said["seq"] for said in results]
    assert numbers == list(range(len(numbers)))
    assert len(stream.closed) <= 1
    orjson.dumps([said for said in stream.sent if not isinstance(said, bytes)])
