"""Streams whose engines die at any point say what they would have said, once and in order."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import Overloaded, RequestError
from penstock.core.spec import Array
from penstock.serve.streams import slot_feed
from penstock.serve.streams.sequences import SequencePlace
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import (
    CHUNKS,
    FIRST,
    LOST_NO_ENGINE,
    LOST_NO_MEMORY,
    LOST_OUTGROWN,
    LOST_REPEATED,
    LOW_PRIORITY,
    REPLAYED,
    RESULTS,
    RESUMED,
    SOFT_DEADLINE,
    STREAMS_ABORTED,
    STREAMS_OPEN,
)
from penstock.serve.websocket import plain_streams, shared_connection
from tests.support.mortal import POISON, MortalWorld
from tests.support.shared_streams import SharedCaller, chunk, end, flush, start
from tests.support.streams import BUDGET_NS, FRAMES, MS, Caller

STREAMS = 3  # of each kind
ENGINES = 2
KINDS = ("own", "shared", "sequence")
FLUSHED = 0  # no sample here is 0

Step = tuple[str, int, list[int]]

steps = st.lists(
    st.tuples(
        st.sampled_from([*KINDS, *KINDS, "flush", "tick", "step", "kill", "die", "restart"]),
        st.integers(0, STREAMS - 1),
        st.lists(st.integers(1, 12), min_size=1, max_size=3 * FRAMES),
    ),
    min_size=5,
    max_size=60,
)


class Play:
    """Clients of every kind, and what each of them got."""

    def __init__(self, world: MortalWorld) -> None:
        self.world = world
        self.own = [world.call() for _ in range(STREAMS)]
        self.shared = world.share()
        self.shared.send(*(start(number, events="binary") for number in range(STREAMS)))
        for caller in self.own:
            caller.start()
        self.answers: list[list[Any]] = [[] for _ in range(STREAMS)]
        self.sent: dict[str, list[int]] = {kind: [0] * STREAMS for kind in KINDS}
        self.signals: dict[str, list[list[int]]] = {kind: [[] for _ in range(STREAMS)] for kind in KINDS}

    def send(self, kind: str, which: int, samples: list[int]) -> None:
        if kind == "shared" and len(samples) > FRAMES:
            # Of all streams together, as a router does: what is whole goes the short way.
            for number in range(STREAMS):
                self._note(kind, number, [samples[0]] * FRAMES)
            entries = [chunk(number, self.sent[kind][number], *[samples[0]] * FRAMES) for number in range(STREAMS)]
            self.shared.send(*entries)
            self.sent[kind] = [number + 1 for number in self.sent[kind]]
            return
        if kind == "sequence":
            samples = samples[:FRAMES]
        self._note(kind, which, samples)
        number = self.sent[kind][which]
        if kind == "own":
            self.own[which].chunk(number, *samples)
        elif kind == "shared":
            self.shared.send(chunk(which, number, *samples))
        else:
            self.ask(which, samples, start=number == 0)
        self.sent[kind][which] += 1

    def flush(self, which: int) -> None:
        self.own[which].flush()
        self.shared.send(flush(which))
        for kind in ("own", "shared"):
            self.sent[kind][which] += 1
            self.signals[kind][which].append(FLUSHED)

    def ask(self, which: int, samples: list[int], *, start: bool = False, end: bool = False) -> None:
        place = SequencePlace(which + 1, start, end)
        answer = partial(keep_answer, self.answers[which])
        self.world.sequences.put(place, np.array(samples, np.int16), answer, self.world.now_ns)

    def end(self) -> None:
        for number in range(STREAMS):
            self.own[number].end()
            if self.sent["sequence"][number]:
                self.ask(number, [], end=True)
        self.shared.send(*(end(number) for number in range(STREAMS)))

    def settle(self) -> None:
        self.world.settle(*self.own, self.shared)

    def check(self) -> None:
        """Everything was said once, in order, and nothing else."""
        for number in range(STREAMS):
            caller = self.own[number]
            assert sums_of(caller) == expected(self.signals["own"][number])
            assert caller.said[-1] == {"type": "end", "chunks": self.sent["own"][number]}
            assert caller.closed == (1000, "")
            assert shared_sums_of(self.shared, number) == expected(self.signals["shared"][number])
            assert self.shared.ends[number] == (1000, "")
            answers = self.answers[number]
            assert not [answer for answer in answers if isinstance(answer, RequestError)]
            flat = [value for answer in answers for value in answer.ravel().tolist()]
            if self.sent["sequence"][number]:
                assert len(answers) == self.sent["sequence"][number] + 1
                assert flat == expected(self.signals["sequence"][number])

    def _note(self, kind: str, which: int, samples: list[int]) -> None:
        self.signals[kind][which] += samples


def expected(signal: Sequence[int]) -> list[float]:
    """The sums of a signal, which begin anew after each flush and at whose end -1 comes."""
    sums: list[float] = []
    total = 0.0
    for sample in signal:
        total = 0.0 if sample == FLUSHED else total + sample
        sums.append(-1 if sample == FLUSHED else total)
    return [*sums, -1]


def keep_answer(answers: list[Any], answer: Array | RequestError) -> None:
    answers.append(answer if isinstance(answer, RequestError) else answer.copy())


def sums_of(caller: Caller) -> list[float]:
    caller.read()
    results = [said for said in caller.said if said["type"] == "result"]
    assert [result["seq"] for result in results] == list(range(len(results)))
    return [value for result in results for (value,) in result["event"] or ()]


def shared_sums_of(caller: SharedCaller, stream_id: int) -> list[float]:
    caller.read()
    messages = [said for said in caller.said[stream_id] if isinstance(said, bytes)]
    assert [int.from_bytes(message[:4], "little") for message in messages] == list(range(len(messages)))
    return [value for message in messages for value in np.frombuffer(message, "<f4", -1, 8).tolist()]


@pytest.mark.thorough
@given(steps, st.integers(2, 4))
@settings(max_examples=120, deadline=None)
def test_no_kill_changes_what_clients_hear(steps: Sequence[Step], chunks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # No chunk here is what ends the engines.
        patch.setattr(slot_feed, "MAX_DEATHS", 10**9)
        # Few streams take the short way too.
        patch.setattr(plain_streams, "MANY", 2)
        patch.setattr(shared_connection, "MANY", 2)
        world = MortalWorld(ENGINES, chunks=chunks, slots=16)
        play = Play(world)
        for what, which, samples in steps:
            engine = which % ENGINES
            match what:
                case "tick":
                    world.tick()
                    for caller in (*play.own, play.shared):
                        caller.flow()
                        caller.read()
                case "step":
                    world.step(engine)
                case "kill" | "die":
                    if what == "die" and engine in world.replicas:
                        world.replicas[engine].executor.dies = True
                        world.step(engine)
                    world.kill(engine)
                case "restart":
                    world.restart(engine)
                case "flush":
                    play.flush(which)
                case _:
                    if what == "sequence" and not world.replicas:
                        # As `ServedModel.reject_lost` does.
                        continue
                    play.send(what, which, samples)
        for engine in range(ENGINES):
            world.restart(engine)
        play.end()
        play.settle()
        play.check()
        assert world.memory.held_bytes == 0
        assert world.waiting.waiting == 0
        for replica in world.replicas.values():
            assert replica.streams.writer.in_use == 0
            assert replica.streams.counts[STREAMS_OPEN] == 0


def signal(caller: Caller, first: int, count: int, value: int = 1) -> None:
    for number in range(first, first + count):
        caller.chunk(number, *[value] * FRAMES)


def test_streams_go_on_in_the_other_engine_and_are_counted() -> None:
    world = MortalWorld(2)
    callers = [world.call() for _ in range(4)]
    for caller in callers:
        caller.start()
        signal(caller, 0, 5)
    world.settle(*callers)
    world.kill(0)
    assert (world.count(RESUMED), world.count(STREAMS_OPEN)) == (2, 4)
    for caller in callers:
        signal(caller, 5, 5)
        caller.end()
    world.settle(*callers)
    for caller in callers:
        assert sums_of(caller) == [*range(1, 41), -1]
        assert caller.closed == (1000, "")
    # Of the two that moved, five chunks each ran twice; chunks and results count once.
    assert world.count(REPLAYED) == 10
    # Those of the dead table are added by `ServedModel.settle`.
    assert world.count(CHUNKS) == world.count(RESULTS) == 2 * 11 + 2 * 6
    assert world.count(STREAMS_ABORTED) == 0


def test_what_was_answered_before_runs_in_the_background() -> None:
    world = MortalWorld(2, chunks=4)
    caller = world.call()
    caller.start()
    signal(caller, 0, 2)
    world.settle(caller)
    signal(caller, 2, 2)
    world.kill(0)
    table = world.replicas[1].streams.table
    (slot,) = np.flatnonzero(table.submitted)
    before = SOFT_DEADLINE | LOW_PRIORITY
    assert table.flags[slot].tolist() == [before | FIRST, before, SOFT_DEADLINE, SOFT_DEADLINE]
    assert (table.deadline_ns[slot] - table.arrival_ns[slot]).tolist() == [BUDGET_NS] * 4
    world.settle(caller)
    assert sums_of(caller) == [*range(1, 17)]


def test_a_stream_waits_for_the_only_engine_and_its_client_is_paused() -> None:
    world = MortalWorld(1)
    caller = world.call()
    caller.start()
    signal(caller, 0, 3)
    world.settle(caller)
    world.kill(0)
    signal(caller, 3, 4)
    assert caller.wire.paused
    # Silence of a client that is not read is no silence.
    caller.socket.sweep(10**6, idle_timeout_s=8, request_timeout_s=4)
    world.restart(0)
    caller.end()
    world.settle(caller)
    assert not caller.wire.paused
    assert sums_of(caller) == [*range(1, 29), -1]


@pytest.mark.parametrize("shares", [False, True])
def test_a_client_that_waits_for_results_of_a_dead_engine_is_not_idle(shares: bool) -> None:
    world = MortalWorld(1, chunks=4)
    caller = world.share() if shares else world.call()
    if isinstance(caller, SharedCaller):
        caller.send(start(0, events="binary"), chunk(0, 0, *[1] * FRAMES))
    else:
        caller.start()
        signal(caller, 0, 1)
    caller.read()
    world.kill(0)
    # It sent all that its window allows, and was paused nowhere.
    assert not caller.wire.paused

    def sweep(now_s: float) -> None:
        caller.now_s[0] = now_s
        caller.socket.sweep(now_s, idle_timeout_s=8, request_timeout_s=4)

    for now_s in (1, 10, 20):
        sweep(now_s)
    world.restart(0)
    world.settle(caller)
    sweep(26)
    said = shared_sums_of(caller, 0) if isinstance(caller, SharedCaller) else sums_of(caller)
    assert said == [1, 2, 3, 4]
    ends = caller.ends if isinstance(caller, SharedCaller) else caller.closed
    assert not ends
    # From now on its silence counts.
    sweep(29)
    caller.read()
    end = caller.ends[0] if isinstance(caller, SharedCaller) else caller.closed
    assert end is not None
    assert end[0] == 4408


def test_a_sequence_that_waits_for_an_engine_is_not_idle() -> None:
    world = MortalWorld(1)
    answers: list[Any] = []
    sequences = world.sequences
    sequences.idle_ns = 8_000 * MS

    def ask(*samples: int, begin: bool = False) -> None:
        place = SequencePlace(5, begin, False)
        sequences.put(place, np.array(samples, np.int16), partial(keep_answer, answers), world.now_ns)

    ask(1, begin=True)
    world.settle()
    world.kill(0)
    for _ in range(3):
        world.now_ns += 5_000 * MS
        sequences.sweep(world.now_ns)
    world.restart(0)
    world.settle()
    ask(2)
    world.settle()
    assert [np.ravel(answer).tolist() for answer in answers] == [[1], [3]]
    world.now_ns += 9_000 * MS
    sequences.sweep(world.now_ns)
    assert len(sequences) == 0


def test_a_stream_that_no_engine_takes_in_time_is_closed() -> None:
    world = MortalWorld(1, wait_s=5.0)
    caller = world.call()
    caller.start()
    signal(caller, 0, 3)
    world.settle(caller)
    world.kill(0)
    world.now_ns += 4_000 * MS
    world.waiting.expire()
    caller.read()
    assert caller.closed is None
    world.now_ns += 2_000 * MS
    world.waiting.expire()
    caller.read()
    assert caller.closed is not None
    assert caller.closed[0] == 1013
    assert caller.closed[1].startswith("The engine stopped before it answered and is being started again.")
    world.restart(0)
    assert (world.count(LOST_NO_ENGINE), world.count(STREAMS_ABORTED), world.count(STREAMS_OPEN)) == (1, 1, 0)
    assert world.memory.held_bytes == 0


def test_a_server_that_drains_waits_for_no_engine() -> None:
    world = MortalWorld(1)
    caller = world.call()
    caller.start()
    world.kill(0)
    world.waiting.close()
    caller.socket.close_when_idle()
    world.waiting.expire()
    caller.read()
    assert caller.closed is not None
    assert caller.closed[0] == 1013


def test_a_drain_answers_what_came_before_it_in_another_engine() -> None:
    world = MortalWorld(2)
    caller = world.call()
    caller.start()
    signal(caller, 0, 3)
    world.tick()
    world.kill(0)
    caller.socket.close_when_idle()
    world.settle(caller)
    assert sums_of(caller) == [*range(1, 13), -1]
    assert caller.closed is not None
    assert caller.closed[0] == 1012


def test_what_is_longer_than_the_ring_ends_as_without_one() -> None:
    # A block of a second at a rate of 1 kHz holds 125 chunks of 8 bytes, and of 8 beside them.
    world = MortalWorld(1, ring_s=1.0)
    long, short = world.call(), world.call()
    for caller, count in ((long, 126), (short, 124)):
        caller.start()
        signal(caller, 0, count)
    world.settle(long, short)
    world.kill(0)
    world.restart(0)
    for caller in (long, short):
        caller.end()
    world.settle(long, short)
    assert sums_of(short) == [*range(1, 497), -1]
    assert long.closed is not None
    assert (long.closed[0], world.count(LOST_OUTGROWN)) == (1013, 1)


def test_a_flush_begins_the_ring_anew() -> None:
    # Of a second, 125 chunks, at most.
    world = MortalWorld(1, ring_s=1.0)
    caller = world.call()
    caller.start()
    for part in range(4):
        signal(caller, 101 * part, 100)
        world.settle(caller)
        caller.flush()
        world.settle(caller)
    signal(caller, 404, 10)
    world.settle(caller)
    world.kill(0)
    world.restart(0)
    caller.end()
    world.settle(caller)
    assert sums_of(caller) == [*[*range(1, 401), -1] * 4, *range(1, 41), -1]
    # Only what came after the last flush ran once more.
    assert world.count(REPLAYED) == 10


def test_rings_take_half_of_the_memory_and_what_has_none_ends() -> None:
    # Rings of 2,008 bytes a second, of which 10,040 bytes are for all.
    world = MortalWorld(1, max_bytes=20_080, slots=16)
    callers = [world.call() for _ in range(6)]
    for caller in callers:
        caller.start()
        signal(caller, 0, 2)
    world.settle(*callers)
    assert world.memory.held_bytes == world.bounds.held_bytes == 10_040
    world.kill(0)
    for caller in callers:
        caller.read()
    assert [caller.closed is None for caller in callers] == [True] * 5 + [False]
    world.restart(0)
    assert (world.count(LOST_NO_MEMORY), world.count(RESUMED)) == (1, 5)


def test_a_chunk_that_ends_engines_ends_three_and_its_stream() -> None:
    world = MortalWorld(2)
    good, bad = world.call(), world.call()
    for caller in (good, bad):
        caller.start()
        caller.chunk(0, 1)
    world.settle(good, bad)
    bad.chunk(1, POISON)
    deaths = 0
    for number in range(1, 10):
        good.chunk(number, 1)
        world.settle(good, bad)
        for engine in range(2):
            deaths += engine not in world.replicas
            world.restart(engine)
    good.end()
    world.settle(good, bad)
    assert deaths == 3
    assert sums_of(good) == [*range(1, 11), -1]
    assert bad.closed == (1011, "Several engines stopped while they ran this stream; it is not tried again.")
    assert world.count(LOST_REPEATED) + world.waiting.uncounted[LOST_REPEATED] == 1


def test_streams_that_wait_go_before_new_ones() -> None:
    # One engine carries one stream beside the first: a chunk of 4 ms, batches of 1.5 ms a row.
    curve = Costs([1, 2], [1.5 * MS, 3.0 * MS])
    world = MortalWorld(2, curve=curve)
    callers = [world.call() for _ in range(4)]
    world.kill(0)
    assert world.waiting.waiting == 2
    with pytest.raises(Overloaded, match="2 streams of an engine that stopped go first"):
        world.call()
    world.restart(0)
    assert (world.waiting.waiting, world.count(STREAMS_OPEN)) == (0, 4)
    callers[0].socket.connection_lost(None)
    world.settle(*callers[1:])
    world.call()


def test_headroom_is_left_to_the_streams_of_other_engines() -> None:
    curve = Costs([1, 2, 4], [0.5 * MS, 1.0 * MS, 2.0 * MS])
    world = MortalWorld(2, curve=curve, headroom=0.5)
    opened = 0
    with suppress(Overloaded):
        while True:
            world.call()
            opened += 1
    world.kill(0)
    # All of them run in one engine.
    assert (world.waiting.waiting, world.count(STREAMS_OPEN)) == (0, opened)
    assert opened >= 4


def test_a_client_that_leaves_while_its_stream_waits_leaves_nothing() -> None:
    world = MortalWorld(1)
    callers = [world.call() for _ in range(3)]
    shared = world.share()
    shared.send(start(0), start(1))
    for caller in callers:
        caller.start()
        signal(caller, 0, 2)
    world.settle(*callers, shared)
    world.kill(0)
    callers[0].socket.connection_lost(None)
    shared.socket.connection_lost(None)
    assert world.waiting.waiting == 2
    world.restart(0)
    assert world.count(STREAMS_OPEN) == 2
    for caller in callers[1:]:
        caller.end()
    world.settle(*callers[1:])
    assert world.memory.held_bytes == 0


def test_requests_of_a_sequence_are_answered_after_the_death() -> None:
    world = MortalWorld(2)
    answers: list[Any] = []

    def ask(*samples: int, begin: bool = False, end: bool = False) -> None:
        place = SequencePlace(5, begin, end)
        world.sequences.put(place, np.array(samples, np.int16), partial(keep_answer, answers), world.now_ns)

    ask(1, 2, begin=True)
    world.settle()
    ask(3)
    world.kill(0)
    ask(4, end=True)
    world.settle()
    assert [np.ravel(answer).tolist() for answer in answers] == [[1, 3], [6], [10, -1]]
    assert len(world.sequences) == 0


def test_streams_on_the_short_way_go_on_and_take_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_streams, "MANY", 2)
    monkeypatch.setattr(shared_connection, "MANY", 2)
    world = MortalWorld(2, chunks=8)
    shared = world.share()
    shared.send(*(start(number, events="binary") for number in range(6)))

    def say(number: int) -> None:
        shared.send(*(chunk(stream, number, *[1] * FRAMES) for stream in range(6)))

    def lanes() -> int:
        return sum(stream.lane is not None for stream in shared.socket._streams.values())

    for number in range(3):
        say(number)
        world.settle(shared)
    assert lanes() == 6
    world.kill(0)
    assert lanes() == 3
    # Three of them still drop results.
    for number in range(3, 6):
        say(number)
    world.settle(shared)
    say(6)
    say(7)
    assert lanes() == 6
    world.step(1)
    world.restart(0)
    world.kill(1)
    say(8)
    shared.send(*(end(number) for number in range(6)))
    world.settle(shared)
    for number in range(6):
        assert shared_sums_of(shared, number) == [*range(1, 37), -1]
    assert world.memory.held_bytes == 0
