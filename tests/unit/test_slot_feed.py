"""The chunks and states of one stream's slot, with a table that the test plays: what another engine goes on with."""

import numpy as np
import pytest

from penstock.core.spec import Array, TensorSpec
from penstock.serve.exchange.request_bounds import RequestBounds
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.streams.actions import PushChunk
from penstock.serve.streams.replay_ring import ReplayMemory, ReplayRing
from penstock.serve.streams.slot_feed import SlotFeed
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import ENGINE_LOST, RESTORES, SAVES, SlotTable, TableLayout

ROOM = 2
SAMPLE = TensorSpec(dtype="int16", shape=(1,), meaning="a sample")


class Engine:
    """A slot with room for two chunks, and its engine, which saves the states that are wanted as it gives results."""

    def __init__(self) -> None:
        layout = TableLayout(slots=1, chunks=ROOM, input=SAMPLE, output=SAMPLE, state_bytes=8)
        self.table = SlotTable.private(layout)
        Costs([1], [1.0]).publish(self.table)
        self.writer = TableWriter(self.table, budget_ns=0, wake=lambda: None)

    @property
    def pushed(self) -> list[bytes]:
        """The chunks of the slot that are not answered."""
        table = self.table
        return [table.input[0, at % ROOM].tobytes() for at in range(int(table.consumed[0]), int(table.submitted[0]))]

    @property
    def restored(self) -> bytes | None:
        """The state in which the stream begins."""
        return self.table.restored.tobytes() if self.table.flags[0, 0] & RESTORES else None

    def answer(self) -> None:
        table = self.table
        entry = int(table.consumed[0]) % ROOM
        table.consumed[0] += 1
        if table.flags[0, entry] & SAVES:
            table.state[0] = np.frombuffer(b"state%03d" % table.consumed[0], np.int64)
            table.saved[0] = table.consumed[0]
        table.produced[0] += 1
        table.done[0, table.done_count[0] % ROOM] = 0
        table.done_count[0] += 1
        assert self.writer.collect() == 1


class Stream:
    """A stream that takes its state with each result, as its session does."""

    def __init__(self, *, has_ring: bool) -> None:
        ring = ReplayRing(ReplayMemory(RequestBounds()), frame_bytes=2, block_bytes=100, max_blocks=9)
        self.engine = Engine()
        self.states: list[bytes] = []
        self.feed = SlotFeed(self.engine.writer, self._on_result, ring=ring if has_ring else None, lost=lambda _: None)

    def put(self, name: bytes, *, saves: bool = False) -> None:
        self.feed.put(PushChunk(name, 1, last=False, saves=saves), 0, 0)

    def resume(self) -> Engine:
        """Lose the engine, and go on in another one."""
        assert self.feed.lose() is None, ENGINE_LOST
        self.engine = Engine()
        self.feed.resume(self.engine.writer, lambda: 0, 0)
        return self.engine

    def _on_result(self, status: int, output: Array, last: bool) -> None:
        if self.feed.wanted is not None and (state := self.feed.take_state()) is not None:
            self.states.append(state)


def test_the_state_of_one_chunk_is_not_kept_as_that_of_a_later_one_that_waits() -> None:
    stream = Stream(has_ring=True)
    stream.put(b"c1", saves=True)
    stream.put(b"c2")
    stream.put(b"c3", saves=True)
    for _ in range(3):
        stream.engine.answer()
    stream.put(b"c4")
    other = stream.resume()
    assert other.restored == b"state003"
    assert other.pushed == [b"c4"]


@pytest.mark.parametrize("has_ring", [True, False])
def test_of_chunks_that_wait_the_state_after_the_last_one_is_wanted(has_ring: bool) -> None:
    stream = Stream(has_ring=has_ring)
    for number in range(1, 7):
        stream.put(b"c%d" % number, saves=number in (1, 3, 5))
    for _ in range(4):
        stream.engine.answer()
    assert stream.states == []
    stream.engine.answer()
    assert stream.states == [b"state005"]
    if has_ring:
        other = stream.resume()
        assert other.restored == b"state005"
        assert other.pushed == [b"c6"]
