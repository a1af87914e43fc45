"""Parsing of live streams: bytes to messages, and messages to chunks."""

from itertools import pairwise

import orjson
from websockets.frames import Frame, Opcode

from penstock.core.errors import RequestError
from penstock.core.streams.stream_entries import HEAD
from penstock.serve.table.slots import STREAMS_OPEN
from penstock.serve.websocket.frames import CLOSE, FRAGMENT, FrameReader, Message, close_code, close_frame
from tests.support.session import CHUNK, talk
from tests.support.shared_streams import chunk as chunk_entry
from tests.support.shared_streams import share, start
from tests.support.streams import World
from tests.support.tickets import tickets_each

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
    stream = talk(tickets=tickets_each(0.01).of_stream("me"))
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


def shared(data: bytes) -> None:
    """`SharedConnection`, and an engine. Before each message are its length, two bytes, and what it is: an opcode.

    The entries of a message of opcode 2 are as they come; of another one below 16, with heads that are right: the byte
    before each payload is its length, that before it the stream and the kind.
    """
    world = World(slots=4)
    caller = share(world)
    caller.send(start(0), start(1), chunk_entry(0, 0, 1))
    at = 0
    while at + 3 <= len(data):
        size, opcode, at = int.from_bytes(data[at : at + 2], "big"), data[at + 2] & 15, at + 3
        payload, at = data[at : at + size], at + size
        if opcode in (1, 8, 9, 10):
            caller.feed(Frame(Opcode(opcode), payload[:125]).serialize(mask=True))
        elif opcode == 2:
            caller.send(payload)
        else:
            caller.send(_with_heads(payload))
        if size & 1:
            world.tick()
        caller.flow()
        caller.read()
    for _ in range(100):
        world.tick()
        caller.flow()
        caller.read()
    for stream_id, (code, reason) in caller.ends.items():
        assert stream_id < 1 << 32
        assert 1000 <= code < 5000
        assert len(reason.encode()) <= MOST_SENTENCE
    for said in caller.said.values():
        numbers = [
            int.from_bytes(one[:4], "little") if isinstance(one, bytes) else one["seq"]
            for one in said
            if isinstance(one, bytes) or one["type"] == "result"
        ]
        assert numbers == list(range(len(numbers)))
    if caller.closed is None:
        assert world.streams.counts[STREAMS_OPEN] == world.frontend.in_use
    caller.socket.connection_lost(None)
    world.settle()
    assert world.frontend.in_use == 0
    assert world.streams.counts[STREAMS_OPEN] == 0


def _with_heads(payload: bytes) -> bytes:
    entries: list[bytes] = []
    at = 0
    while at + 2 <= len(payload):
        place, size = payload[at], payload[at + 1]
        content, at = payload[at + 2 : at + 2 + size], at + 2 + size
        entries.append(HEAD.pack(place >> 3, (1, 2, 8, 2)[place & 3], len(content)) + content)
    return b"".join(entries)
