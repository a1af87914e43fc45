"""Live streams through frames, sessions, the table and the engine: any interleaving, any cut, every way to end."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from penstock.core.errors import Overloaded
from penstock.serve.exchange.peer import PIPELINED, UNREAD_BYTES
from penstock.serve.fair_turns import Usage
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import ENGINE_LOST, STREAMS_ABORTED, STREAMS_OPEN, STREAMS_REFUSED
from tests.support.streams import MS, Caller, World


def events_of(caller: Caller) -> list[float]:
    caller.read()
    results = [said for said in caller.said if said["type"] == "result"]
    assert [result["seq"] for result in results] == list(range(len(results)))
    return [value for result in results for (value,) in result["event"] or ()]


@given(st.integers(0, 2**31), st.integers(2, 4), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_each_client_hears_the_sums_of_its_own_signal(seed: int, chunks: int, slots: int) -> None:
    """Clients come, send messages of any length in pieces of any length, end, leave or are killed, over few slots."""
    rng = np.random.default_rng(seed)
    world = World(slots, chunks)
    live: dict[Caller, list[int]] = {}
    over: list[tuple[Caller, list[int], bool]] = []
    counts: dict[int, int] = {}
    for _ in range(150):
        action = rng.random()
        caller: Any = rng.choice(np.array([*live, None], object)) if live else None
        if action < 0.1:
            if world.frontend.in_use < slots:
                caller = world.call()
                caller.start()
                live[caller] = []
                counts[id(caller)] = 0
            else:
                with pytest.raises(Overloaded):
                    world.call()
        elif action < 0.6 and caller is not None:
            samples = rng.integers(1, 12, rng.integers(1, 30)).tolist()
            payload = counts[id(caller)].to_bytes(4, "little") + np.array(samples, np.int16).tobytes()
            data = Frame(Opcode.BINARY, payload).serialize(mask=True)
            cut = int(rng.integers(0, len(data)))
            caller.feed(data[:cut])
            if rng.random() < 0.3:
                world.tick()
            caller.feed(data[cut:])
            live[caller] += samples
            counts[id(caller)] += 1
        elif action < 0.65 and caller is not None:
            caller.end()
            over.append((caller, live.pop(caller), True))
        elif action < 0.7 and caller is not None:
            caller.socket.connection_lost(None)
            over.append((caller, live.pop(caller), False))
        else:
            world.tick()
            for each in [*live, *(each for each, _, ended in over if ended)]:
                each.flow()
    for caller, samples in live.items():
        caller.end()
        over.append((caller, samples, True))
    for _ in range(1_000):
        moved = world.tick()
        for caller, _, ended in over:
            if ended:
                moved += bool(caller.held) and not caller.wire.paused
                caller.flow()
        if not moved:
            break
    for caller, samples, ended in over:
        sums = np.cumsum(samples).tolist()
        events = events_of(caller)
        if ended:
            assert events == [*sums, -1]
            assert caller.closed == (1000, "")
            assert caller.said[-1] == {"type": "end", "chunks": counts[id(caller)]}
            caller.socket.connection_lost(None)
        else:
            assert events == sums[: len(events)]
    assert world.frontend.in_use == 0
    assert world.streams.counts[STREAMS_OPEN] == 0
    assert world.streams.counts[STREAMS_ABORTED] == sum(not ended for _, _, ended in over)
    assert world.peers == set()


def test_a_stream_in_real_time_owes_nothing_when_it_has_a_turn_after_a_long_time() -> None:
    world = World()
    turns = world.streams.batch_loop.turns
    others = [Usage(turns) for _ in range(50)]
    caller = world.call()
    caller.start()
    usage = caller.socket.usage

    def chunks(numbers: range) -> None:
        for number in numbers:
            for other in others:
                turns.charge_ns(other, MS // 10)
            caller.chunk(number, 1, 1, 1, 1)
            world.settle()
            world.now_ns += int(1e9 * world.streams.chunk_s)

    chunks(range(500))
    assert not usage.waits
    turns.charge_ns(usage, 60 * MS)
    for number in range(500, 520):
        assert usage.waits
        chunks(range(number, number + 1))
        # Then what is paid back would be awaited.
        assert not usage.long
    assert events_of(caller)[-1] == 4 * 520


def test_a_slot_without_room_stops_the_reading_and_nothing_else() -> None:
    world = World(chunks=2)
    fast, other = world.call(), world.call()
    for caller in (fast, other):
        caller.start()
    for number in range(100):
        fast.chunk(number, 1, 1, 1, 1)
    assert fast.wire.paused
    # Two in the ring, one in the backlog, the others where they came from.
    assert len(fast.held) == 97 * 18
    other.chunk(0, 5)
    world.settle()
    assert events_of(other) == [5]
    for _ in range(200):
        fast.flow()
        world.settle()
    assert events_of(fast) == list(range(1, 401))
    assert not fast.wire.paused


def test_messages_that_were_read_together_wait_for_room_in_order() -> None:
    world = World(chunks=2)
    caller = world.call()
    data = Frame(Opcode.TEXT, b'{"type":"start"}').serialize(mask=True)
    for number in range(30):
        data += Frame(Opcode.BINARY, number.to_bytes(4, "little") + b"\1\0" * 9).serialize(mask=True)
    caller.feed(data + Frame(Opcode.TEXT, b'{"type":"end"}').serialize(mask=True))
    assert caller.wire.paused
    world.settle()
    assert events_of(caller) == [*range(1, 271), -1]
    assert caller.closed == (1000, "")


@pytest.mark.parametrize("sample", [13, 17])
def test_a_network_that_fails_on_one_stream_ends_that_one(sample: int, caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    bad, good = world.call(), world.call()
    for caller in (bad, good):
        caller.start()
        caller.chunk(0, 1, 2)
    bad.chunk(1, sample)
    good.chunk(1, 3)
    world.settle()
    assert events_of(bad) == [1, 3]
    assert bad.closed == (1011, "The network failed.")
    assert events_of(good) == [1, 3, 6]
    assert world.frontend.in_use == 1
    bad.send(8, b"")
    assert bad.wire.ended == "close"


def test_a_lost_engine_ends_every_stream() -> None:
    world = World()
    callers = [world.call() for _ in range(3)]
    for caller in callers:
        caller.start()
        caller.chunk(0, 1)
    world.frontend.fail(ENGINE_LOST)
    for caller in callers:
        caller.read()
        assert caller.closed == (1013, "The engine stopped. Retry after 3 s.")
    assert world.streams.counts[STREAMS_OPEN] == 0


def test_what_costs_cannot_carry_is_refused_with_a_time_to_come_back() -> None:
    # A chunk of 4 ms, a batch of 3 ms however large: one row at a time cannot carry two streams.
    world = World(curve=Costs([1], [3.0 * MS]))
    first = world.call()
    with pytest.raises(Overloaded, match="1 streams are open, as many as keep 50 ms") as caught:
        world.call()
    assert caught.value.retry_after_s == 5.0
    assert world.streams.counts[STREAMS_REFUSED] == 1
    first.socket.connection_lost(None)
    world.settle()
    assert world.call().wire.ended == ""


def test_a_budget_that_cannot_be_kept_is_refused_at_the_start() -> None:
    world = World(curve=Costs([1, 8], [3.0 * MS, 10.0 * MS]))
    for latency_ms, code, said in (
        (1, 1008, "shorter than the network's own time"),
        (4, 1013, "open on its engine, as many as keep 4 ms. Retry after"),
    ):
        others = [world.call() for _ in range(2)]
        caller = world.call()
        caller.start(latency_ms=latency_ms)
        caller.read()
        assert caller.closed is not None
        assert (caller.closed[0], said in caller.closed[1]) == (code, True), caller.closed
        for other in others:
            other.socket.connection_lost(None)
        world.settle()


@pytest.mark.thorough
def test_results_that_nobody_reads_end_the_stream() -> None:
    world = World()
    deaf = world.call()
    deaf.start()
    deaf.socket.pause_writing()
    number = 0
    while not deaf.wire.ended:
        assert len(deaf.wire.unread) <= UNREAD_BYTES + 1000
        deaf.chunk(number, 1, 2, 3, 4)
        number += 1
        world.settle()
    assert deaf.wire.ended == "abort"
    assert world.frontend.in_use == 0


def test_silence_before_the_start_between_samples_and_after_the_close() -> None:
    world = World()
    never, quiet, gone = world.call(), world.call(), world.call()
    quiet.start()
    gone.chunk(0, 1)
    for second in range(1, 12):
        for caller in (never, quiet, gone):
            caller.send(9, b"pings do not count") if not caller.wire.ended else None
            caller.socket.sweep(second, idle_timeout_s=8, request_timeout_s=4)
    for caller in (never, quiet, gone):
        caller.read()
    assert (never.closed, never.wire.ended) == ((4408, "No start came for 5 s."), "abort")
    # A sweep is a second after the last message at most.
    assert quiet.closed == (4408, "No samples came for 9 s; open another stream.")
    assert gone.closed is not None
    assert (gone.closed[0], gone.wire.ended) == (1003, "abort")


def test_a_server_that_goes_down_answers_what_came() -> None:
    world = World()
    flowing, starting, ending = world.call(), world.call(), world.call()
    flowing.start()
    ending.start()
    flowing.chunk(0, 1, 2)
    ending.end()
    for caller in (flowing, starting, ending):
        caller.socket.close_when_idle()
    flowing.chunk(1, 3)
    world.settle()
    assert events_of(flowing) == [1, 3, -1]
    assert flowing.closed == (1012, "The server is shutting down; open another stream.")
    starting.read()
    assert starting.closed == flowing.closed
    assert events_of(ending) == [-1]
    assert ending.closed == (1000, "")
    last = World()
    cut = last.call()
    cut.socket.abort()
    cut.read()
    assert (cut.closed, cut.wire.ended) == (flowing.closed, "abort")


def test_closes_of_clients_are_answered() -> None:
    for payload, code in ((b"\x03\xe8", 1000), (b"", None), (b"\x0f\xa1bye", 4001), (b"\x00\x01", 1002)):
        world = World()
        caller = world.call()
        caller.start()
        caller.chunk(0, 1)
        data = Frame(Opcode.CLOSE, payload).serialize(mask=True) + b"and what follows is dropped"
        caller.feed(data)
        world.settle()
        assert caller.wire.ended == "close"
        if code is None:
            assert caller.wire.unread.endswith(b"\x88\x00")
        else:
            caller.read()
            assert caller.closed is not None
            assert caller.closed[0] == code
        assert world.frontend.in_use == 0


def binary(number: int) -> bytes:
    return Frame(Opcode.BINARY, number.to_bytes(4, "little") + b"\1\0").serialize(mask=True)


CLOSED = Frame(Opcode.CLOSE, b"\x03\xe8").serialize(mask=True)


def test_what_follows_a_bad_message_is_dropped_until_the_close() -> None:
    world = World()
    caller, waits, open_one = world.call(), world.call(), world.call()
    for each in (caller, waits, open_one):
        each.start()
    caller.feed(binary(0) + binary(5) + binary(1) + binary(2) + CLOSED)
    caller.read()
    assert caller.closed == (1007, "Message 5 came where 1 belongs; count from 0 without gaps or repeats.")
    assert caller.wire.ended == "close"
    # The close may have been read before the stream ended, while its slot had no room.
    waits.feed(b"".join(map(binary, range(10))) + CLOSED)
    assert waits.wire.paused
    waits.socket.close_when_idle()
    world.frontend.fail(ENGINE_LOST)
    waits.read()
    assert waits.closed is not None
    assert (waits.closed[0], waits.wire.ended) == (1013, "close")
    for number in range(1_000):
        open_one.feed(binary(number))
        assert open_one.socket._reader.next() is None
    assert world.streams.counts[STREAMS_OPEN] == 0


def test_fragments_of_one_read_leave_the_others_their_turn() -> None:
    async def talk() -> None:
        world = World()
        caller = world.call()
        empty = Frame(Opcode.CONT, b"", fin=False).serialize(mask=True)
        begun = Frame(Opcode.BINARY, b"", fin=False).serialize(mask=True)
        ping = Frame(Opcode.PING, b"").serialize(mask=True)
        caller.feed(begun + empty * 5 * PIPELINED + ping + CLOSED)
        for _ in range(5):
            assert caller.wire.unread.count(b"\x8a") == 0
            assert caller.wire.paused
            await asyncio.sleep(0)
        assert caller.wire.unread.count(b"\x8a") == 1

    asyncio.run(talk())


def test_many_messages_of_one_read_leave_the_others_their_turn() -> None:
    async def talk() -> None:
        world = World()
        caller = world.call()
        pings = [Frame(Opcode.PING, b"%d" % number).serialize(mask=True) for number in range(2 * PIPELINED + 2)]
        caller.feed(b"".join(pings) + CLOSED)
        for turn in (1, 2):
            assert caller.wire.unread.count(b"\x8a") == turn * PIPELINED
            assert caller.wire.paused
            await asyncio.sleep(0)
        assert caller.wire.unread.count(b"\x8a") == len(pings)
        assert caller.wire.ended == "close"

    asyncio.run(talk())
