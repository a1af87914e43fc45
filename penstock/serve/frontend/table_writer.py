"""The front-end's side of the slot table: chunks in, results out.

It owns a range of slots and their free list. A request whose predicted finish is past its deadline is rejected at once,
so that admitted requests keep their budget.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np

from penstock.core.errors import DeadlineImpossible, Overloaded
from penstock.core.spec import Array
from penstock.serve.frontend.finish_prediction import FinishPrediction, scalars
from penstock.serve.frontend.rejections import Rejections
from penstock.serve.frontend.row_groups import RowGroups
from penstock.serve.table.lengths import MAX_LENGTHS, LengthGrid
from penstock.serve.table.slots import (
    CANCELLED_NS,
    EXPIRED,
    FIRST,
    LAST,
    LOW_PRIORITY,
    OFFERED,
    REFUSED,
    SOFT_DEADLINE,
    SlotTable,
)

Done = Callable[[int, Array, bool], None]

NEVER_NS = 1 << 62
# Flags of a stream of one chunk, by whether it has low priority.
_ONLY, _ONLY_LOW = FIRST | LAST, FIRST | LAST | LOW_PRIORITY

# In place of the length of a chunk: that of a whole one.
WHOLE = -1

# What a handle's row went through.
PARTLY_ANSWERED = 1  # a result was handed out, and more follow
RETRIED_ROW = 2  # its engine died, and it was submitted to another one
SUSPECT = 4  # its engine died while it ran this row

# A request is answered without its engine so long after its deadline, and after so many budgets at least.
OVERDUE_NS, OVERDUE_BUDGETS = 2_000_000_000, 4


@dataclass(slots=True)
class SlotHandle:
    """A slot that a stream or request holds.

    Args:
        writer: The writer that owns the slot.
        slot: Index of the slot.
        done: Called with each result: its status, its valid output as a flat view that is valid only during the call,
            and whether it is the last. None once the client is gone.
        ended: Whether its last chunk has been put in.
        low_priority: Whether it runs after the others.
        length: Length of its row, see `LengthGrid`; 0 where the size is fixed.
        history: What it went through: `PARTLY_ANSWERED`, `RETRIED_ROW`, `SUSPECT`.
    """

    writer: "TableWriter"
    slot: int
    done: Done | None
    ended: bool = False
    low_priority: bool = False
    length: int = 0
    history: int = 0

    def cancel(self) -> None:
        """Cancel its row in the table where it lies now, see `TableWriter.cancel`."""
        self.writer.cancel(self)


@final
class TableWriter:
    """Puts chunks into the table and collects results.

    Args:
        table: The slots; this front-end is the only writer of its own rows of the front-end columns.
        budget_ns: Latency budget of a request that names none.
        wake: Called when there is new work for the engine.
        index: Index of this front-end in the table. Slots of an earlier process with the same index are taken over:
            their chunks are cancelled, and they are free once the engine has let go of them.
        margin_ns: Added to predicted finishes, for the requests that are read or run in between.

    Attributes:
        table: The slots.
        shortest_length: The shortest length of a row; 0 where the size is fixed.
        shortest_lengths: The shortest length of each bucket; 0 where the size is fixed.
    """

    def __init__(
        self, table: SlotTable, *, budget_ns: int, wake: Callable[[], None], index: int = 0, margin_ns: int = 0
    ) -> None:
        layout = table.layout
        self.table = table
        self._budget_ns = budget_ns
        self._wake = wake
        self._chunks, self._results = table.chunks, table.results
        # An answer that takes steps has room for all its results.
        self._may_fill = table.results == table.chunks
        self._index = index
        self._first, self._each = index * layout.slots_each, layout.slots_each
        self._free: list[int] = []
        # Where released slots go. After a take-over it is another list than the free one until no result for the
        # earlier process is being published: its entry of the ring would be read as one of the slot's next stream.
        self._released: list[int] = []
        self._handles: list[SlotHandle | None] = [None] * table.slots
        self._input_bytes = memoryview(cast(Any, table.input.reshape(-1).view(np.uint8)))
        self._input_nbytes = layout.input.nbytes
        self._output = table.output.reshape(table.slots * self._results, -1)
        # Of requests, whose outputs are nearly all of one size: a view is made once for each slot.
        self._views: list[Array | None] = [None] * (table.slots if self._results == 1 else 0)
        self._numbers = self._output.shape[1] if self._views else -1
        self._submitted, self._taken = scalars(table.submitted), scalars(table.taken)
        self._consumed, self._produced = scalars(table.consumed), scalars(table.produced)
        self._busy, self._generation = scalars(table.busy), scalars(table.generation)
        self._length, self._flags = scalars(table.length), scalars(table.flags)
        self._deadline_ns, self._arrival_ns = scalars(table.deadline_ns), scalars(table.arrival_ns)
        self._status, self._output_length = scalars(table.status), scalars(table.output_length)
        self._queue_ns, self._compute_ns = scalars(table.queue_ns), scalars(table.compute_ns)
        self._done, self._done_count = scalars(table.done[index]), scalars(table.done_count[index : index + 1])
        self._state_bytes = layout.state_bytes
        self._saved = scalars(table.saved)
        self._state, self._restored = (column.view(np.uint8) for column in (table.state, table.restored))
        self._held = scalars(table.held[index])
        self._only_frontend = len(table.held) == 1
        self.counts = scalars(table.counts[index])
        self._read = self._done_count[0]
        # Slots of streams that are moved many at a time; and slots whose results are listed and not handed out.
        self.groups = RowGroups(table, wake)
        self._left: deque[int] = deque()
        self._at_end: list[Callable[[], None]] | None = None  # while results are handed out
        self._rejections = Rejections(budget_ns)
        self._whole_chunk = layout.input.shape[0] if layout.input.shape else 1
        self._grid = LengthGrid.of(layout.input)
        self._held_lengths = scalars(table.held_lengths[index])
        prediction = FinishPrediction(table, self._grid, budget_ns=budget_ns, margin_ns=margin_ns)
        self._prediction = prediction
        self._take_over()
        self.collect()
        self.shortest_length, self.shortest_lengths = prediction.shortest_length, prediction.shortest_lengths

    @property
    def refusing(self) -> bool:
        """True if a request was rejected since the last result, so that a rejection may be cached."""
        return self._rejections.standing

    @property
    def in_use(self) -> int:
        """Number of this front-end's slots that are held."""
        return self._each - len(self._free)

    @property
    def next_slot(self) -> int | None:
        """Slot of the next request; None if none is free."""
        return self._free[-1] if self._free else None

    def cached_rejection(self, now_ns: int, left_ns: int = 0) -> Overloaded | None:
        """Return the last rejection if it holds for a request with this much time left; None otherwise."""
        return self._rejections.cached(now_ns, left_ns)

    def length_of(self, chunk: Array | bytes) -> int:
        """Return the length of a record, see `LengthGrid`; 0 where the size is fixed."""
        if self._grid is None:
            return 0
        return self._grid.length_of(chunk)

    def predict(self, rows: int, budget_ns: int, low_priority: bool, length: int = 0) -> tuple[int, int]:
        """Predict the finish of a request.

        Args:
            rows: Its rows.
            budget_ns: Its latency budget.
            low_priority: Whether it runs after the others.
            length: Length of its longest row, where lengths vary.

        Returns:
            Nanoseconds from now to the result of its last row, `NEVER_NS` if it cannot be admitted at all; and the
            number of rows that finish before that.
        """
        prediction = self._prediction
        rows_ahead = self._rows_ahead(low_priority) + rows - 1
        if len(self._free) < rows or budget_ns < prediction.min_compute_ns(length) or prediction.stalled:
            return NEVER_NS, rows_ahead
        return prediction.finish_ns(rows_ahead, length, low_priority, rows), rows_ahead

    def submit(
        self,
        chunk: Array | bytes,
        *,
        done: Done,
        arrival_ns: int,
        budget_ns: int | None = None,
        now_ns: int | None = None,
        low_priority: bool = False,
        whole_request: bool = True,
    ) -> SlotHandle:
        """Submit a request: a stream of one chunk.

        Args:
            chunk: A raw input chunk, or its bytes.
            done: Called with the result, see `SlotHandle`.
            arrival_ns: Its arrival time, on the engine's clock.
            budget_ns: Its latency budget; None for the server's.
            now_ns: The current time, if part of the budget is spent; the arrival time by default.
            low_priority: Whether it runs after the others.
            whole_request: Whether it is a whole request, not a row of a larger one.

        Raises:
            Overloaded: Its predicted finish is past its deadline, or no slot is free.
            DeadlineImpossible: Its budget is shorter than the network's own time.
        """
        if budget_ns is None:
            budget_ns = self._budget_ns
        self.counts[OFFERED] += 1
        deadline_ns, now_ns = arrival_ns + budget_ns, now_ns or arrival_ns
        left_ns = deadline_ns - now_ns
        length = 0 if self._grid is None else self.length_of(chunk)
        prediction = self._prediction
        rows_ahead = self._rows_ahead(low_priority)
        error = None
        if rows_ahead >= prediction.sure_rows or left_ns < prediction.sure_ns:
            error = prediction.rejection(rows_ahead, left_ns, budget_ns, length, low_priority)
        if error is None and not self._free:
            error = self._all_in_use()
        if error is not None:
            if isinstance(error, Overloaded) and whole_request and budget_ns == self._budget_ns and not low_priority:
                # A copy: the raised error keeps the request alive through its traceback.
                self._remember(Overloaded(str(error), error.retry_after_s), now_ns)
            try:
                raise error
            finally:
                del error  # the traceback holds this frame: a cycle
        handle = self.open(done, low_priority=low_priority)
        handle.ended = True
        flags = _ONLY_LOW if low_priority else _ONLY
        if length:
            self._hold_length(handle, length)
        self._put(handle.slot, chunk, deadline_ns, arrival_ns, flags, length or self._whole_chunk)
        return handle

    def try_submit(
        self, chunk: Array | bytes, done: Done, arrival_ns: int, now_ns: int, budget_ns: int, low_priority: bool
    ) -> SlotHandle | Overloaded | DeadlineImpossible | None:
        """Submit a whole request, as `submit` does, without raising.

        Args:
            chunk: A raw input chunk, or its bytes.
            done: Called with the result, see `SlotHandle`.
            arrival_ns: Its arrival time, on the engine's clock.
            now_ns: The current time.
            budget_ns: Its latency budget.
            low_priority: Whether it runs after the others.

        Returns:
            Its slot; or why it is rejected, which is counted; or None, without a trace, if `submit` must decide.
        """
        prediction, free = self._prediction, self._free
        deadline_ns = arrival_ns + budget_ns
        left_ns = deadline_ns - now_ns
        rows_ahead = self._rows_ahead(low_priority)
        if rows_ahead >= prediction.sure_rows or left_ns < prediction.sure_ns or not free:
            if self._grid is not None:
                return None
            error = prediction.rejection(rows_ahead, left_ns, budget_ns, 0, low_priority)
            if error is None and not free:
                error = self._all_in_use()
            if error is not None:
                if isinstance(error, Overloaded) and budget_ns == self._budget_ns and not low_priority:
                    self._remember(error, now_ns)
                self._count_rejection()
                return error
        self.counts[OFFERED] += 1
        slot = free.pop()
        self._generation[slot] += 1
        self._held[low_priority] += 1
        handle = self._handles[slot] = SlotHandle(self, slot, done, True, low_priority)
        flags = _ONLY_LOW if low_priority else _ONLY
        self._put(slot, chunk, deadline_ns, arrival_ns, flags, self._whole_chunk)
        return handle

    def reject(self, now_ns: int, left_ns: int) -> Overloaded | None:
        """Reject a request of the default budget for the last rejection, and count it, if that holds."""
        error = self.cached_rejection(now_ns, left_ns)
        if error is not None:
            self._count_rejection()
        return error

    def _rows_ahead(self, low_priority: bool) -> int:
        # As `FinishPrediction.rows_ahead`, inlined for the only front-end: this runs once for every request.
        if self._only_frontend and not low_priority:
            return self._held[0]
        return self._prediction.rows_ahead(low_priority)

    def _count_rejection(self) -> None:
        self.counts[OFFERED] += 1
        self.counts[REFUSED] += 1

    def _remember(self, rejection: Overloaded, now_ns: int) -> None:
        # Where lengths vary, the first that can be admitted is of any bucket: short rows may wait for long ones to run
        # apart.
        least_finish_ns = self._prediction.least_finish_ns() if self._free else NEVER_NS
        self._rejections.remember(rejection, least_finish_ns, now_ns)

    def _all_in_use(self) -> Overloaded:
        return Overloaded(f"All {self._each:,} slots are in use; come back later.", self._prediction.retry_after_s())

    def open(self, done: Done, *, low_priority: bool = False) -> SlotHandle:
        """Take a free slot for a stream.

        Raises:
            Overloaded: No slot is free.
        """
        if not self._free:
            raise self._all_in_use()
        slot = self._free.pop()
        self._generation[slot] += 1
        self._held[low_priority] += 1
        handle = self._handles[slot] = SlotHandle(self, slot, done, False, low_priority)
        return handle

    def room(self, handle: SlotHandle) -> int:
        """Number of chunks that a stream can put in now."""
        slot = handle.slot
        # The engine writes `busy` before `consumed`; read in the other order, a busy row never seems done.
        ahead = self._submitted[slot] - self._consumed[slot]
        return self._chunks - ahead - self._busy[slot]

    def push(
        self,
        handle: SlotHandle,
        chunk: Array | bytes | memoryview,
        deadline_ns: int,
        arrival_ns: int,
        flags: int = SOFT_DEADLINE,
        length: int = WHOLE,
    ) -> bool:
        """Put in the stream's next chunk if its ring has room.

        Args:
            handle: The stream's slot.
            chunk: A raw input chunk, or its bytes; a shorter chunk may have fewer.
            deadline_ns: Its deadline.
            arrival_ns: Its arrival time.
            flags: Flags of the slot table.
            length: Valid length of the chunk along its first dimension; the whole chunk by default.

        Returns:
            Whether there was room.
        """
        assert not handle.ended, handle
        slot = handle.slot
        # As in `room`, inlined: this runs once for every chunk of every stream.
        if self._submitted[slot] - self._consumed[slot] + self._busy[slot] >= self._chunks:
            return False
        handle.ended = flags & LAST != 0
        self._put(slot, chunk, deadline_ns, arrival_ns, flags, self._whole_chunk if length == WHOLE else length)
        return True

    @property
    def state_bytes(self) -> int:
        """Bytes of a stream's state; 0 where states cannot be read and restored."""
        return self._state_bytes

    def submitted(self, handle: SlotHandle) -> int:
        """Number of chunks that were ever put into a slot, by which `saved_state` names the last one."""
        return self._submitted[handle.slot]

    def saved_state(self, handle: SlotHandle, number: int) -> bytes | None:
        """Copy a stream's state as it was after a chunk with `SAVES`, during the call that hands a result out.

        Args:
            handle: The stream's slot.
            number: `submitted` after the chunk was put in.

        Returns:
            None if it has not come, or the chunk's own result was not handed out.
        """
        slot = handle.slot
        if self._saved[slot] != number or self._taken[slot] + 1 < number:
            return None
        return self._state[slot, : self._state_bytes].tobytes()

    def restore_state(self, handle: SlotHandle, state: bytes) -> None:
        """Let a stream go on from a state; its first chunk has the flag `RESTORES`, and not `FIRST`."""
        assert len(state) == self._state_bytes, (len(state), self._state_bytes)
        self._restored[handle.slot, : self._state_bytes] = np.frombuffer(state, np.uint8)

    def cancel(self, handle: SlotHandle) -> None:
        """Cancel the chunks that have not started, and drop all further results."""
        if self._handles[handle.slot] is not handle:
            return
        handle.done = None
        handle.ended = True
        self._cancel_deadlines(handle.slot)
        if self._is_last(handle, self._taken[handle.slot]):
            self._release(handle)
        self._wake()

    def times_ns(self, handle: SlotHandle) -> tuple[int, int]:
        """Return the queue time of a result and the time of its batch, during the call that hands it out."""
        entry = handle.slot * self._results + self._taken[handle.slot] % self._results
        return self._queue_ns[entry], self._compute_ns[entry]

    def fail(self, status: int) -> None:
        """Give every stream a last result with this status, after the engine is lost."""
        for handle in self.abandon():
            self.fail_one(handle, status)

    def expire_overdue(self, now_ns: int) -> int:
        """Answer requests long past their deadline for an engine that does not, as one that hangs.

        Others are refused from then on, until a result comes. Live streams wait: their chunks are run late, and go on
        in another engine once theirs has been ended.

        Returns:
            The number of requests.
        """
        if self._chunks > 1 or not (self._held[0] or self._held[1]):
            return 0
        until_ns = now_ns - max(OVERDUE_NS, OVERDUE_BUDGETS * self._budget_ns)
        overdue = [handle for handle in self._handles if handle is not None and self._is_overdue(handle, until_ns)]
        if overdue:
            self._prediction.set_stalled(True)
        for handle in overdue:
            done = handle.done
            # It holds its slot until the engine has let go of it.
            self.cancel(handle)
            if done is not None:
                done(EXPIRED, self._output[0, :0], True)
        return len(overdue)

    def _is_overdue(self, handle: SlotHandle, until_ns: int) -> bool:
        slot = handle.slot
        waits = handle.done is not None and handle.ended and not handle.history & PARTLY_ANSWERED
        return (
            waits
            and CANCELLED_NS < self._deadline_ns[slot] < until_ns
            and not self._flags[slot] & SOFT_DEADLINE
            # A result that is there is handed out.
            and self._produced[slot] == self._taken[slot]
        )

    def abandon(self) -> list[SlotHandle]:
        """Give up all slots, after the engine is lost; returns those whose clients wait."""
        waiting = [handle for handle in self._handles if handle is not None and handle.done is not None]
        self._handles = [None] * self.table.slots
        return waiting

    def fail_one(self, handle: SlotHandle, status: int) -> None:
        """Give an abandoned slot's client a last result with this status."""
        if handle.done is not None:
            handle.done(status, self._output[0, :0], True)

    def resubmit(self, handle: SlotHandle, chunk: bytes, *, deadline_ns: int, arrival_ns: int, length: int) -> None:
        """Put in the row of an abandoned slot of another table; its handle is that of a slot here from now on.

        It is not admitted again: a slot must be free, and it is not counted as another request.

        Args:
            handle: The abandoned slot.
            chunk: The bytes of its input.
            deadline_ns: Its deadline.
            arrival_ns: Its arrival time.
            length: Valid length of the input, as the other table has it.
        """
        slot = self._free.pop()
        self._generation[slot] += 1
        self._held[handle.low_priority] += 1
        handle.writer, handle.slot = self, slot
        self._handles[slot] = handle
        if handle.length:
            self._count_length(handle, 1)
        self._put(slot, chunk, deadline_ns, arrival_ns, _ONLY_LOW if handle.low_priority else _ONLY, length)

    def at_end(self, call: Callable[[], None]) -> None:
        """Call a function when the results that are being handed out have been; at once if none are."""
        if self._at_end is None:
            call()
        else:
            self._at_end.append(call)

    @property
    def has_results(self) -> bool:
        """True if results wait to be handed out."""
        return self._read != self._done_count[0]

    def collect(self) -> int:
        """Hand each finished result to its stream.

        Returns:
            The number of results.
        """
        if self._read == self._done_count[0] and not self._left:
            self._rejections.standing = False
            if self._released is not self._free:
                self._settle(self._read)
            return 0
        self._at_end = []
        try:
            return self._hand_out()
        finally:
            calls, self._at_end = self._at_end, None
            for call in calls:
                call()

    def _hand_out(self) -> int:
        first, until = self._read, self._done_count[0]
        self._rejections.standing = False
        self._prediction.set_stalled(False)
        if self.groups.in_use or self._left:
            return self._hand_out_groups(first, until)
        done, capacity, handles, produced = self._done, len(self._done), self._handles, self._produced
        for index in range(first, until):
            # Written before the callback: one that raises loses its own result, not those after it.
            self._read = index + 1
            slot = done[index % capacity]
            handle, taken = handles[slot], self._taken[slot]
            # A front-end that had this index before may have left entries in the ring.
            if handle is None:
                continue
            if produced[slot] != taken:
                self._take(handle, taken)
            elif self._is_last(handle, taken):
                # The engine was publishing this result, which is dropped, while the slot was taken over.
                self._release(handle)
        if self._released is not self._free:
            self._settle(until)
        return until - first

    def _hand_out_groups(self, first: int, until: int) -> int:
        left, listed = self._left, self.table.done[self._index]
        self._read = until
        while left:
            self._hand_one(left.popleft())
        left.extend(self.groups.hand_out(listed[np.arange(first, until) % listed.size]))
        while left:
            # One that raises loses its own result, not those after it.
            self._hand_one(left.popleft())
        if self._released is not self._free:
            self._settle(until)
        return until - first

    def _hand_one(self, slot: int) -> None:
        handle, taken = self._handles[slot], self._taken[slot]
        if handle is None:
            return
        if self._produced[slot] != taken:
            self._take(handle, taken)
        elif self._is_last(handle, taken):
            self._release(handle)

    def refresh(self, reading_share: float = 0.0, now_ns: int = 0) -> None:
        """Read the costs that the engine published, see `FinishPrediction.refresh`."""
        self._prediction.refresh(reading_share, overloaded=self._rejections.sustained(now_ns))

    def _put(
        self,
        slot: int,
        chunk: Array | bytes | memoryview,
        deadline_ns: int,
        arrival_ns: int,
        flags: int,
        length: int,
    ) -> None:
        submitted = self._submitted[slot]
        entry = slot * self._chunks + submitted % self._chunks
        begin = entry * self._input_nbytes
        # A record taken from an array of records is no array.
        raw = chunk if isinstance(chunk, bytes | memoryview) else chunk.tobytes()
        assert length < self._whole_chunk or len(raw) == self._input_nbytes, (length, len(raw))
        self._input_bytes[begin : begin + len(raw)] = raw
        self._length[entry] = length
        self._deadline_ns[entry] = deadline_ns
        self._arrival_ns[entry] = arrival_ns
        self._flags[entry] = flags
        self._submitted[slot] = submitted + 1
        self._wake()

    def _take_over(self) -> None:
        self._held[0] = self._held[1] = 0
        self.table.held_lengths[self._index] = 0
        for slot in range(self._first + self._each - 1, self._first - 1, -1):
            idle = self._submitted[slot] == self._consumed[slot] and not self._busy[slot]
            # The earlier process is gone, so its results are dropped.
            self._taken[slot] = self._produced[slot]
            if idle:
                self._released.append(slot)
            else:
                self._handles[slot] = SlotHandle(self, slot, None, True)
                self._held[0] += 1
                self._cancel_deadlines(slot)
                # Its row may have waited for room for its result, which there is now.
                self._wake()

    def _settle(self, listed: int) -> None:
        """Free the slots after a take-over, once every result was listed in the ring and read there."""
        # `listed` was read first: were a result not listed then, the sum would be larger.
        if sum(self._produced[self._first : self._first + self._each]) == listed:
            self._free.extend(self._released)
            self._released = self._free

    def _cancel_deadlines(self, slot: int) -> None:
        for entry in range(slot * self._chunks, (slot + 1) * self._chunks):
            self._deadline_ns[entry] = CANCELLED_NS

    def _take(self, handle: SlotHandle, taken: int) -> None:
        slot = handle.slot
        entry = slot * self._results + taken % self._results
        last = handle.ended and self._is_last(handle, taken + 1)
        if handle.done is not None:
            handle.done(self._status[entry], self._output_of(entry), last)
        self._taken[slot] = taken + 1
        # The callback may have cancelled the stream.
        if last or (handle.ended and self._is_last(handle, taken + 1)):
            self._release(handle)
            return
        if handle.ended:
            handle.history |= PARTLY_ANSWERED
        if self._may_fill and self._produced[slot] - taken >= self._results:
            # The engine left this row out, and may rest.
            self._wake()

    def _output_of(self, entry: int) -> Array:
        length = self._output_length[entry]
        if length != self._numbers:
            return self._output[entry, :length]
        view = self._views[entry]
        if view is None:
            view = self._views[entry] = self._output[entry]
        return view

    def _is_last(self, handle: SlotHandle, taken: int) -> bool:
        slot = handle.slot
        # Read against the order of the engine's writes: once all is consumed, all results are visible.
        return (
            handle.ended
            and self._submitted[slot] == self._consumed[slot]
            and not self._busy[slot]
            and self._produced[slot] == taken
        )

    def _release(self, handle: SlotHandle) -> None:
        self._handles[handle.slot] = None
        self._held[handle.low_priority] -= 1
        if handle.length:
            self._count_length(handle, -1)
        self._released.append(handle.slot)

    def _hold_length(self, handle: SlotHandle, length: int) -> None:
        handle.length = length
        self._count_length(handle, 1)

    def _count_length(self, handle: SlotHandle, rows: int) -> None:
        assert self._grid is not None
        at = 2 * MAX_LENGTHS * handle.low_priority + self._grid.bucket(handle.length)
        self._held_lengths[at] += rows
        self._held_lengths[at + MAX_LENGTHS] += rows * handle.length
