"""The short way of many plain streams gives what the complete way gives, whatever comes between."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from penstock.core.streams.stream_entries import BINARY
from penstock.serve.table.slots import CHUNKS, RESULTS, STREAMS_OPEN
from penstock.serve.websocket import plain_streams, shared_connection
from tests.support.shared_streams import SharedCaller, cancel, chunk, end, entry, settle, share, start
from tests.support.streams import FRAMES, World

STREAMS = 24
# What a client does in one message: to which streams it sends whole chunks, and what it does between them.
Step = tuple[Sequence[int], str, int, bool]


@pytest.fixture(params=[8, 1 << 30], ids=["many at a time", "one by one"], autouse=True)
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    set_many(monkeypatch, request.param)
    return request.param


def set_many(monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    monkeypatch.setattr(plain_streams, "MANY", many)
    monkeypatch.setattr(shared_connection, "MANY", many)


def began(world: World, count: int = STREAMS) -> SharedCaller:
    caller = share(world)
    caller.send(*(start(number, events="binary") for number in range(count)))
    return caller


def sums_of(caller: SharedCaller, stream_id: int) -> list[float]:
    messages = [said for said in caller.said[stream_id] if isinstance(said, bytes)]
    assert [int.from_bytes(message[:4], "little") for message in messages] == list(range(len(messages)))
    for message in messages:
        assert 4 * int.from_bytes(message[4:8], "little") == len(message) - 8
    return [value for message in messages for value in np.frombuffer(message, "<f4", -1, 8).tolist()]


def texts_of(caller: SharedCaller, stream_id: int) -> list[dict[str, object]]:
    texts = [said for said in caller.said[stream_id] if isinstance(said, dict)]
    return [{name: value for name, value in text.items() if name != "stream"} for text in texts]


steps = st.lists(
    st.tuples(
        st.one_of(
            st.lists(st.integers(0, STREAMS - 1), min_size=4, max_size=40),
            st.permutations(range(STREAMS)),
        ),
        st.sampled_from(["", "", "", "short", "long", "end", "cancel", "wrong", "nan", "start", "unknown"]),
        st.integers(0, STREAMS - 1),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


def played(steps: Sequence[Step], many: int, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    """What a client of many streams hears, and what was counted."""
    set_many(monkeypatch, many)
    world = World(slots=2 * STREAMS, chunks=2)
    caller = began(world)
    sent = [0] * (2 * STREAMS)
    opened = STREAMS
    for streams, between, which, waits in steps:
        entries: list[bytes] = []
        for place, stream_id in enumerate(streams):
            if place == len(streams) // 2:
                number = sent[which]
                match between:
                    case "short":
                        entries.append(chunk(which, number, 5))
                        sent[which] += 1
                    case "long":
                        entries.append(chunk(which, number, *range(1, 8)))
                        sent[which] += 1
                    case "end":
                        entries.append(end(which))
                    case "cancel":
                        entries.append(cancel(which))
                    case "wrong":
                        entries.append(chunk(which, number + 1, 1, 2, 3, 4))
                    case "nan":
                        entries.append(chunk(which, number, 17, 1, 1, 1))
                        sent[which] += 1
                    case "start":
                        entries.append(start(opened, events="binary"))
                        opened += 1
                    case "unknown":
                        entries.append(entry(which + 1_000_000, BINARY, b""))
                    case _:
                        pass
            entries.append(chunk(stream_id, sent[stream_id], *(stream_id % 7 + 1 for _ in range(FRAMES))))
            sent[stream_id] += 1
        caller.send(*entries)
        if waits:
            settle(world, caller)
    settle(world, caller)
    caller.send(*(end(number) for number in range(opened)))
    settle(world, caller)
    counts = tuple(world.streams.counts[count] for count in (CHUNKS, RESULTS, STREAMS_OPEN))
    said = {
        number: (sums_of(caller, number), [one for one in said if isinstance(one, dict)])
        for number, said in caller.said.items()
    }
    for _, messages in said.values():
        for message in messages:
            message.pop("stream", None)
    caller.socket.connection_lost(None)
    settle(world, caller)
    assert world.frontend.in_use == 0
    assert not world.frontend.groups.in_use
    return said, caller.ends, caller.closed, counts


@pytest.mark.thorough
@given(steps)
@settings(max_examples=60, deadline=None)
def test_both_ways_give_the_same(steps: Sequence[Step]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        assert played(steps, 8, patch) == played(steps, 1 << 30, patch)


def test_whole_chunks_of_many_streams(many: int) -> None:
    world = World(slots=STREAMS)
    caller = began(world)
    for number in range(6):
        caller.send(*(chunk(stream_id, number, *[stream_id % 7] * FRAMES) for stream_id in range(STREAMS)))
        settle(world, caller)
        # The first messages go the complete way.
        assert world.frontend.groups.in_use == (many == 8)
    for stream_id in range(STREAMS):
        assert sums_of(caller, stream_id) == [stream_id % 7 * n for n in range(1, 6 * FRAMES + 1)]
    assert world.streams.counts[CHUNKS] == world.streams.counts[RESULTS] == 6 * STREAMS


def test_streams_come_and_go_and_their_rows_are_used_again(many: int) -> None:
    world = World(slots=12)
    caller = share(world)
    for turn in range(12):
        ids = range(12 * turn, 12 * turn + 12)
        caller.send(*(start(stream_id, events="binary") for stream_id in ids))
        for number in range(3):
            caller.send(*(chunk(stream_id, number, *[1] * FRAMES) for stream_id in ids))
            settle(world, caller)
        assert world.frontend.groups.in_use == (many == 8)
        caller.send(*(end(stream_id) for stream_id in ids[:6]), *(cancel(stream_id) for stream_id in ids[6:]))
        settle(world, caller)
        assert world.frontend.in_use == 0
        for stream_id in ids[:6]:
            assert sums_of(caller, stream_id) == [*range(1, 3 * FRAMES + 1), -1]


def test_a_failing_chunk_and_a_full_slot_leave_the_short_way(many: int) -> None:
    world = World(slots=STREAMS, chunks=2)
    caller = began(world)
    for number in range(2):
        caller.send(*(chunk(stream_id, number, *[1] * FRAMES) for stream_id in range(STREAMS)))
        settle(world, caller)
    # More than the slots have room for, without a batch between; one stream's chunk gives NaN.
    for number in range(2, 7):
        caller.send(
            *(
                chunk(stream_id, number, 17 if (stream_id, number) == (3, 4) else 1, 1, 1, 1)
                for stream_id in range(STREAMS)
            )
        )
    settle(world, caller)
    assert caller.ends == {3: (1011, "The network failed.")}
    for stream_id in range(STREAMS):
        assert sums_of(caller, stream_id) == [*range(1, (4 if stream_id == 3 else 7) * FRAMES + 1)]


def test_messages_of_one_entry_that_are_read_together(many: int) -> None:
    world = World(slots=STREAMS)
    caller = began(world)
    for number in range(4):
        caller.feed(
            b"".join(
                Frame(Opcode.BINARY, chunk(stream_id, number, *[1] * FRAMES)).serialize(mask=True)
                for stream_id in range(STREAMS)
            )
        )
        settle(world, caller)
    for stream_id in range(STREAMS):
        assert sums_of(caller, stream_id) == [*range(1, 4 * FRAMES + 1)]


def test_an_entry_does_not_go_on_in_the_next_message() -> None:
    world = World(slots=STREAMS)
    caller = began(world)
    whole = chunk(0, 0, *[1] * FRAMES)
    longer = entry(0, BINARY, bytes(4 + 4 * FRAMES + len(whole)))[: len(whole)]
    caller.feed(b"".join(Frame(Opcode.BINARY, one).serialize(mask=True) for one in [longer, *[whole] * 20]))
    settle(world, caller)
    assert caller.closed is not None
    assert caller.closed[0] == 1007
