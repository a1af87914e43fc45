"""A slot of a live stream: chunks in as there is room, results out, for every kind of stream.

Where the engine dies, the feed goes on in a slot of another engine: it puts the chunks of its ring in once more, and
drops as many results as were handed out before.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import final

from penstock.core.spec import Array
from penstock.serve.frontend.table_writer import Done, SlotHandle, TableWriter
from penstock.serve.streams.actions import PushChunk
from penstock.serve.streams.replay_ring import KeptChunk, ReplayRing
from penstock.serve.table.slots import (
    CHUNKS,
    ENGINE_LOST,
    FIRST,
    LAST,
    LOST_NO_MEMORY,
    LOST_OUTGROWN,
    LOST_REPEATED,
    LOW_PRIORITY,
    OK,
    ONE_ENGINE_LOST,
    REPLAYED,
    RESETS,
    RESTORES,
    RESULTS,
    SAVES,
    SOFT_DEADLINE,
)

# A stream is given up when so many engines died while they ran it, and none gave a result that the one before had not.
MAX_DEATHS = 3


@final
class SlotFeed:
    """A slot, and the queue of chunks that wait for room in its ring.

    Args:
        writer: Puts chunks in and takes results out.
        done: Called with each result as `penstock.serve.frontend.table_writer.SlotHandle` says; may call `leave`.
        drained: Called when the last waiting chunk has entered the ring.
        low_priority: Whether its chunks have low priority.
        ring: Keeps the chunks; None where the death of the engine ends the stream.
        lost: Called with the status when the engine has died, in the place of `done`; `lose` says what is next.

    Attributes:
        wanted: Chunks that the slot has ever had, with the one after which the state is wanted and has not come; None
            where none is wanted.

    Raises:
        Overloaded: No slot is free.
    """

    def __init__(
        self,
        writer: TableWriter,
        done: Done,
        *,
        drained: Callable[[], None] | None = None,
        low_priority: bool = False,
        ring: ReplayRing | None = None,
        lost: Callable[[int], None] | None = None,
    ) -> None:
        self._writer = writer
        self._counts = writer.counts
        self._report = done
        self._drained = drained
        self._low_priority = low_priority
        self._always = SOFT_DEADLINE | LOW_PRIORITY if low_priority else SOFT_DEADLINE
        self._flags = self._always | FIRST
        # Each with its arrival and its deadline.
        self._waiting: deque[tuple[PushChunk, int, int]] = deque()
        self._handle: SlotHandle | None = writer.open(self._done, low_priority=low_priority)
        self._ring, self._lost = ring, lost
        # Why there is no ring any more: a column of the counts.
        self._no_ring: int | None = None
        # Between the death of an engine and the last chunk that is replayed on another one.
        self._resuming = False
        self._replay: Iterator[KeptChunk] = iter(())
        self._next: KeptChunk | None = None
        # Of the ring: chunks that are in the slot now, that were in one before, and whose results were handed out; and
        # results that are still to be dropped.
        self._replayed = self._put_before = self._answered = self._to_drop = 0
        self._deaths, self._reported_at_death = 0, -1
        self._now_ns: Callable[[], int] = lambda: 0
        self._budget_ns = 0
        self.wanted: int | None = None

    @property
    def room(self) -> bool:
        """True if the ring has room for another chunk now."""
        return (
            self._handle is not None
            and not self._waiting
            and not self._resuming
            and self._writer.room(self._handle) > 0
        )

    @property
    def slot(self) -> int | None:
        """The slot; None after `leave`, while chunks wait for room in it, and while results are dropped."""
        if self._handle is None or self._waiting or self._resuming or self._to_drop:
            return None
        return self._handle.slot

    @property
    def waiting(self) -> int:
        """Number of chunks that wait for room and were never in a slot."""
        if self._resuming and self._ring is not None:
            return self._ring.chunks - max(self._replayed, self._put_before)
        return len(self._waiting)

    @property
    def resuming(self) -> bool:
        """True from the death of an engine until another one has all chunks."""
        return self._resuming

    def put(self, chunk: PushChunk, arrival_ns: int, deadline_ns: int) -> bool:
        """Put the next chunk in, or queue it until there is room; drop it after `leave`.

        Args:
            chunk: The chunk.
            arrival_ns: When it arrived.
            deadline_ns: When it must be answered; it is answered later too.

        Returns:
            False if it was queued.
        """
        if chunk.saves:
            self._forget_wanted()
        ring = self._ring
        if ring is not None:
            if not ring.append(chunk.samples, chunk.frames):
                self._drop_ring(ring)
            elif chunk.last:
                ring.ended = True
            elif chunk.resets:
                ring.reset()
            elif chunk.saves:
                ring.mark()
            if self._resuming:
                return False
        handle = self._handle
        if handle is None:
            return True
        if not self._waiting and self._put(handle, chunk, arrival_ns, deadline_ns):
            return True
        self._waiting.append((chunk, arrival_ns, deadline_ns))
        return False

    def restore(self, state: bytes) -> None:
        """Begin in a state that another server has saved, before the first chunk."""
        ring = self._ring
        if ring is not None and not ring.begin_from(state):
            self._drop_ring(ring)
        if self._handle is not None:
            self._writer.restore_state(self._handle, state)
            self._flags = self._always | RESTORES

    def take_state(self) -> bytes | None:
        """Take the state after the last chunk with `saves`, while a result is handed out; None if it has not come."""
        if self._handle is None or self.wanted is None:
            return None
        state = self._writer.saved_state(self._handle, self.wanted)
        if state is not None:
            self.wanted = None
            if self._ring is not None:
                self._ring.know(state)
        return state

    def leave(self) -> None:
        """End the stream: nothing more comes, and the slot is free once the engine has released it."""
        handle, self._handle = self._handle, None
        self._resuming, self._next = False, None
        self._waiting.clear()
        if self._ring is not None:
            self._ring.drop()
            self._ring = None
        if handle is not None:
            self._writer.cancel(handle)

    def keep(self, samples: "bytes | memoryview", frames: int) -> None:
        """Keep a chunk that was put into the slot elsewhere."""
        if self._ring is not None and not self._ring.append(samples, frames):
            self._drop_ring(self._ring)

    def count_results(self, results: int) -> None:
        """Count results that were handed out elsewhere."""
        if self._ring is not None:
            self._ring.reported += results

    def lose(self) -> int | None:
        """Give up the slot, after its engine has died.

        Returns:
            None if `resume` can go on with the stream; otherwise why not: the column of the counts, or -1 where nothing
            is kept.
        """
        self._handle = self.wanted = None
        ring = self._ring
        if ring is None:
            return -1 if self._no_ring is None else self._no_ring
        if self._resuming:
            self._put_before = max(self._put_before, self._replayed)
        else:
            self._put_before = ring.chunks - len(self._waiting)
        if self._put_before > ring.reported:
            # Its chunks were being run, or waited for it: one of them may be what ended the engine.
            none_since = ring.total_reported == self._reported_at_death
            self._deaths = self._deaths + 1 if none_since else 1
            self._reported_at_death = ring.total_reported
        self._waiting.clear()
        self._resuming, self._next = True, None
        ring.hold()
        return LOST_REPEATED if self._deaths >= MAX_DEATHS else None

    def resume(self, writer: TableWriter, now_ns: Callable[[], int], budget_ns: int) -> None:
        """Go on in a slot of another engine, after `lose`.

        Args:
            writer: The writer of its table, with a free slot.
            now_ns: The clock of deadlines.
            budget_ns: Latency budget of each chunk, from when it is put in.
        """
        ring = self._ring
        assert ring is not None
        assert self._handle is None
        self._writer, self._counts = writer, writer.counts
        self._now_ns, self._budget_ns = now_ns, budget_ns
        self._handle = writer.open(self._done, low_priority=self._low_priority)
        self._flags = self._always | FIRST
        before = ring.chunks
        self._replay = ring.begin()
        if (state := ring.state) is not None:
            if len(state) != writer.state_bytes:
                # An engine of another precision.
                self._drop_ring(ring)
                return
            writer.restore_state(self._handle, state)
            self._flags = self._always | RESTORES
        # What lies before the last clear state was dropped.
        self._put_before -= before - ring.chunks
        self._replayed, self._answered = 0, ring.reported
        self._to_drop = self._answered
        self._next = next(self._replay, None)
        self._pump()

    def _forget_wanted(self) -> None:
        """Want no state of an earlier chunk: the ring's mark, and what the session knows, are of the new one."""
        self.wanted = None
        for earlier, _, _ in self._waiting:
            earlier.saves = False

    def _put(self, handle: SlotHandle, chunk: PushChunk, arrival_ns: int, deadline_ns: int) -> bool:
        flags = self._flags
        if chunk.last or chunk.resets or chunk.saves:
            flags |= LAST * chunk.last | RESETS * chunk.resets | SAVES * chunk.saves
        if not self._writer.push(handle, chunk.samples, deadline_ns, arrival_ns, flags, chunk.frames):
            return False
        self._flags = self._always | FIRST if chunk.resets else self._always
        if chunk.saves:
            self.wanted = self._writer.submitted(handle)
        self._counts[CHUNKS] += 1
        return True

    def _drop_ring(self, ring: ReplayRing) -> None:
        self._no_ring = LOST_NO_MEMORY if ring.full_memory else LOST_OUTGROWN
        ring.drop()
        self._ring = None
        if self._resuming:
            # What was not replayed yet is gone.
            self._resuming = False
            handle, self._handle = self._handle, None
            if handle is not None:
                self._writer.cancel(handle)
            if self._lost is not None:
                self._lost(ONE_ENGINE_LOST)

    def _pump(self) -> None:
        """Put in chunks of the ring, as many as there is room for."""
        handle, ring = self._handle, self._ring
        while (chunk := self._next) is not None:
            assert handle is not None
            assert ring is not None
            now_ns = self._now_ns()
            # Its result was handed out: it is run when there is nothing else to do.
            flags = self._flags | LOW_PRIORITY if self._replayed < self._answered else self._flags
            flags |= LAST * chunk.last | RESETS * chunk.resets
            pushed = self._writer.push(handle, chunk.samples, now_ns + self._budget_ns, now_ns, flags, chunk.frames)
            if not pushed:
                return
            self._flags = self._always | FIRST * chunk.resets
            self._counts[REPLAYED if self._replayed < self._put_before else CHUNKS] += 1
            self._replayed += 1
            self._next = next(self._replay, None)
        self._resuming = False
        if ring is not None:
            ring.release()
        if self._drained is not None:
            self._drained()

    def _done(self, status: int, output: Array, last: bool) -> None:
        ring = self._ring
        if status == OK and not self._to_drop:
            self._counts[RESULTS] += 1
            if ring is not None:
                ring.reported += 1
            self._report(status, output, last)
        elif status == OK:
            self._to_drop -= 1
        elif self._lost is not None and status in (ENGINE_LOST, ONE_ENGINE_LOST):
            self._lost(status)
            return
        else:
            self._report(status, output, last)
        if self._resuming:
            self._pump()
        elif self._waiting:
            self._refill()

    def _refill(self) -> None:
        waiting = self._waiting
        while waiting and self._handle is not None:
            if not self._put(self._handle, *waiting[0]):
                return
            waiting.popleft()
        if self._drained is not None:
            self._drained()
