"""Streams that go on at another server with a ticket: each result comes once, in order and right, whatever is cut."""

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.kept_messages import END, FLUSH, KeptMessages, Message
from penstock.core.spec import Array
from penstock.core.streams.live import Live
from penstock.serve.streams.session_tickets import NONE_TAKEN
from penstock.serve.streams.tickets import FOREIGN
from penstock.serve.table.slots import REPLAYED, RESUMED
from tests.support.mortal import MortalWorld
from tests.support.streams import STATE_BYTES, Caller, Sums, World
from tests.support.tickets import KEY, OTHER_KEY, tickets_each

SEND, LONG, FLUSHES, CUT, TICK, READ = range(6)
plays = st.lists(
    st.sampled_from([SEND, SEND, SEND, LONG, FLUSHES, CUT, TICK, TICK, READ, READ]), min_size=10, max_size=80
)
# One for each so many seconds of the signal, of 1,000 frames a second.
EACH_S = 0.005
# One for each message: some of those that are asked for wait for room, while an earlier state has not come.
EACH_MESSAGE_S = 0.001
REFUSED = 4412


def counted(output_U: Array, memory: Any, last: bool) -> tuple[Any, Any]:
    frames = (memory or 0) + len(output_U)
    return {"sums": output_U[:, 0].tolist(), "frames": frames, "last": last}, frames


LIVE = Live(rate_hz=1000, events=counted)


def new_world() -> World:
    return World(tickets=tickets_each(EACH_S), live=LIVE)


@dataclass
class LastingCaller:
    """A client that goes on at another server, and the results that it heard."""

    kept: KeptMessages
    start: dict[str, Any]
    heard: list[Any] = field(default_factory=list[Any])
    tickets: int = 0
    resumed: int = 0
    replayed: int = 0
    closed: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        self.connect(new_world())

    def connect(self, world: World | MortalWorld) -> None:
        beginning = self.kept.beginning()
        ticket = beginning.ticket
        self.world, self.caller, self.closed = world, world.call(), None
        self.caller.start(**self.start, tickets=True, **({} if ticket is None else {"ticket": ticket.text}))
        self.resumed += ticket is not None
        self.kept.begin(beginning)
        self.replayed += len(beginning.messages)
        for message in beginning.messages:
            self._feed(message)

    def send(self, message: Message) -> None:
        self._feed(self.kept.add(message))

    def tick(self) -> None:
        self.world.tick()
        self.caller.flow()

    def read(self) -> None:
        caller = self.caller
        caller.read()
        self.closed = caller.closed
        for said in caller.said:
            message = said if isinstance(said, bytes) else _text(said)
            self.tickets += not isinstance(said, bytes) and said["type"] == "ticket"
            # The last message counts those of its connection.
            is_result = isinstance(said, bytes) or said["type"] == "result"
            if (taken := self.kept.take(message)) is not None and is_result:
                self.heard.append(taken)
        caller.said.clear()

    def settle(self) -> None:
        idle = 0
        for _ in range(1_000):
            moved = self.world.tick()
            self.caller.flow()
            self.read()
            # What flows now moves the next tick.
            idle = 0 if moved or self.caller.held else idle + 1
            if idle == 2:
                return
        raise AssertionError("never idle")

    def _feed(self, message: Message) -> None:
        self.caller.send(1 if isinstance(message, str) else 2, _bytes(message))


def _bytes(message: Message) -> bytes:
    return message.encode() if isinstance(message, str) else message


def _text(said: Any) -> str:
    return orjson.dumps(said).decode()


def _samples(number: int, frames: int) -> bytes:
    # Neither 13 nor 17, which end a stream.
    return number.to_bytes(4, "little") + (np.arange(number, number + frames) % 10).astype(np.int16).tobytes()


