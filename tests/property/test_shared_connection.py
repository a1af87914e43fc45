"""Many live streams on one connection: the same answers as on connections of their own, whatever the others do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from penstock.core.streams.stream_entries import BINARY, CLOSE, MAX_FIRST_BYTES, TEXT
from penstock.serve.exchange.peer import UNREAD_BYTES
from penstock.serve.exchange.request_bounds import CONNECTION_BYTES, RequestBounds
from penstock.serve.streams.quotas import StreamQuotas
from penstock.serve.table.client_counts import ClientCounts
from penstock.serve.table.slots import ENGINE_LOST, STREAMS_ABORTED, STREAMS_OPEN
from penstock.serve.websocket.shared_connection import ENTRIES
from penstock.serve.websocket.shared_start import max_waiting_of
from tests.support.shared_streams import cancel, chunk, end, entry, settle, share, start
from tests.support.streams import MS, World

CLOSE_SAYS = "A close says b'\\x00\\x01'; it takes a code of RFC 6455, section 7.4, and UTF-8."
CLOSED = Frame(Opcode.CLOSE, b"\x03\xe8").serialize(mask=True)


@pytest.mark.thorough
@given(st.integers(0, 2**31), st.integers(2, 4), st.sampled_from(["json", "binary"]))
@settings(max_examples=60, deadline=None)
def test_each_stream_hears_the_sums_of_its_own_signal(seed: int, chunks: int, events: str) -> None:
    """Streams of several connections begin, send in any company, end, are cancelled, or lose their connection."""
    rng = np.random.default_rng(seed)
    slots = 12
    world = World(slots, chunks)
    callers = [share(world) for _ in range(3)]
    sent: dict[tuple[int, int], list[list[int]]] = {}
    open_ones: set[tuple[int, int]] = set()
    ended: set[tuple[int, int]] = set()
    next_id = [0, 0, 0]
    lost: set[int] = set()
    for _ in range(60):
        which = int(rng.integers(len(callers)))
        if which in lost:
            continue
        entries: list[bytes] = []
        for _ in range(int(rng.integers(1, 20))):
            mine = [key for key in open_ones if key[0] == which]
            action = rng.random()
            if action < 0.15 and len(open_ones) + len(ended) < slots // 2:
                key = which, next_id[which]
                next_id[which] += int(rng.integers(1, 4))
                entries.append(start(key[1], events=events))
                open_ones.add(key)
                sent[key] = []
            elif action < 0.85 and mine:
                key = mine[int(rng.integers(len(mine)))]
                samples = rng.integers(1, 12, rng.integers(1, 9)).tolist()
                entries.append(chunk(key[1], len(sent[key]), *samples))
                sent[key].append(samples)
            elif action < 0.9 and mine:
                key = mine[int(rng.integers(len(mine)))]
                entries.append(end(key[1]))
                open_ones.discard(key)
                ended.add(key)
            elif action < 0.93 and mine:
                key = mine[int(rng.integers(len(mine)))]
                entries.append(cancel(key[1]))
                open_ones.discard(key)
        data = Frame(Opcode.BINARY, b"".join(entries)).serialize(mask=True)
        cut = int(rng.integers(0, len(data)))
        callers[which].feed(data[:cut])
        if rng.random() < 0.3:
            world.tick()
        callers[which].feed(data[cut:])
        if rng.random() < 0.02:
            callers[which].socket.connection_lost(None)
            lost.add(which)
            open_ones = {key for key in open_ones if key[0] != which}
            ended = {key for key in ended if key[0] != which}
        if rng.random() < 0.5:
            settle(world, *(caller for index, caller in enumerate(callers) if index not in lost))
    for index, caller in enumerate(callers):
        if index not in lost:
            caller.send(*(end(stream_id) for which, stream_id in sorted(open_ones) if which == index))
    ended |= open_ones
    settle(world, *(caller for index, caller in enumerate(callers) if index not in lost))
    for which, stream_id in sent:
        caller = callers[which]
        caller.read()
        sums = np.cumsum([sample for samples in sent[which, stream_id] for sample in samples]).tolist()
        if events == "json":
            heard = caller.events(stream_id)
        else:
            messages = [said for said in caller.said[stream_id] if isinstance(said, bytes)]
            assert [int.from_bytes(message[:4], "little") for message in messages] == list(range(len(messages)))
            heard = [value for message in messages for value in np.frombuffer(message, "<f4", -1, 8).tolist()]
        if (which, stream_id) in ended:
            assert heard == [*sums, -1]
            assert caller.said[stream_id][-1] == {"type": "end", "chunks": len(sent[which, stream_id])}
            assert caller.ends[stream_id] == (1000, "")
        else:
            assert heard == [*sums, -1][: len(heard)]
    for index, caller in enumerate(callers):
        if index not in lost:
            assert caller.closed is None
            caller.socket.connection_lost(None)
    settle(world)
    assert world.frontend.in_use == 0
    assert world.streams.counts[STREAMS_OPEN] == 0
    assert world.peers == set()


def test_results_of_a_batch_are_one_message() -> None:
    world = World(slots=8)
    caller = share(world)
    caller.send(*(start(stream_id) for stream_id in range(6)))
    caller.read()
    assert (caller.messages, [caller.said[stream_id][0]["type"] for stream_id in range(6)]) == (1, ["ready"] * 6)
    caller.send(*(chunk(stream_id, 0, stream_id) for stream_id in range(6)))
    world.tick()
    caller.read()
    assert caller.messages == 2
    assert [caller.events(stream_id) for stream_id in range(6)] == [[stream_id] for stream_id in range(6)]


@pytest.mark.parametrize("sample", [13, 17])
def test_a_network_that_fails_on_one_stream_ends_that_one(sample: int) -> None:
    world = World()
    caller = share(world)
    caller.send(start(0), start(1), chunk(0, 0, 1), chunk(1, 0, 1))
    caller.send(chunk(0, 1, sample), chunk(1, 1, 3))
    settle(world, caller)
    assert caller.events(0) == [1]
    assert caller.ends == {0: (1011, "The network failed.")}
    assert caller.events(1) == [1, 4]
    # What was on its way to the one that has ended is dropped.
    caller.send(chunk(0, 2, 1), end(0), cancel(0), chunk(1, 2, 1))
    settle(world, caller)
    assert caller.events(1) == [1, 4, 5]
    assert world.frontend.in_use == 1
    assert caller.closed is None


@pytest.mark.parametrize(
    ("bad", "code", "said"),
    [
        (chunk(0, 5, 1), 1007, "Message 5 came where 1 belongs; count from 0 without gaps or repeats."),
        (entry(0, BINARY, b"\1\0\0\0\1"), 1007, "Message 1 has 1 bytes of samples; send whole frames of 2."),
        (entry(0, BINARY, bytes(3_000)), 1009, "A message has 3,000 bytes; at most 2,004 are taken."),
        (entry(0, TEXT, b"hello"), 1007, "A text message is no JSON that can be read."),
        (
            start(0),
            1003,
            'Text came where samples belong, which are binary; other texts are {"type":"flush"} and {"type":"end"}.',
        ),
        (
            entry(0, CLOSE, b"\0\1"),
            1002,
            "A close says b'\\x00\\x01'; it takes a code of RFC 6455, section 7.4, and UTF-8.",
        ),
        (entry(0, CLOSE, b"\x0f\xa1bye"), 4001, ""),
        (entry(0, CLOSE, b""), 1005, ""),
        (end(0) + end(0), 1007, "A message came after the end; open another stream for more."),
    ],
)
def test_bad_messages_end_their_stream_alone(bad: bytes, code: int, said: str) -> None:
    world = World()
    caller = share(world)
    caller.send(start(0), start(7), chunk(0, 0, 1), bad, chunk(7, 0, 2))
    settle(world, caller)
    assert caller.ends == {0: (code, said)}
    assert caller.events(7) == [2]
    assert caller.closed is None
    assert world.streams.counts[STREAMS_OPEN] == 1


@pytest.mark.parametrize(
    ("first", "code", "said"),
    [
        (chunk(3, 0, 1), 1003, 'Stream 3 has no start; it begins with text, {"type":"start"}.'),
        (start(3, app="nobody"), 4404, "There is no model 'nobody' here."),
        (entry(3, TEXT, b"{}"), 1007, "The first message of a stream is not a start; send"),
        (entry(3, TEXT, b'{"type":"start"}'), 1007, 'The start of a stream names no application; send'),
        (entry(3, TEXT, b"["), 1007, "A text message is no JSON that can be read."),
        (entry(3, TEXT, b" " * 5_000), 1009, "A start has 5,000 bytes; at most 4,096 are taken."),
        (start(3, encoding="opus"), 1007, "encoding is 'opus'; it must be"),
        (start(3, latency_ms=0.0001), 1008, "shorter than the network's own time"),
    ],
)  # fmt: skip
def test_a_stream_that_cannot_begin_is_alone(first: bytes, code: int, said: str) -> None:
    world = World()
    caller = share(world)
    caller.send(first, start(4), chunk(4, 0, 2))
    settle(world, caller)
    assert (caller.ends[3][0], said in caller.ends[3][1]) == (code, True), caller.ends
    assert caller.events(4) == [2]
    assert world.streams.counts[STREAMS_OPEN] == 1


def test_slots_and_quotas_are_of_streams() -> None:
    world = World(slots=3)
    world.streams.quotas = StreamQuotas(per_key=2, counts=ClientCounts.private())
    first, second = share(world), share(world)
    first.send(start(0), start(1), start(2))
    second.send(start(0))
    first.read()
    second.read()
    limit = "has 2 live streams open, and --max-streams-per-key allows 2; end one of them first."
    assert first.ends == {2: (4429, f"The key of 'me' {limit}")}
    assert second.ends == {0: (4429, f"The key of 'me' {limit}")}
    first.send(cancel(0))
    second.send(start(1))
    settle(world, first, second)
    assert second.ends.keys() == {0}
    first.socket.connection_lost(None)
    second.send(start(2))
    settle(world, second)
    assert second.ends.keys() == {0}


def test_a_flood_ends_its_stream_and_holds_up_no_other() -> None:
    world = World(chunks=2)
    caller = share(world)
    caller.send(start(0), start(1), start(2))
    room = 2 + max_waiting_of(world.streams)
    # As much as there is room for waits, and the others are answered.
    caller.send(*(chunk(0, number, 1) for number in range(room)), *(chunk(1, number, 1) for number in range(room + 1)))
    for _ in range(room // ENTRIES * 3):
        world.tick()
        caller.flow()
    caller.send(chunk(2, 0, 5))
    settle(world, caller)
    assert caller.events(2) == [5]
    assert caller.events(0) == [*range(1, room + 1)]
    assert caller.ends.keys() <= {1}


def test_a_stalled_engine_bounds_what_a_stream_may_hold() -> None:
    world = World(chunks=2)
    caller = share(world)
    caller.send(start(0), start(1))
    room = 2 + max_waiting_of(world.streams)
    for number in range(room + 1):
        assert not caller.ends
        caller.send(chunk(0, number, 1))
        for _ in range(len(world.soon)):
            world.soon.pop(0)()
        caller.flow()
        caller.read()
    assert caller.ends == {0: (1008, f"{room - 2:,} chunks wait for the network; wait for results before more.")}
    caller.send(chunk(1, 0, 4))
    settle(world, caller)
    assert caller.events(1) == [4]


def test_a_lost_engine_ends_every_stream_and_not_the_connection() -> None:
    world = World()
    caller = share(world)
    caller.send(*(start(stream_id) for stream_id in range(3)), *(chunk(stream_id, 0, 1) for stream_id in range(3)))
    world.frontend.fail(ENGINE_LOST)
    caller.read()
    assert caller.ends == dict.fromkeys(range(3), (1013, "The engine stopped. Retry after 3 s."))
    assert caller.closed is None
    assert world.streams.counts[STREAMS_OPEN] == 0


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        (b"\1\2\3", 1007, "An entry has 3 bytes; its head alone has 12."),
        (entry(1, BINARY, b"abcd")[:-1], 1007, "An entry of 4 bytes has 3 in its message."),
        (entry(1, 3, b""), 1007, "An entry is of kind 3; it must be 1 (text), 2 (binary) or 8 (close)."),
        (bytes(MAX_FIRST_BYTES + 1), 1009, "A message has 65,537 bytes; at most 65,536 are taken."),
    ],
)
def test_what_is_no_entry_ends_the_connection(data: bytes, code: int, said: str) -> None:
    world = World()
    caller, other = share(world), share(world)
    other.send(start(0), chunk(0, 0, 1))
    caller.send(data)
    caller.read()
    assert caller.closed == (code, said)
    caller.feed(CLOSED)
    settle(world, caller, other)
    # After a message that is too long, where the next one begins is not known.
    assert caller.wire.ended == ("" if code == 1009 else "close")
    if code == 1009:
        caller.socket.sweep(4, idle_timeout_s=8, request_timeout_s=4)
        assert caller.wire.ended == "abort"
    with_streams = share(world)
    with_streams.send(start(0), start(1))
    with_streams.send(start(2), b"\1\2\3")
    with_streams.read()
    assert with_streams.closed == (1007, "An entry has 3 bytes; its head alone has 12.")
    settle(world, other)
    assert world.frontend.in_use == 1
    assert world.streams.counts[STREAMS_ABORTED] == 3
    assert other.events(0) == [1]


def test_text_pings_and_closes_of_the_connection() -> None:
    world = World()
    caller = share(world)
    caller.send(start(0))
    caller.read()
    caller.feed(Frame(Opcode.PING, b"there?").serialize(mask=True))
    assert caller.wire.unread == b"\x8a\x06there?"
    caller.wire.unread = b""
    caller.feed(CLOSED + b"and what follows is dropped")
    caller.read()
    assert (caller.closed, caller.wire.ended) == ((1000, ""), "close")
    settle(world)
    assert world.frontend.in_use == 0
    texting = share(world)
    texting.feed(Frame(Opcode.TEXT, b"{}").serialize(mask=True))
    texting.read()
    assert texting.closed == (1003, "Text came where entries belong, which are binary.")


def test_what_follows_the_close_is_dropped_until_the_client_closes() -> None:
    world = World()
    caller = share(world)
    caller.feed(Frame(Opcode.TEXT, b"{}").serialize(mask=True))
    for number in range(5 * ENTRIES):
        caller.send(chunk(0, number, 1))
    caller.feed(CLOSED)
    settle(world, caller)
    assert caller.wire.ended == "close"
    assert world.streams.counts[STREAMS_OPEN] == 0


def test_a_stream_that_ends_with_the_first_of_its_entries_takes_no_other_along() -> None:
    world = World(slots=4, chunks=4)
    caller = share(world)
    caller.send(start(0))
    caller.send(*(chunk(0, number, 1) for number in range(7, 60)))
    settle(world, caller)
    caller.read()
    assert list(caller.ends) == [0]
    caller.send(start(1))
    settle(world, caller)
    caller.read()
    assert list(caller.ends) == [0]


def test_many_entries_of_one_message_leave_the_others_their_turn() -> None:
    world = World(slots=4, chunks=4)
    caller = share(world)
    caller.send(start(0))
    ids = range(1, 3 * ENTRIES)
    caller.send(*(chunk(stream_id, 0, 1) for stream_id in ids))
    caller.read()
    assert ENTRIES - 1 <= len(caller.ends) <= ENTRIES
    assert caller.wire.paused
    settle(world, caller)
    caller.read()
    assert len(caller.ends) == len(ids)
    assert not caller.wire.paused


@pytest.mark.thorough
def test_results_that_nobody_reads_end_the_connection() -> None:
    world = World()
    deaf, other = share(world), share(world)
    deaf.send(start(0), start(1))
    other.send(start(0))
    deaf.socket.pause_writing()
    number = 0
    while not deaf.wire.ended:
        assert len(deaf.wire.unread) <= UNREAD_BYTES + 3 * (1 << 16)
        deaf.send(*(chunk(stream_id, number, 1, 2, 3, 4) for stream_id in (0, 1)))
        number += 1
        settle(world)
    assert deaf.wire.ended == "abort"
    assert world.frontend.in_use == 1
    other.send(chunk(0, 0, 3))
    settle(world, other)
    assert other.events(0) == [3]


def test_silence_of_a_stream_and_of_the_connection() -> None:
    world = World()
    never, caller = share(world), share(world)
    caller.send(start(0), start(1))
    for second in range(1, 24):
        caller.now_s[0] = never.now_s[0] = second
        if second < 12:
            caller.send(chunk(1, second - 1, 1))
        for each in (never, caller):
            if not each.wire.ended:
                each.socket.sweep(second, idle_timeout_s=8, request_timeout_s=4)
        settle(world, caller)
    for each in (never, caller):
        each.read()
    assert (never.closed, never.wire.ended) == ((4408, "No stream was open for 5 s."), "abort")
    assert caller.ends[0] == (4408, "No samples came for 9 s; open another stream.")
    assert caller.ends[1][0] == 4408
    assert caller.closed is None
    for second in range(24, 40):
        if not caller.wire.ended:
            caller.socket.sweep(second, idle_timeout_s=8, request_timeout_s=4)
    caller.read()
    assert caller.closed is not None
    assert (caller.closed[0], caller.wire.ended) == (4408, "abort")


def test_a_server_that_goes_down_answers_what_came() -> None:
    world = World()
    caller, empty = share(world), share(world)
    caller.send(start(0), start(1), start(2), chunk(0, 0, 1, 2), end(2))
    for each in (caller, empty):
        each.socket.close_when_idle()
    caller.send(chunk(0, 1, 3))
    settle(world, caller, empty)
    going = "The server is shutting down; open another connection."
    assert caller.events(0) == [1, 3, -1]
    assert caller.ends == {0: (1012, going), 1: (1012, going), 2: (1000, "")}
    empty.read()
    assert caller.closed == empty.closed == (1012, going)
    cut = share(World())
    cut.send(start(0))
    cut.socket.abort()
    cut.read()
    assert (cut.closed, cut.wire.ended) == ((1012, going), "abort")


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_message_that_never_comes_whole_gives_its_bytes_to_newer_ones(goes_on: bool) -> None:
    world, bounds = World(), RequestBounds(max_bytes=2 * CONNECTION_BYTES + 50_000)
    slow, newer = share(world, bounds), share(world, bounds)
    slow.feed(Frame(Opcode.BINARY, bytes(30_000), fin=False).serialize(mask=True))
    world.now_ns += 2_000 * MS
    if goes_on:
        # A fragment or a ping does not make it younger.
        slow.feed(Frame(Opcode.CONT, bytes(100), fin=False).serialize(mask=True))
        slow.feed(Frame(Opcode.PING, b"").serialize(mask=True))
    newer.feed(Frame(Opcode.BINARY, bytes(30_000), fin=False).serialize(mask=True))
    for caller in (slow, newer):
        caller.wire.unread = caller.wire.unread.removeprefix(b"\x8a\0")
        caller.read()
    assert slow.closed is not None
    assert slow.closed[0] == 1013
    assert newer.closed is None
    slow.feed(bytes(10_000))
    assert bounds.held_bytes < 2 * CONNECTION_BYTES + 31_000
    for caller in (slow, newer):
        caller.socket.connection_lost(None)
    assert bounds.held_bytes == 0
