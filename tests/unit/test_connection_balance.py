"""Which front-ends hand over connections: the plan, and what it is made from."""

import asyncio
import os
import socket
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.serve.control.child import ChildProcess
from penstock.serve.control.connection_balance import (
    LEAST_BUSY,
    LEAST_DIFFERENCE,
    MAX_MOVED,
    OLD_S,
    ConnectionBalance,
    ConnectionMove,
    plan_moves,
)
from penstock.serve.control.supervisor import _Supervisor
from penstock.serve.messages import FrontendUse, HandedOver, HandOver, Message
from penstock.serve.settings import ModelSettings, Settings
from tests.support.clock import Clock

LOADS = st.lists(
    st.builds(
        FrontendUse,
        busy=st.floats(0, 2),
        movable=st.integers(0, 40),
        room=st.integers(0, 40),
    ),
    max_size=8,
).map(lambda loads: dict(enumerate(loads)))


def loads(*busy: float, movable: int = 10, room: int = 100) -> dict[int, FrontendUse]:
    return {index: FrontendUse(busy=each, movable=movable, room=room) for index, each in enumerate(busy)}


def test_the_busiest_hands_over_to_the_idlest() -> None:
    assert plan_moves(loads(0.9, 0.1)) == [ConnectionMove(0, 1, 4)]
    assert plan_moves(loads(0.2, 0.9, 0.8, 0.1)) == [ConnectionMove(1, 3, 4), ConnectionMove(2, 0, 4)]
    # The one in the middle keeps what it has.
    assert plan_moves(loads(0.9, 0.5, 0.1)) == [ConnectionMove(0, 2, 4)]


def test_nothing_moves_where_it_would_not_help() -> None:
    assert plan_moves({}) == plan_moves(loads(0.9)) == []
    assert plan_moves(loads(LEAST_BUSY - 0.01, 0.0)) == []
    assert plan_moves(loads(0.5, 0.5 - LEAST_DIFFERENCE + 0.01)) == []
    # A tenth of what the busier one does is as even as it gets.
    assert plan_moves(loads(0.95, 0.87)) == []
    # One connection does all the work.
    assert plan_moves(loads(0.9, 0.1, movable=1)) == []
    assert plan_moves(loads(0.9, 0.1, movable=0)) == []
    assert plan_moves(loads(0.9, 0.1, room=0)) == []


def test_one_of_two_moves_to_a_front_end_that_does_nothing() -> None:
    assert plan_moves(loads(0.9, 0.0, movable=2)) == [ConnectionMove(0, 1, 1)]
    assert plan_moves(loads(0.9, 0.1, movable=2)) == [ConnectionMove(0, 1, 1)]


def test_no_more_than_there_is_room_for() -> None:
    assert plan_moves(loads(0.9, 0.1, room=2)) == [ConnectionMove(0, 1, 2)]


def test_a_move_is_bounded() -> None:
    assert plan_moves(loads(0.9, 0.1, movable=10_000, room=10_000)) == [ConnectionMove(0, 1, MAX_MOVED)]


@given(LOADS)
def test_a_move_makes_the_busier_of_two_less_busy(given_loads: dict[int, FrontendUse]) -> None:
    taking = set[int]()
    for move in plan_moves(given_loads):
        give, take = given_loads[move.source], given_loads[move.target]
        assert 0 < move.count <= min(give.movable, take.room)
        moved = move.count * give.busy / give.movable
        assert max(give.busy - moved, take.busy + moved) < give.busy
        assert move.target not in taking
        taking |= {move.source, move.target}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Message]]:
    sent: list[tuple[str, Message]] = []
    monkeypatch.setattr(ChildProcess, "send", lambda child, message, _=(): sent.append((child.name, message)))
    return sent


class Scene:
    """The front-ends of a supervisor that was never started."""

    def __init__(self, count: int) -> None:
        self.sockets = [socket.socket() for _ in range(count)]
        self.supervisor = _Supervisor(Settings(models=ModelSettings(bundles=(Path("bundle"),))), self.sockets)
        self.front_ends = self.supervisor._frontends
        self.supervisor._started = True
        for child in self.front_ends:
            child.serving = True
            child._process = cast(Any, object())

    def close(self) -> None:
        for each in self.sockets:
            each.close()
        for wake in {descriptor for child in self.supervisor._engines for descriptor in child.descriptors}:
            os.close(wake)


def use(busy: float, movable: int = 10) -> FrontendUse:
    return FrontendUse(busy=busy, movable=movable, room=100)


async def played(sent: list[tuple[str, Message]]) -> None:
    clock, scene = Clock(100.0), Scene(3)
    balance = ConnectionBalance(scene.front_ends, lambda: clock.now_s)
    _, second, third = scene.front_ends

    def second_passes(*busy: float | None) -> list[tuple[str, int]]:
        clock.now_s += 1
        sent.clear()
        for child, each in zip(scene.front_ends, busy, strict=True):
            if each is not None:
                balance.note(child, use(each))
        return [(name, message.target) for name, message in sent if isinstance(message, HandOver)]

    # The first report of all comes alone; the next one is time for a plan.
    assert second_passes(0.9, 0.1, 0.5) == []
    assert second_passes(0.9, 0.1, 0.5) == [("front-end 0", 1)]
    # Reports of the time before the move lead to no other.
    assert second_passes(0.9, 0.1, 0.5) == []
    for _ in range(5):
        assert second_passes(0.5, 0.5, 0.5) == []
    # A second alone says little.
    assert second_passes(0.55, 0.45, 0.5) == []
    # A stalled front-end takes nothing, and one that is started again has said nothing yet.
    second._set_stalled(True)
    assert [*second_passes(1.0, 0.0, 0.1), *second_passes(1.0, 0.0, 0.1)] == [("front-end 0", 2)]
    second._set_stalled(False)
    second.starts += 1
    third.serving = False
    for _ in range(5):
        assert second_passes(1.0, None, 0.0) == []
    # Neither does one whose last report is old.
    third.serving = True
    clock.now_s += OLD_S
    assert second_passes(1.0, None, None) == []
    assert second_passes(1.0, None, 0.1) == []
    assert second_passes(1.0, None, 0.1) == [("front-end 0", 2)]
    scene.close()


def test_what_front_ends_report_leads_to_moves(sent: list[tuple[str, Message]]) -> None:
    asyncio.run(asyncio.wait_for(played(sent), 5))


def test_a_connection_goes_to_another_front_end_where_the_one_that_is_wanted_is_gone(
    sent: list[tuple[str, Message]],
) -> None:
    async def all_of_them() -> None:
        scene = Scene(3)
        handed = HandedOver(target=1)

        def takes(source: int = 0) -> list[str]:
            sent.clear()
            descriptor = os.open(os.devnull, os.O_RDONLY)
            scene.supervisor._receive(scene.front_ends[source], handed, [descriptor])
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(descriptor)
            return [name for name, message in sent if message == handed]

        assert takes() == ["front-end 1"]
        scene.front_ends[1].serving = False
        # It goes back to where it was.
        assert takes() == ["front-end 0"]
        assert takes(2) == ["front-end 2"]
        # The last messages of a process that has ended.
        scene.front_ends[2]._process = None
        assert takes(2) == ["front-end 0"]
        scene.front_ends[2]._process = cast(Any, object())
        scene.front_ends[0]._set_stalled(True)
        assert takes() == ["front-end 2"]
        scene.front_ends[2].serving = False
        assert takes() == []
        scene.close()

    asyncio.run(asyncio.wait_for(all_of_them(), 5))
