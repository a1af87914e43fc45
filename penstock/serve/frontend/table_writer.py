"""The front-end's side of the slot table: chunks in, results out.

It owns a range of slots and their free list. Admission control uses the measured costs in the table's header: a request
whose predicted finish is past its deadline is rejected at once, so that admitted requests keep their budget.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import DeadlineImpossible, Overloaded
from penstock.core.spec import Array
from penstock.serve.table.costs import Costs
from penstock.serve.table.generation_costs import GenerationCosts
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import MAX_LENGTHS, LengthGrid
from penstock.serve.table.slots import CANCELLED_NS, FIRST, LAST, LOW_PRIORITY, OFFERED, SOFT_DEADLINE, SlotTable

Done = Callable[[int, Array, bool], None]

# A rejection is reused for this long for equal requests, unless a result comes before.
REJECTION_NS = 1_000_000
NEVER_NS = 1 << 62
# A request that needs at most this share of its budget is admitted without an exact prediction.
SURE_SHARE = 0.5
# Flags of a stream of one chunk.
_ONLY = FIRST | LAST


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
    """

    writer: "TableWriter"
    slot: int
    done: Done | None
    ended: bool = False
    low_priority: bool = False
    length: int = 0


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
        refusing: Whether a request was rejected since the last result, so that a rejection may be cached.
        shortest_length: The shortest length of a row; 0 where the size is fixed.
        shortest_lengths: The shortest length of each bucket; 0 where the size is fixed.
    """

    def __init__(
        self, table: SlotTable, *, budget_ns: int, wake: Callable[[], None], index: int = 0, margin_ns: int = 0
    ) -> None:
        layout = table.layout
        self._table = table
        self._budget_ns = budget_ns
        self._sure_ns = int(budget_ns * SURE_SHARE)
        self._wake = wake
        self._margin_ns = margin_ns
        self._chunks, self._results = table.chunks, table.results
        self._index = index
        self._first, self._each = index * layout.slots_each, layout.slots_each
        self._free: list[int] = []
        self._handles: list[SlotHandle | None] = [None] * table.slots
        self._input_bytes = memoryview(cast(Any, table.input.reshape(-1).view(np.uint8)))
        self._input_nbytes = layout.input.nbytes
        self._output = table.output.reshape(table.slots * self._results, -1)
        self._submitted, self._taken = _scalars(table.submitted), _scalars(table.taken)
        self._consumed, self._produced = _scalars(table.consumed), _scalars(table.produced)
        self._busy, self._generation = _scalars(table.busy), _scalars(table.generation)
        self._length, self._flags = _scalars(table.length), _scalars(table.flags)
        self._deadline_ns, self._arrival_ns = _scalars(table.deadline_ns), _scalars(table.arrival_ns)
        self._status, self._output_length = _scalars(table.status), _scalars(table.output_length)
        self._min_compute_ns, self._other_tables_ns = _scalars(table.min_compute_ns), _scalars(table.other_tables_ns)
        self._other_tables_share = _scalars(table.other_tables_share)
        self._done, self._done_count = _scalars(table.done[index]), _scalars(table.done_count[index : index + 1])
        self._held, self._everybody_held = _scalars(table.held[index]), [_scalars(row) for row in table.held]
        self._only_frontend = len(self._everybody_held) == 1
        self.counts = _scalars(table.counts[index])
        self._read = self._done_count[0]
        self._rejection: Overloaded | None = None
        self.refusing = False
        self._rejected_until_ns = self._rejected_ns = 0
        self._whole_chunk = layout.input.shape[0] if layout.input.shape else 1
        self._grid = LengthGrid.of(layout.input)
        self.shortest_length = 0 if self._grid is None else 1
        self.shortest_lengths = (0,) if self._grid is None else self._grid.shortest
        self._held_lengths = _scalars(table.held_lengths[index])
        self._everybodys_lengths = [_scalars(each) for each in table.held_lengths]
        self._take_over()
        self.refresh()

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
        holds = self.refusing and now_ns < self._rejected_until_ns and left_ns < self._rejected_ns
        return self._rejection if holds else None

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
        rows_ahead = self._rows_ahead(low_priority) + rows - 1
        min_compute_ns = self._min_compute(length) if length else self._min_compute_ns[0]
        if len(self._free) < rows or budget_ns < min_compute_ns:
            return NEVER_NS, rows_ahead
        return self._finish_ns(rows_ahead, length, low_priority, rows), rows_ahead

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
        try:
            rows_ahead = self._held[0] if self._only_frontend and not low_priority else self._rows_ahead(low_priority)
            if rows_ahead >= self._sure_rows or left_ns < self._sure_ns:
                self._admit(rows_ahead, left_ns, budget_ns, length, low_priority)
            handle = self.open(done, low_priority=low_priority)
        except Overloaded as error:
            if whole_request and budget_ns == self._budget_ns and not low_priority:
                # A copy: the raised error keeps the request alive through its traceback.
                self._rejection = Overloaded(str(error), error.retry_after_s)
                self.refusing, self._rejected_until_ns = True, now_ns + REJECTION_NS
                # Until a result comes, no fewer rows wait, so no request with less time left can be admitted. Where
                # lengths vary, the first that can is of any bucket: short rows may wait for long ones to run apart.
                ahead = self._rows_ahead(False)
                rejected_ns = min([self._finish_ns(ahead, shortest) for shortest in self.shortest_lengths])
                self._rejected_ns = rejected_ns if self._free else NEVER_NS
            raise
        handle.ended = True
        flags = _ONLY | LOW_PRIORITY if low_priority else _ONLY
        if length:
            self._hold_length(handle, length)
        self._put(handle.slot, chunk, deadline_ns, arrival_ns, flags, length or self._whole_chunk)
        return handle

    def open(self, done: Done, *, low_priority: bool = False) -> SlotHandle:
        """Take a free slot for a stream.

        Raises:
            Overloaded: No slot is free.
        """
        if not self._free:
            raise Overloaded(f"All {self._each:,} slots are in use; come back later.", self._retry_after_s())
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
        *,
        deadline_ns: int,
        arrival_ns: int,
        flags: int = SOFT_DEADLINE,
        length: int | None = None,
    ) -> bool:
        """Put in the stream's next chunk if its ring has room.

        Args:
            handle: The stream's slot.
            chunk: A raw input chunk, or its bytes; a shorter chunk may have fewer.
            deadline_ns: Its deadline.
            arrival_ns: Its arrival time.
            flags: `FIRST`, `LAST`, `SOFT_DEADLINE` and the flag of low priority.
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
        self._put(slot, chunk, deadline_ns, arrival_ns, flags, self._whole_chunk if length is None else length)
        return True

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

    def fail(self, status: int) -> None:
        """Give every stream a last result with this status, after the engine is lost."""
        nothing = self._output[0, :0]
        waiting = [handle for handle in self._handles if handle is not None]
        self._handles = [None] * self._table.slots
        for handle in waiting:
            if handle.done is not None:
                handle.done(status, nothing, True)

    def collect(self) -> int:
        """Hand each finished result to its stream.

        Returns:
            The number of results.
        """
        first, until = self._read, self._done_count[0]
        self.refusing = False
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
        return until - first

    def refresh(self, reading_share: float = 0.0) -> None:
        """Read the costs that the engine published.

        Args:
            reading_share: Share of the engine's time that reading takes, if both share one loop.
        """
        self._stretch = 1 / (1 - min(reading_share, 0.5))
        self._generation_costs = GenerationCosts.published(self._table, self._grid)
        if self._grid is not None:
            # A request is predicted by its length each time.
            self._length_costs, self._sure_rows = LengthCosts.published(self._table, self._grid), 0
            return
        self._costs = Costs.published(self._table)
        # Predictions by the number of waiting rows: with several engines each request asks every engine.
        self._own_ns: dict[int, int] = {}
        self._sure_rows = max((rows for rows in self._costs.rows if self._finish_ns(rows) <= self._sure_ns), default=0)

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
        self._table.held_lengths[self._index] = 0
        for slot in range(self._first + self._each - 1, self._first - 1, -1):
            idle = self._submitted[slot] == self._consumed[slot] and not self._busy[slot]
            # The earlier process is gone, so its results are dropped.
            self._taken[slot] = self._produced[slot]
            if idle:
                self._free.append(slot)
            else:
                self._handles[slot] = SlotHandle(self, slot, None, True)
                self._held[0] += 1
                self._cancel_deadlines(slot)
                # Its row may have waited for room for its result, which there is now.
                self._wake()

    def _cancel_deadlines(self, slot: int) -> None:
        for entry in range(slot * self._chunks, (slot + 1) * self._chunks):
            self._deadline_ns[entry] = CANCELLED_NS

    def _take(self, handle: SlotHandle, taken: int) -> None:
        slot = handle.slot
        entry = slot * self._results + taken % self._results
        last = handle.ended and self._is_last(handle, taken + 1)
        if handle.done is not None:
            handle.done(self._status[entry], self._output[entry, : self._output_length[entry]], last)
        self._taken[slot] = taken + 1
        # The callback may have cancelled the stream.
        if last or (handle.ended and self._is_last(handle, taken + 1)):
            self._release(handle)

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
        self._free.append(handle.slot)

    def _hold_length(self, handle: SlotHandle, length: int) -> None:
        handle.length = length
        self._count_length(handle, 1)

    def _count_length(self, handle: SlotHandle, rows: int) -> None:
        assert self._grid is not None
        at = 2 * MAX_LENGTHS * handle.low_priority + self._grid.bucket(handle.length)
        self._held_lengths[at] += rows
        self._held_lengths[at + MAX_LENGTHS] += rows * handle.length

    def _min_compute(self, length: int) -> int:
        return self._length_costs.at(length).min_compute_ns

    def _admit(self, rows_ahead: int, left_ns: int, budget_ns: int, length: int, low_priority: bool) -> None:
        min_compute_ns = self._min_compute(length) if length else self._min_compute_ns[0]
        if budget_ns < min_compute_ns:
            of = f" for a length of {length:,}" if length else ""
            raise DeadlineImpossible(
                f"A budget of {budget_ns / 1e6:g} ms is shorter than the network's own time of "
                f"{min_compute_ns / 1e6:.2f} ms{of}; ask for more."
            )
        # An idle server always tries: only a batch that runs can correct a pessimistic prediction.
        if rows_ahead and (finish_ns := self._finish_ns(rows_ahead, length, low_priority)) > left_ns:
            gone_ms = (budget_ns - left_ns) / 1e6
            gone = f", {gone_ms:.0f} of them gone already" if gone_ms >= 1 else ""
            raise Overloaded(
                f"The answer would come after {finish_ns / 1e6 + gone_ms:.0f} ms{gone}, past the budget of "
                f"{budget_ns / 1e6:g} ms.",
                self._retry_after_s(),
            )

    def _rows_ahead(self, low_priority: bool) -> int:
        # Low priority waits behind all rows, normal priority only behind its own.
        rows_ahead = 0
        for held in self._everybody_held:
            rows_ahead += held[0] + held[1] if low_priority else held[0]
        return rows_ahead

    def _finish_ns(self, rows_ahead: int, length: int = 0, low_priority: bool = False, rows: int = 1) -> int:
        own_ns = None if length else self._own_ns.get(rows_ahead)
        if self._generation_costs is not None:
            own_ns = int(self._generation_costs.finish_ns(rows_ahead, length) * self._stretch)
        elif length:
            waiting, sums = self._lengths_ahead(low_priority)
            if rows > 1:
                # The other rows of a request are at most as long as its longest.
                bucket = self._length_costs.grid.bucket(length)
                waiting[bucket] += rows - 1
                sums[bucket] += (rows - 1) * length
            own_ns = int(self._length_costs.finish_ns(waiting, sums, length) * self._stretch)
        elif own_ns is None:
            own_ns = self._own_ns[rows_ahead] = int(self._costs.finish_ns(rows_ahead) * self._stretch)
        share, other_tables_ns = self._other_tables_share[0], self._other_tables_ns[0]
        if share or other_tables_ns:
            # The engine's other tables get at most as much of its time as this one, and want as much as lately.
            share = min(share, 500)
            own_ns += max(min(other_tables_ns, own_ns), own_ns * share // (1000 - share))
        return own_ns + self._margin_ns

    def _lengths_ahead(self, low_priority: bool) -> tuple[list[int], list[int]]:
        waiting, sums = [0] * MAX_LENGTHS, [0] * MAX_LENGTHS
        for held in self._everybodys_lengths:
            for at in range(MAX_LENGTHS):
                waiting[at] += held[at]
                sums[at] += held[at + MAX_LENGTHS]
                if low_priority:
                    waiting[at] += held[at + 2 * MAX_LENGTHS]
                    sums[at] += held[at + 3 * MAX_LENGTHS]
        return waiting, sums

    def _retry_after_s(self) -> float:
        rows = sum(sum(held[:2]) for held in self._everybody_held)
        return self._finish_ns(rows, self.shortest_length, low_priority=True) / 1e9


def _scalars(column: npt.NDArray[np.int64]) -> "memoryview[int]":
    # One number through a memoryview takes half the time that it takes through NumPy.
    return memoryview(cast(Any, column.reshape(-1))).cast("B").cast("q")