def _play(play: list[int], start: dict[str, Any], max_bytes: int) -> tuple[LastingCaller, LastingCaller]:
    """Play with cuts, and without; returns both clients."""
    clients = [LastingCaller(KeptMessages(size, has_tickets=True), start) for size in (max_bytes, 1 << 20)]
    cut, whole = clients
    sent = 0
    for move in play:
        if move in (SEND, LONG, FLUSHES):
            message = FLUSH if move == FLUSHES else _samples(sent, 1 + sent % 4 if move == SEND else 11)
            sent += 1
            for client in clients:
                client.send(message)
        elif move == CUT and cut.kept.is_whole:
            cut.connect(new_world())
        elif move == TICK:
            cut.tick()
        elif move == READ:
            cut.read()
    for client in clients:
        client.send(END)
        client.settle()
    return cut, whole


@given(plays, st.sampled_from(["json", "binary"]), st.sampled_from([1 << 20, 100]))
def test_each_result_comes_once_at_whatever_server(play: list[int], events: str, max_bytes: int) -> None:
    cut, whole = _play(play, {"events": events}, max_bytes)
    assert cut.heard == whole.heard
    assert cut.closed == whole.closed == (1000, "")
    assert not cut.kept.waiting


def test_tickets_come_each_so_many_frames_and_save_the_rest() -> None:
    play = [SEND, TICK, TICK, READ] * 40 + [CUT] + [SEND, TICK, READ] * 3 + [CUT]
    cut, whole = _play(play, {}, 1 << 20)
    assert cut.heard == whole.heard
    assert cut.tickets >= 15
    assert cut.resumed == 2
    # Without tickets, 83 messages would have been sent again.
    assert cut.replayed < 12


def test_a_stream_that_outgrew_what_is_kept_goes_on() -> None:
    cut, whole = _play(([SEND, TICK, TICK, READ] * 30 + [CUT]) * 3, {}, 60)
    assert cut.resumed == 3
    assert cut.heard == whole.heard


def test_no_ticket_comes_that_was_not_asked_for() -> None:
    world = new_world()
    caller = world.call()
    caller.start()
    for number in range(20):
        caller.chunk(number, 1, 2, 3, 4)
        world.settle()
    caller.read()
    assert {said["type"] for said in caller.said} == {"ready", "result"}
    assert "tickets" not in caller.said[0]


def _ticket(world: World, **start: Any) -> str:
    caller = world.call()
    caller.start(tickets=True, **start)
    for number in range(20):
        caller.chunk(number, *[1] * 4)
        world.settle()
    caller.read()
    return next(said["ticket"] for said in caller.said if not isinstance(said, bytes) and said["type"] == "ticket")


def _end_of(world: World, **start: Any) -> tuple[int, str] | None:
    caller = world.call()
    caller.start(**start)
    caller.read()
    return caller.closed


def test_a_ticket_that_cannot_be_used_ends_the_stream_with_a_code_of_its_own() -> None:
    world = new_world()
    ticket = _ticket(world)
    assert _end_of(new_world(), ticket=ticket) is None
    changed = ticket[:60] + ("A" if ticket[60] != "A" else "B") + ticket[61:]
    for bad in (changed, "", "no base64 at all", ticket[:-4], "ü" * 100):
        assert _end_of(new_world(), ticket=bad) == (REFUSED, FOREIGN)
    other = World(tickets=tickets_each(EACH_S, version_hash="b" * 64), live=LIVE)
    assert _end_of(other, ticket=ticket) == (REFUSED, FOREIGN)
    rotated = World(tickets=tickets_each(EACH_S, keys=(OTHER_KEY,)), live=LIVE)
    assert _end_of(rotated, ticket=ticket) == (REFUSED, FOREIGN)
    both = World(tickets=tickets_each(EACH_S, keys=(OTHER_KEY, KEY)), live=LIVE)
    assert _end_of(both, ticket=ticket) is None
    assert _end_of(World(live=LIVE), ticket=ticket) == (REFUSED, NONE_TAKEN)
    code, reason = cast(tuple[int, str], _end_of(new_world(), ticket=ticket, events="binary"))
    assert code == REFUSED
    assert reason.startswith("The start names another encoding")
    assert reason.endswith("name the same.")
    assert cast(tuple[int, str], _end_of(new_world(), ticket=7))[0] == 1007
    assert cast(tuple[int, str], _end_of(new_world(), tickets="yes"))[0] == 1007


