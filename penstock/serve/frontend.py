"""A front-end's side of the slot table: chunks in, results out. It never loads torch.

It owns its slots and their free list. What it admits is decided from the measured costs in the table's header: what
would be answered too late is refused at once, so that those already admitted keep their budget.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import DeadlineImpossible, Overloaded
from penstock.core.spec import Array
from penstock.serve.costs import Costs
from penstock.serve.slots import CANCELLED_NS, FIRST, LAST, PATIENT, SlotTable

Done = Callable[[int, Array, bool], None]


@dataclass(slots=True)
class Ticket:
    """A stream's place in the table.

    Args:
        slot: Its row.
        done: Called with each result: its status, its valid output as a flat view that lives only during the call, and
            whether it is the last one. None once the client is gone.
        ended: Whether its last chunk is in.
    """

    slot: int
    done: Done | None
    ended: bool = False


@final
class Frontend:
    """Puts chunks into the table and takes results out.

    Args:
        table: The slots; this front-end is the one writer of its front-end columns.
        budget_ns: The latency budget of a request that names none.
        wake: Called when there is something new for the engine.

    Attributes:
        offered: Requests that were submitted since the start, refused ones included.
    """

    def __init__(self, table: SlotTable, *, budget_ns: int, wake: Callable[[], None]) -> None:
        self._table = table
        self._budget_ns = budget_ns
        self._wake = wake
        self._chunks = table.chunks
        self._free = list(range(table.slots - 1, -1, -1))
        self._tickets: list[Ticket | None] = [None] * table.slots
        self._input_bytes = memoryview(cast(Any, table.input.reshape(-1).view(np.uint8)))
        self._input_nbytes = table.layout.input.nbytes
        self._output = table.output.reshape(table.slots * self._chunks, -1)
        self._submitted, self._taken = _scalars(table.submitted), _scalars(table.taken)
        self._consumed, self._produced = _scalars(table.consumed), _scalars(table.produced)
        self._busy, self._generation = _scalars(table.busy), _scalars(table.generation)
        self._length, self._flags = _scalars(table.length), _scalars(table.flags)
        self._deadline_ns, self._arrival_ns = _scalars(table.deadline_ns), _scalars(table.arrival_ns)
        self._status, self._output_length = _scalars(table.status), _scalars(table.output_length)
        self._least_ns = _scalars(table.least_ns)
        self._done, self._done_count = _scalars(table.done), _scalars(table.done_count)
        self.offered = 0
        self._read = self._done_count[0]
        self._costs = Costs.published(table)
        self._whole_chunk = table.layout.input.shape[0] if table.layout.input.shape else 1

    @property
    def in_use(self) -> int:
        """Slots that a stream or request holds."""
        return self._table.slots - len(self._free)

    @property
    def total(self) -> int:
        """Slots in all."""
        return self._table.slots

    def submit(
        self,
        chunk: Array | bytes,
        *,
        done: Done,
        arrival_ns: int,
        budget_ns: int | None = None,
        now_ns: int | None = None,
    ) -> Ticket:
        """Put in a request: a stream of one chunk.

        Args:
            chunk: One raw input chunk, or its bytes.
            done: Called with the result, see `Ticket`.
            arrival_ns: When it came, on the engine's clock.
            budget_ns: Its own latency budget.
            now_ns: The time, where some of the budget is already spent; by default the arrival.

        Raises:
            Overloaded: It would be answered too late, or no slot is free.
            DeadlineImpossible: Its budget is shorter than the network's own time.
        """
        budget_ns = self._budget_ns if budget_ns is None else budget_ns
        self.offered += 1
        self._admit(arrival_ns + budget_ns - (now_ns or arrival_ns), budget_ns)
        ticket = self.open(done)
        self.push(ticket, chunk, deadline_ns=arrival_ns + budget_ns, arrival_ns=arrival_ns, flags=FIRST | LAST)
        return ticket

    def open(self, done: Done) -> Ticket:
        """Give a stream a slot of its own.

        Raises:
            Overloaded: None is free.
        """
        if not self._free:
            raise Overloaded(f"All {self.total:,} slots are in use; come back later.", self._retry_after_s())
        slot = self._free.pop()
        self._generation[slot] += 1
        ticket = self._tickets[slot] = Ticket(slot, done)
        return ticket

    def room(self, ticket: Ticket) -> int:
        """How many more chunks a stream may put in now."""
        slot = ticket.slot
        # The engine writes `busy` before `consumed`; read in the other order, a busy row is never taken for a done one.
        ahead = self._submitted[slot] - self._consumed[slot]
        return self._chunks - ahead - self._busy[slot]

    def push(
        self,
        ticket: Ticket,
        chunk: Array | bytes,
        *,
        deadline_ns: int,
        arrival_ns: int,
        flags: int = PATIENT,
        length: int | None = None,
    ) -> None:
        """Put in the stream's next chunk; there must be room for it.

        Args:
            ticket: The stream.
            chunk: One raw input chunk, or its bytes.
            deadline_ns: When it must be answered.
            arrival_ns: When it came.
            flags: `FIRST`, `LAST`, `PATIENT`.
            length: How much of the chunk is valid along its first dimension; all of it by default.
        """
        assert self.room(ticket) > 0, ticket
        assert not ticket.ended, ticket
        slot = ticket.slot
        submitted = self._submitted[slot]
        entry = slot * self._chunks + submitted % self._chunks
        raw = chunk if isinstance(chunk, bytes) else chunk.tobytes()
        begin = entry * self._input_nbytes
        self._input_bytes[begin : begin + self._input_nbytes] = raw
        self._length[entry] = self._whole_chunk if length is None else length
        self._deadline_ns[entry] = deadline_ns
        self._arrival_ns[entry] = arrival_ns
        self._flags[entry] = flags
        ticket.ended = bool(flags & LAST)
        self._submitted[slot] = submitted + 1
        self._wake()

    def cancel(self, ticket: Ticket) -> None:
        """The client is gone: what has not started does not run, and what comes is dropped."""
        if self._tickets[ticket.slot] is not ticket:
            return
        slot = ticket.slot
        ticket.done = None
        ticket.ended = True
        for entry in range(slot * self._chunks, (slot + 1) * self._chunks):
            self._deadline_ns[entry] = CANCELLED_NS
        self._release_if_over(slot)
        self._wake()

    def collect(self) -> int:
        """Take the finished results out and hand each to its stream.

        Returns:
            How many there were.
        """
        first, self._read = self._read, self._done_count[0]
        capacity = len(self._done)
        for index in range(first, self._read):
            self._take(self._done[index % capacity])
        return self._read - first

    def refresh(self) -> None:
        """Read the costs that the engine published anew."""
        self._costs = Costs.published(self._table)

    def _take(self, slot: int) -> None:
        ticket = self._tickets[slot]
        assert ticket is not None, slot
        taken = self._taken[slot]
        entry = slot * self._chunks + taken % self._chunks
        last = self._is_last(ticket, taken + 1)
        if ticket.done is not None:
            ticket.done(self._status[entry], self._output[entry, : self._output_length[entry]], last)
        self._taken[slot] = taken + 1
        self._release_if_over(slot)

    def _is_last(self, ticket: Ticket, taken: int) -> bool:
        slot = ticket.slot
        over = self._submitted[slot] == self._consumed[slot] and not self._busy[slot]
        return ticket.ended and over and self._produced[slot] == taken

    def _release_if_over(self, slot: int) -> None:
        ticket = self._tickets[slot]
        if ticket is not None and self._is_last(ticket, self._taken[slot]):
            self._tickets[slot] = None
            self._free.append(slot)

    def _admit(self, left_ns: int, budget_ns: int) -> None:
        least_ns = self._least_ns[0]
        if budget_ns < least_ns:
            raise DeadlineImpossible(
                f"A budget of {budget_ns / 1e6:g} ms is shorter than the network's own time of "
                f"{least_ns / 1e6:.2f} ms; ask for more."
            )
        waiting = self.in_use
        # An idle server always tries: only what runs can show that a prediction was too dark.
        if waiting and (finish_ns := self._costs.finish_ns(waiting)) > left_ns:
            raise Overloaded(
                f"The answer would come after {finish_ns / 1e6:.0f} ms, past the budget of {budget_ns / 1e6:g} ms.",
                self._retry_after_s(),
            )

    def _retry_after_s(self) -> float:
        return self._costs.finish_ns(self.in_use) / 1e9


def _scalars(column: npt.NDArray[np.int64]) -> "memoryview[int]":
    # One number through a memoryview costs half of what it costs through NumPy.
    return memoryview(cast(Any, column.reshape(-1))).cast("B").cast("q")
