"""Entries of a connection that many streams share: they come back as they were put, and nothing reaches over an end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from penstock.core.errors import InvalidInput
from penstock.core.streams.stream_entries import (
    BINARY,
    CLOSE,
    MAX_FIRST_BYTES,
    TEXT,
    Entry,
    EntryReader,
    entry_of,
    messages_of,
)
from penstock.serve.websocket.frames import FrameReader


def read(reader: EntryReader) -> list[Entry]:
    found: list[Entry] = []
    while (entry := reader.next()) is not None:
        found.append(entry)
    return found


entries = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.sampled_from([TEXT, BINARY, CLOSE]), st.binary(max_size=60)), max_size=20
)


@given(entries)
def test_what_is_put_comes_back(entries: list[Entry]) -> None:
    reader = EntryReader()
    reader.feed(b"".join(entry_of(*entry) for entry in entries))
    assert reader.next_id == (entries[0][0] if entries else -1)
    assert read(reader) == entries
    assert reader.left == 0
    assert reader.next() is None


@given(entries, st.integers(1, 3))
def test_messages_hold_all_and_no_more_than_a_server_takes(entries: list[Entry], factor: int) -> None:
    raw = [entry_of(stream, kind, payload * 400 * factor) for stream, kind, payload in entries]
    messages = list(messages_of(raw))
    assert b"".join(messages) == b"".join(raw)
    for message in messages:
        assert len(message) <= MAX_FIRST_BYTES or message in raw


def test_joined_messages_keep_their_ends() -> None:
    one, reader = entry_of(1, BINARY, b"abcd"), EntryReader()
    reader.feed(one * 3, len(one))
    assert len(read(reader)) == 3
    longer = entry_of(1, BINARY, b"abcd" + bytes(len(one)))[: len(one)]
    reader.feed(longer + one, len(one))
    with pytest.raises(InvalidInput, match="An entry of 20 bytes has 4 in its message"):
        reader.next()
    reader.drop()
    assert (reader.left, reader.next_id) == (0, -1)


@given(st.lists(st.sampled_from([b"", b"abcd", b"abc", b"efgh", bytes(200), bytes(70_000)]), max_size=40), st.data())
def test_joined_messages_are_those_that_come_one_by_one(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(Frame(Opcode.BINARY, payload).serialize(mask=True) for payload in payloads)
    cut = data.draw(st.integers(0, len(stream)))
    reader, whole = FrameReader(1 << 20), b""
    for piece in (stream[:cut], stream[cut:]):
        reader.feed(piece)
        while True:
            if (joined := reader.next_joined(3)) is not None:
                assert len(joined[0]) >= 3 * joined[1] > 0
                whole += joined[0]
            elif (message := reader.next()) is not None:
                whole += message[1]
            else:
                break
    assert whole == b"".join(payloads)
    assert reader.held_bytes == 0