class LateSums(Sums):
    """Running sums whose states come when the test says."""

    late = True

    def read_done(self, begun: Any) -> bool:
        return not self.late


def test_a_state_that_comes_late_is_that_of_its_chunk() -> None:
    executor = LateSums(8)
    world = World(tickets=tickets_each(0.008), live=LIVE, executor=executor)
    caller = world.call()
    caller.start(tickets=True)
    for number in range(2):
        caller.chunk(number, 1, 1, 1, 1)
        world.settle()
    # One is due after the first or the second message, and the next one after the fourth.
    executor.late = False
    caller.chunk(2, 1)
    world.settle()
    caller.chunk(3, 1)
    world.settle()
    caller.read()
    ticket = next(said for said in caller.said if said["type"] == "ticket")
    assert ticket["seq"] <= 1
    again = new_world()
    caller = again.call()
    caller.start(ticket=ticket["ticket"])
    caller.chunk(ticket["seq"] + 1, 0)
    again.settle()
    caller.read()
    frames = 4 * (ticket["seq"] + 1)
    assert caller.said[1]["event"] == {"sums": [frames], "frames": frames + 1, "last": False}


def test_a_ticket_used_twice_forks_the_stream() -> None:
    ticket = _ticket(new_world())
    sums: list[Any] = []
    for sample in (2, 3):
        world = new_world()
        caller = world.call()
        caller.start(ticket=ticket)
        caller.read()
        caller.chunk(caller.said[0]["next"], sample)
        world.settle()
        caller.read()
        sums.append(caller.said[1]["event"]["sums"][0])
    assert sums[1] == sums[0] + 1


@pytest.mark.parametrize(
    "kept", [{1, 2}, {"best": -float("inf"), "prefixes": []}, [None, [float("nan")]]], ids=["set", "infinity", "NaN"]
)
def test_a_memory_that_is_no_json_gives_no_tickets(kept: Any, caplog: pytest.LogCaptureFixture) -> None:
    world = World(
        tickets=tickets_each(EACH_S), live=Live(rate_hz=1000, events=lambda output_U, memory, last: (1, kept))
    )
    caller = world.call()
    caller.start(tickets=True)
    for number in range(20):
        caller.chunk(number, 1, 2, 3, 4)
        world.settle()
    caller.read()
    assert [said["type"] for said in caller.said] == ["ready"] + ["result"] * 20
    assert caplog.text.count("gets no tickets") == 1


def test_a_memory_with_none_gives_tickets() -> None:
    world = World(
        tickets=tickets_each(EACH_S), live=Live(rate_hz=1000, events=lambda output_U, memory, last: (1, {"none": None}))
    )
    assert _ticket(world)


def test_the_state_of_a_slot_is_of_its_present_stream() -> None:
    world = World(slots=1, tickets=tickets_each(EACH_S), live=LIVE)
    for sample in (1, 5):
        caller: Caller = world.call()
        caller.start(tickets=True)
        for number in range(9):
            caller.chunk(number, *[sample] * 4)
            world.settle()
        caller.read()
        tickets = [said for said in caller.said if said["type"] == "ticket"]
        caller.end()
        world.settle()
        caller.read()
        again = world.call()
        again.start(ticket=tickets[-1]["ticket"])
        seq = tickets[-1]["seq"]
        again.chunk(seq + 1, 0)
        world.settle()
        again.read()
        assert again.said[1]["seq"] == seq + 1
        assert again.said[1]["event"] == {"sums": [4 * sample * (seq + 1)], "frames": 4 * (seq + 1) + 1, "last": False}
        again.end()
        world.settle()


