"""The chunks and states of one stream's slot, with a table that the test plays: what another engine goes on with."""

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from penstock.core.spec import Array
from penstock.serve.exchange.request_bounds import RequestBounds
from penstock.serve.frontend.table_writer import Done, TableWriter
from penstock.serve.streams.actions import PushChunk
from penstock.serve.streams.replay_ring import ReplayMemory, ReplayRing
from penstock.serve.streams.slot_feed import SlotFeed
from penstock.serve.table.slots import ENGINE_LOST, OK, SAVES

ROOM = 2
OUTPUT: Array = np.zeros(1, np.float32)


@dataclass
class Writer:
    """Slots of an engine with room for two chunks, which saves the states that are wanted as it hands results out."""

    pushed: list[tuple[bytes, int]] = field(default_factory=list[tuple[bytes, int]])
    restored: list[bytes] = field(default_factory=list[bytes])
    counts: dict[int, int] = field(default_factory=lambda: dict.fromkeys(range(100), 0))
    state_bytes: int = 8
    answered: int = 0
    saved: int = 0
    done: Done | None = None

    def open(self, done: Done, *, low_priority: bool = False) -> Any:
        self.done = done
        return self

    def push(self, handle: Any, samples: Any, *, flags: int, **_: Any) -> bool:
        if len(self.pushed) - self.answered >= ROOM:
            return False
        self.pushed.append((bytes(samples), flags))
        return True

    def submitted(self, handle: Any) -> int:
        return len(self.pushed)

    def saved_state(self, handle: Any, number: int) -> bytes | None:
        return b"state%03d" % number if self.saved == number and self.answered >= number else None

    def restore_state(self, handle: Any, state: bytes) -> None:
        self.restored.append(state)

    def cancel(self, handle: Any) -> None:
        pass

    def answer(self) -> None:
        assert self.done is not None
        self.answered += 1
        if self.pushed[self.answered - 1][1] & SAVES:
            self.saved = self.answered
        self.done(OK, OUTPUT, False)


class Stream:
    """A stream that takes its state with each result, as its session does."""

    def __init__(self, *, has_ring: bool) -> None:
        ring = ReplayRing(ReplayMemory(RequestBounds()), frame_bytes=2, block_bytes=100, max_blocks=9)
        self.writer = Writer()
        self.states: list[bytes] = []
        self.feed = SlotFeed(
            cast(TableWriter, self.writer), self._on_result, ring=ring if has_ring else None, lost=lambda _: None
        )

    def put(self, name: bytes, *, saves: bool = False) -> None:
        self.feed.put(PushChunk(name, 1, last=False, saves=saves), 0, 0)

    def resume(self) -> Writer:
        """Lose the engine, and go on in another one."""
        assert self.writer.done is not None
        assert self.feed.lose() is None, ENGINE_LOST
        self.writer = Writer()
        self.feed.resume(cast(TableWriter, self.writer), lambda: 0, 0)
        return self.writer

    def _on_result(self, status: int, output: Array, last: bool) -> None:
        if self.feed.wanted is not None and (state := self.feed.take_state()) is not None:
            self.states.append(state)


def names(writer: Writer) -> list[bytes]:
    return [samples for samples, _ in writer.pushed]


def test_the_state_of_one_chunk_is_not_kept_as_that_of_a_later_one_that_waits() -> None:
    stream = Stream(has_ring=True)
    stream.put(b"c1", saves=True)
    stream.put(b"c2")
    stream.put(b"c3", saves=True)
    for _ in range(3):
        stream.writer.answer()
    stream.put(b"c4")
    other = stream.resume()
    assert other.restored == [b"state003"]
    assert names(other) == [b"c4"]


@pytest.mark.parametrize("has_ring", [True, False])
def test_of_chunks_that_wait_the_state_after_the_last_one_is_wanted(has_ring: bool) -> None:
    stream = Stream(has_ring=has_ring)
    for number in range(1, 7):
        stream.put(b"c%d" % number, saves=number in (1, 3, 5))
    for _ in range(4):
        stream.writer.answer()
    assert stream.states == []
    stream.writer.answer()
    assert stream.states == [b"state005"]
    if has_ring:
        other = stream.resume()
        assert other.restored == [b"state005"]
        assert names(other) == [b"c6"]
