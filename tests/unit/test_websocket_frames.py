"""WebSocket frames, fed as clients may and as they may not."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Close, Frame, Opcode

from penstock.core.errors import InvalidInput, RequestError, TooLarge
from penstock.serve.websocket.frames import (
    BINARY,
    CLOSE,
    FRAGMENT,
    MAX_REASON_BYTES,
    PING,
    TEXT,
    FrameReader,
    Message,
    close_code,
    close_frame,
    frame,
)


def sent(opcode: int, payload: bytes, *, fin: bool = True) -> bytes:
    """As a client sends it, by a library."""
    return Frame(Opcode(opcode), payload, fin).serialize(mask=True)


def read(data: bytes, cuts: tuple[int, ...] = (), most: int = 1 << 20, *, hasty: bool = False) -> list[Message]:
    reader = FrameReader(most)
    found: list[Message] = []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in pairwise(edges):
        if hasty and (payload := reader.next_alone(data[begin:end])) is not None:
            found.append((BINARY, payload))
            continue
        reader.feed(data[begin:end])
        while (message := reader.next()) is not None:
            if message is not FRAGMENT:
                found.append(message)
    return found


MESSAGES = st.lists(
    st.tuples(st.sampled_from([TEXT, BINARY]), st.one_of(st.binary(max_size=200), st.just(b"x" * 70_000))), max_size=5
)


@given(MESSAGES, st.lists(st.integers(0, 200_000), max_size=8), st.data())
def test_messages_come_out_as_they_went_in_however_they_are_cut(
    messages: list[Message], cuts: list[int], data: st.DataObject
) -> None:
    stream = b""
    expected: list[Message] = []
    for opcode, payload in messages:
        edges = sorted(data.draw(st.lists(st.integers(0, len(payload)), max_size=3)))
        parts = [payload[a:b] for a, b in zip([0, *edges], [*edges, len(payload)], strict=True)]
        for index, part in enumerate(parts):
            stream += sent(opcode if index == 0 else 0, part, fin=index == len(parts) - 1)
            if data.draw(st.booleans()):
                stream += sent(PING, b"p")
                expected.append((PING, b"p"))
        expected.append((opcode, payload))
    found = read(stream, tuple(cuts))
    assert read(stream, tuple(cuts), hasty=True) == found
    assert [message for message in found if message[0] != PING] == messages
    assert sum(opcode == PING for opcode, _ in found) == sum(opcode == PING for opcode, _ in expected)


@pytest.mark.parametrize("size", [0, 1, 125, 126, 1000, 65_535])
def test_a_frame_that_comes_alone_is_known_at_once(size: int) -> None:
    payload = bytes(range(256)) * 256
    whole = sent(BINARY, payload[:size])
    # A message may be shorter than the shortest frame that is looked at.
    assert FrameReader(65_535).next_alone(whole) == (payload[:size] if len(whole) >= 8 else None)
    assert FrameReader(size - 1).next_alone(whole) is None
    for other in (whole + b"x", frame(BINARY, payload[:size]), sent(TEXT, payload[:size])):
        assert FrameReader(65_535).next_alone(other) is None
    begun = FrameReader(65_535)
    begun.feed(sent(BINARY, b"a", fin=False))
    assert begun.next() is FRAGMENT
    assert begun.next() is None
    assert begun.next_alone(whole) is None


@pytest.mark.parametrize("length_bytes", [0, 2, 8])
def test_the_begin_of_a_frame_is_not_taken_for_one(length_bytes: int) -> None:
    # Whatever form its length has, also one that is wider than it need be.
    code = {0: 100, 2: 126, 8: 127}[length_bytes]
    body = bytes(range(200 if length_bytes else 100))
    for first in (0x82, 0x02, 0x81, 0xC2):
        width = len(body).to_bytes(8, "big")[8 - length_bytes :]
        whole = bytes((first, 0x80 | code)) + width + bytes(4) + body
        for end in range(len(whole)):
            assert FrameReader(1 << 20).next_alone(whole[:end]) is None
        expected = body if first == 0x82 and length_bytes < 8 else None
        assert FrameReader(1 << 20).next_alone(whole) == expected


def test_a_message_that_is_not_taken_waits() -> None:
    reader = FrameReader(100)
    reader.feed(sent(TEXT, b"a") + sent(TEXT, b"b"))
    assert reader.next() == (TEXT, b"a")
    reader.feed(sent(BINARY, b"c")[:3])
    reader.feed(sent(BINARY, b"")[:0])
    assert reader.next() == (TEXT, b"b")
    assert reader.next() is None


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x82\x01a", "not masked"),
        (b"\xc2\x81abcde", "0xc2"),
        (b"\x83\x81abcde", "0x83"),
        (b"\x09\x80abcd", "control frame"),
        (b"\x89\xfe\x00\x80", "control frame"),
        (b"\x80\x80abcd", "continues no message"),
        (b"\x01\x81abcde" + b"\x81\x81abcde", "within another"),
        # RFC 6455, section 5.2: the minimal number of bytes encodes the length.
        (b"\x82\xfe\x00\x05abcd" + bytes(5), "fewest bytes"),
        (b"\x82\xff" + (126).to_bytes(8, "big") + b"abcd" + bytes(126), "fewest bytes"),
        (b"\x82\xff" + (65_535).to_bytes(8, "big") + b"abcd", "fewest bytes"),
        (b"\x01\x81abcde" + b"\x82\x81abcde", "within another"),
    ],
)
def test_what_is_no_frame_of_a_client_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(InvalidInput, match=said) as caught:
        read(data)
    assert len(str(caught.value).encode()) <= MAX_REASON_BYTES
    # However it is cut, it is found before anything behind it is taken.
    with pytest.raises(InvalidInput, match=said):
        read(data, tuple(range(len(data))))


def test_giant_messages_are_refused_by_their_heads_alone() -> None:
    with pytest.raises(TooLarge, match="1,099,511,627,776 bytes; at most 1,000"):
        read(b"\x82\xff" + (1 << 40).to_bytes(8, "big") + b"mask", most=1000)
    with pytest.raises(TooLarge):
        read(b"\x82\xff" + b"\xff" * 8 + b"mask", most=1000)
    part = sent(BINARY, b"a" * 600, fin=False)
    with pytest.raises(TooLarge, match="1,200"):
        read(part + sent(0, b"a" * 600), most=1000)
    assert read(sent(BINARY, b"a" * 1000), most=1000) == [(BINARY, b"a" * 1000)]


def test_a_dribbled_frame_is_not_copied_for_each_byte() -> None:
    reader = FrameReader(1 << 20)
    data = sent(BINARY, bytes(1 << 19))
    for at in range(0, len(data), 64):
        reader.feed(data[at : at + 64])
        if at + 64 < len(data):
            assert reader.next() is None
    assert reader.next() == (BINARY, bytes(1 << 19))


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536])
def test_what_the_server_sends_is_what_a_library_would(size: int) -> None:
    payload = bytes(size)
    assert frame(BINARY, payload) == Frame(Opcode.BINARY, payload).serialize(mask=False)


def test_closes() -> None:
    assert close_frame(1000, "") == Frame(Opcode.CLOSE, Close(1000, "").serialize()).serialize(mask=False)
    cut = close_frame(1007, "ä" * 100)
    assert len(cut) <= 127
    cut[4:].decode()
    assert close_code(b"") == 1005
    assert close_code(b"\x03\xe8bye") == 1000
    assert close_code(b"\x11\x38") == 4408
    for wrong in (b"\x03", b"\x03\xee", b"\x00\x01", b"\x03\xe8\xff", b"\xff\xff"):
        with pytest.raises(InvalidInput):
            close_code(wrong)
    assert read(sent(CLOSE, b"")) == [(CLOSE, b"")]


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=4))
def test_any_bytes_give_messages_or_one_refusal_the_same_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    def outcome(cuts: tuple[int, ...]) -> object:
        try:
            return read(data, cuts, 1000)
        except RequestError as error:
            return type(error)

    assert outcome(()) == outcome(tuple(cuts))