KILL, RESTART, STEP = range(6, 9)
deadly = st.lists(
    st.sampled_from([SEND, SEND, SEND, FLUSHES, CUT, TICK, TICK, READ, KILL, KILL, RESTART, STEP]), max_size=80
)


@pytest.mark.thorough
@given(deadly, st.sampled_from([60.0, 0.02]), st.sampled_from([EACH_S, EACH_MESSAGE_S]))
def test_engines_may_die_too(play: list[int], ring_s: float, each_s: float) -> None:
    def mortal() -> MortalWorld:
        return MortalWorld(tickets=tickets_each(each_s), live=LIVE, ring_s=ring_s)

    whole = LastingCaller(KeptMessages(1 << 20, has_tickets=True), {})
    cut = LastingCaller(KeptMessages(1 << 20, has_tickets=True), {})
    cut.connect(mortal())
    sent = 0
    worlds = [cut.world]
    for move in play:
        world = cast(MortalWorld, cut.world)
        if move in (SEND, FLUSHES):
            message = FLUSH if move == FLUSHES else _samples(sent, 1 + sent % 4)
            sent += 1
            whole.send(message)
            whole.settle()
            cut.send(message)
        elif move == CUT:
            cut.caller.socket.connection_lost(None)
            cut.connect(mortal())
            worlds.append(cut.world)
        elif move == TICK:
            cut.tick()
        elif move == READ:
            cut.read()
        elif move == STEP:
            world.step(sent % 2)
        elif move in (KILL, RESTART):
            index = sent % 2
            if move == KILL and len(world.replicas) > 1:
                world.kill(index)
            else:
                world.restart(index)
        if cut.closed is not None or cut.caller.wire.ended:
            # Engines died too often, or the ring was too short.
            cut.connect(mortal())
            worlds.append(cut.world)
    for client in (whole, cut):
        client.send(END)
    cut.settle()
    if cut.closed is not None and cut.closed[0] != 1000:
        cut.connect(mortal())
        cut.settle()
    whole.settle()
    assert cut.heard == whole.heard
    for world in worlds[1:-1]:
        assert cast(MortalWorld, world).memory.held_bytes == 0


@pytest.mark.parametrize("has_tickets", [True, False])
def test_a_stream_with_tickets_outlives_its_engine_whatever_its_length(has_tickets: bool) -> None:
    world = MortalWorld(tickets=tickets_each(0.1), live=LIVE, ring_s=2.0)
    caller = world.call()
    caller.start(tickets=has_tickets)
    sums, number = [], 0

    def speak(messages: int) -> None:
        nonlocal number
        for _ in range(messages):
            caller.chunk(number, *[1] * 40)
            number += 1
            world.settle(caller)
        caller.read()
        sums.extend(said["event"]["sums"][-1] for said in caller.said if said["type"] == "result")
        caller.said.clear()

    # Three seconds, where two are kept.
    speak(75)
    world.kill(0)
    world.settle(caller)
    speak(5 if has_tickets else 0)
    if has_tickets:
        assert sums == [40 * (at + 1) for at in range(80)]
        # No more than came since the last ticket, some tenths of a second ago; nothing if that was of the last chunk.
        assert world.count(RESUMED) == 1
        assert world.count(REPLAYED) <= 100
    else:
        assert caller.closed is not None
        assert caller.closed[0] == 1013


def test_an_engine_with_other_states_does_not_go_on_with_a_stream() -> None:
    world = MortalWorld(tickets=tickets_each(EACH_S), live=LIVE)
    caller = world.call()
    caller.start(tickets=True)
    for number in range(9):
        caller.chunk(number, 1, 1, 1, 1)
        world.settle(caller)
    others = [replica for index, replica in world.replicas.items() if index != 0]
    for replica in others:
        replica.streams.writer._state_bytes = STATE_BYTES + 1
    world.kill(0)
    world.settle(caller)
    caller.read()
    assert caller.closed is not None
    assert caller.closed[0] == 1013
