"""An event loop that polls for some time instead of sleeping."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.serve.engine.engine_process import EngineProcess
from penstock.serve.idle_polling import MAX_IN_USE, IdlePolling
from penstock.serve.settings import BatchSettings
from tests.unit.test_child_answers import SETTINGS, Supervising, frontend, run


class Loop:
    """The queue of an event loop, whose polls take a microsecond each."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.soon: deque[Callable[[], None]] = deque()
        self.looks = 0

    def look(self) -> None:
        self.looks += 1

    def run(self) -> int:
        """Poll until nothing is to be called; returns the nanoseconds it took."""
        start_ns = self.now_ns
        while self.soon:
            for _ in range(len(self.soon)):
                self.soon.popleft()()
            self.now_ns += 1_000
        return self.now_ns - start_ns

    def polling(self, stay_ns: int) -> IdlePolling:
        return IdlePolling(self.soon.append, lambda: self.now_ns, stay_ns, self.look)


def test_the_loop_polls_for_the_time_and_looks_each_time() -> None:
    loop = Loop()
    polling = loop.polling(50_000)
    polling.extend()
    assert loop.run() == 51_000
    assert loop.looks == 50
    assert loop.run() == 0
    polling.extend()
    assert loop.run() == 51_000


def test_more_calls_extend_the_time_and_are_one_poll_each() -> None:
    loop = Loop()
    polling = loop.polling(50_000)
    polling.extend()
    polling.extend()
    loop.soon.popleft()()
    loop.now_ns = 40_000
    polling.extend()
    assert len(loop.soon) == 1
    assert loop.run() == 51_000


def test_a_time_of_0_never_polls() -> None:
    loop = Loop()
    loop.polling(0).extend()
    assert not loop.soon


@dataclass
class Loader:
    """Takes the place of an engine's models: each batch has one row, and so many slots are in use."""

    slots: int
    counted: int = 0

    def tick(self) -> Any:
        return 3, SimpleNamespace(run=np.zeros(1), expire=np.zeros(0))

    def is_one_shot(self, key: int) -> bool:
        return True

    @property
    def in_use(self) -> int:
        self.counted += 1
        return self.slots


@pytest.mark.parametrize(
    ("poll_ms", "slots", "polls"), [(2.0, MAX_IN_USE, True), (2.0, MAX_IN_USE + 1, False), (0.0, 1, False)]
)
def test_an_engine_polls_after_a_batch_while_few_slots_are_in_use(poll_ms: float, slots: int, polls: bool) -> None:
    async def scene(supervising: Supervising) -> None:
        settings = replace(SETTINGS, batching=BatchSettings(idle_poll_ms=poll_ms))
        engine = EngineProcess(settings, supervising.end, 0, supervising.own, [])
        loader: Any = Loader(slots)
        engine._loader = loader
        assert engine._work() == 1
        assert engine._idle_polling._polling is polls
        # The slots of all tables are counted only where it matters.
        assert loader.counted == (poll_ms > 0)
        supervising.close(engine)

    run(scene)


@pytest.mark.parametrize(
    ("own", "all_slots", "polls"),
    [(1, 1, True), (4, MAX_IN_USE, True), (4, MAX_IN_USE + 1, False), (5, 5, False), (0, 0, False)],
)
def test_a_front_end_polls_while_few_slots_are_in_use(
    monkeypatch: pytest.MonkeyPatch, own: int, all_slots: int, polls: bool
) -> None:
    async def scene(supervising: Supervising) -> None:
        front = frontend(supervising, monkeypatch)
        fake: Any = front._front
        fake.awaited, fake.awaited_by_all = own, all_slots
        front._polled_engines.add(0)
        front._wake_engine(0, supervising.own)
        assert front._polls is polls
        supervising.close(front)

    run(scene)
