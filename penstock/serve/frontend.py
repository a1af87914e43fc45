"""A front-end's side of the slot table: chunks in, results out. It never loads torch.

It owns a range of slots and their free list. What it admits is decided from the measured costs in the table's header:
what would be answered too late is refused at once, so that those already admitted keep their budget.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import DeadlineImpossible, Overloaded
from penstock.core.spec import Array
from penstock.serve.costs import Costs
from penstock.serve.slots import BACKGROUND, CANCELLED_NS, FIRST, LAST, OFFERED, PATIENT, SlotTable

Done = Callable[[int, Array, bool], None]

# A refusal holds for so long for the others that ask for the same, if no result comes before.
STANDS_NS = 1_000_000
FOR_EVER_NS = 1 << 62
# As long as a newcomer is answered within this share of its budget, nothing more exact is worked out.
SURELY = 0.5
# The flags of a stream of one chunk.
_ONLY = FIRST | LAST


@dataclass(slots=True)
class Ticket:
    """A stream's place in the table.

    Args:
        frontend: Whose row it is.
        slot: That row.
        done: Called with each result: its status, its valid output as a flat view that lives only during the call, and
            whether it is the last one. None once the client is gone.
        ended: Whether its last chunk is in.
        background: Whether it is of the second class.
    """

    frontend: "Frontend"
    slot: int
    done: Done | None
    ended: bool = False
    background: bool = False


@final
class Frontend:
    """Puts chunks into the table and takes results out.

    Args:
        table: The slots; this front-end is the one writer of its own rows of the front-end columns.
        budget_ns: The latency budget of a request that names none.
        wake: Called when there is something new for the engine.
        index: Which of the table's front-ends this is. What an earlier one of the same index left is taken over: its
            rows do not run any more, and are free again once the engine has let go of them.
        margin_ns: How much later than predicted an answer may come, where others are read or run before it.

    Attributes:
        refusing: Whether one was refused since the last result, so that `standing` is worth asking.
    """

    def __init__(
        self, table: SlotTable, *, budget_ns: int, wake: Callable[[], None], index: int = 0, margin_ns: int = 0
    ) -> None:
        layout = table.layout
        self._table = table
        self._budget_ns = budget_ns
        self._surely_ns = int(budget_ns * SURELY)
        self._wake = wake
        self._margin_ns = margin_ns
        self._chunks = table.chunks
        self._first, self._each = index * layout.slots_each, layout.slots_each
        self._free: list[int] = []
        self._tickets: list[Ticket | None] = [None] * table.slots
        self._input_bytes = memoryview(cast(Any, table.input.reshape(-1).view(np.uint8)))
        self._input_nbytes = layout.input.nbytes
        self._output = table.output.reshape(table.slots * self._chunks, -1)
        self._submitted, self._taken = _scalars(table.submitted), _scalars(table.taken)
        self._consumed, self._produced = _scalars(table.consumed), _scalars(table.produced)
        self._busy, self._generation = _scalars(table.busy), _scalars(table.generation)
        self._length, self._flags = _scalars(table.length), _scalars(table.flags)
        self._deadline_ns, self._arrival_ns = _scalars(table.deadline_ns), _scalars(table.arrival_ns)
        self._status, self._output_length = _scalars(table.status), _scalars(table.output_length)
        self._least_ns, self._rivals_ns = _scalars(table.least_ns), _scalars(table.rivals_ns)
        self._rivals_share = _scalars(table.rivals_share)
        self._done, self._done_count = _scalars(table.done[index]), _scalars(table.done_count[index : index + 1])
        self._held, self._everybody_held = _scalars(table.held[index]), [_scalars(row) for row in table.held]
        self._alone = len(self._everybody_held) == 1
        self.counts = _scalars(table.counts[index])
        self._read = self._done_count[0]
        self._standing: Overloaded | None = None
        self.refusing = False
        self._stands_until_ns = self._standing_ns = 0
        self._whole_chunk = layout.input.shape[0] if layout.input.shape else 1
        self._take_over()
        self.refresh()

    @property
    def in_use(self) -> int:
        """This front-end's slots that a stream or request holds."""
        return self._each - len(self._free)

    @property
    def next_slot(self) -> int | None:
        """The slot that the next request gets; None where none is free."""
        return self._free[-1] if self._free else None

    def standing(self, now_ns: int, left_ns: int = 0) -> Overloaded | None:
        """Why a request that must be answered within so long would be refused; None where that must be worked out."""
        stands = self.refusing and now_ns < self._stands_until_ns and left_ns < self._standing_ns
        return self._standing if stands else None

    def prospect(self, rows: int, budget_ns: int, background: bool) -> tuple[int, int]:
        """What would become of a request of so many rows.

        Returns:
            When the last of them would be answered, in nanoseconds from now, for ever where it cannot be taken in at
            all; and how many rows are answered before that.
        """
        waiting = self._waiting(background) + rows - 1
        if len(self._free) < rows or budget_ns < self._least_ns[0]:
            return FOR_EVER_NS, waiting
        return self._finish_ns(waiting), waiting

    def submit(
        self,
        chunk: Array | bytes,
        *,
        done: Done,
        arrival_ns: int,
        budget_ns: int | None = None,
        now_ns: int | None = None,
        background: bool = False,
        alone: bool = True,
    ) -> Ticket:
        """Put in a request: a stream of one chunk.

        Args:
            chunk: One raw input chunk, or its bytes.
            done: Called with the result, see `Ticket`.
            arrival_ns: When it came, on the engine's clock.
            budget_ns: Its own latency budget.
            now_ns: The time, where some of the budget is already spent; by default the arrival.
            background: Whether it is of the second class.
            alone: Whether it is no row of a larger one, whose other rows it would wait for.

        Raises:
            Overloaded: It would be answered too late, or no slot is free.
            DeadlineImpossible: Its budget is shorter than the network's own time.
        """
        if budget_ns is None:
            budget_ns = self._budget_ns
        self.counts[OFFERED] += 1
        deadline_ns, now_ns = arrival_ns + budget_ns, now_ns or arrival_ns
        left_ns = deadline_ns - now_ns
        try:
            waiting = self._held[0] if self._alone and not background else self._waiting(background)
            if waiting >= self._surely or left_ns < self._surely_ns:
                self._admit(waiting, left_ns, budget_ns)
            ticket = self.open(done, background=background)
        except Overloaded as error:
            if alone and budget_ns == self._budget_ns and not background:
                # Another one, because that which is raised holds on to the request.
                self._standing = Overloaded(str(error), error.retry_after_s)
                self.refusing, self._stands_until_ns = True, now_ns + STANDS_NS
                # Until a result comes, nobody who has less time left can be answered in time: no fewer wait.
                self._standing_ns = self._finish_ns(self._waiting(False)) if self._free else FOR_EVER_NS
            raise
        ticket.ended = True
        flags = _ONLY | BACKGROUND if background else _ONLY
        self._put(ticket.slot, chunk, deadline_ns, arrival_ns, flags, self._whole_chunk)
        return ticket

    def open(self, done: Done, *, background: bool = False) -> Ticket:
        """Give a stream a slot of its own.

        Raises:
            Overloaded: None is free.
        """
        if not self._free:
            raise Overloaded(f"All {self._each:,} slots are in use; come back later.", self._retry_after_s())
        slot = self._free.pop()
        self._generation[slot] += 1
        self._held[background] += 1
        ticket = self._tickets[slot] = Ticket(self, slot, done, False, background)
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
        chunk: Array | bytes | memoryview,
        *,
        deadline_ns: int,
        arrival_ns: int,
        flags: int = PATIENT,
        length: int | None = None,
    ) -> bool:
        """Put in the stream's next chunk, if there is room for it.

        Args:
            ticket: The stream.
            chunk: One raw input chunk, or its bytes; of a shorter one, those that there are.
            deadline_ns: When it must be answered.
            arrival_ns: When it came.
            flags: `FIRST`, `LAST`, `PATIENT`, `BACKGROUND`.
            length: How much of the chunk is valid along its first dimension; all of it by default.

        Returns:
            Whether there was.
        """
        assert not ticket.ended, ticket
        slot = ticket.slot
        # As in `room`, which would be one more call of every chunk of every stream.
        if self._submitted[slot] - self._consumed[slot] + self._busy[slot] >= self._chunks:
            return False
        ticket.ended = flags & LAST != 0
        self._put(slot, chunk, deadline_ns, arrival_ns, flags, self._whole_chunk if length is None else length)
        return True

    def cancel(self, ticket: Ticket) -> None:
        """The client is gone: what has not started does not run, and what comes is dropped."""
        if self._tickets[ticket.slot] is not ticket:
            return
        ticket.done = None
        ticket.ended = True
        self._cancel_deadlines(ticket.slot)
        if self._is_last(ticket, self._taken[ticket.slot]):
            self._release(ticket)
        self._wake()

    def fail(self, status: int) -> None:
        """The engine is gone for good: every stream gets a last result with this status, and nothing holds a slot."""
        nothing = self._output[0, :0]
        waiting = [ticket for ticket in self._tickets if ticket is not None]
        self._tickets = [None] * self._table.slots
        for ticket in waiting:
            if ticket.done is not None:
                ticket.done(status, nothing, True)

    def collect(self) -> int:
        """Take the finished results out and hand each to its stream.

        Returns:
            How many there were.
        """
        first, self._read = self._read, self._done_count[0]
        self.refusing = False
        done, capacity, tickets, produced = self._done, len(self._done), self._tickets, self._produced
        for index in range(first, self._read):
            slot = done[index % capacity]
            ticket, taken = tickets[slot], self._taken[slot]
            # Else it is named by the ring for the front-end that was here before.
            if ticket is not None and produced[slot] != taken:
                self._take(ticket, taken)
        return self._read - first

    def refresh(self, reading_share: float = 0.0) -> None:
        """Read the costs that the engine published anew.

        Args:
            reading_share: What share of the engine's time reading takes, where that is done on the engine's own time.
        """
        self._stretch = 1 / (1 - min(reading_share, 0.5))
        self._costs = Costs.published(self._table)
        # What they say until then, by the rows that wait: with several engines each is asked for every request.
        self._own_ns: dict[int, int] = {}
        self._surely = max((rows for rows in self._costs.rows if self._finish_ns(rows) <= self._surely_ns), default=0)

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
        raw = chunk.tobytes() if isinstance(chunk, np.ndarray) else chunk
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
        for slot in range(self._first + self._each - 1, self._first - 1, -1):
            idle = self._submitted[slot] == self._consumed[slot] and not self._busy[slot]
            # Nobody is there for what came so far.
            self._taken[slot] = self._produced[slot]
            if idle:
                self._free.append(slot)
            else:
                self._tickets[slot] = Ticket(self, slot, None, True)
                self._held[0] += 1
                self._cancel_deadlines(slot)

    def _cancel_deadlines(self, slot: int) -> None:
        for entry in range(slot * self._chunks, (slot + 1) * self._chunks):
            self._deadline_ns[entry] = CANCELLED_NS

    def _take(self, ticket: Ticket, taken: int) -> None:
        slot = ticket.slot
        entry = slot * self._chunks + taken % self._chunks
        last = ticket.ended and self._is_last(ticket, taken + 1)
        if ticket.done is not None:
            ticket.done(self._status[entry], self._output[entry, : self._output_length[entry]], last)
        self._taken[slot] = taken + 1
        # Whoever hears of a result may have no use for more.
        if last or (ticket.ended and self._is_last(ticket, taken + 1)):
            self._release(ticket)

    def _is_last(self, ticket: Ticket, taken: int) -> bool:
        slot = ticket.slot
        # Against the order in which the engine writes them: who sees that all is consumed, sees all that came of it.
        return (
            ticket.ended
            and self._submitted[slot] == self._consumed[slot]
            and not self._busy[slot]
            and self._produced[slot] == taken
        )

    def _release(self, ticket: Ticket) -> None:
        self._tickets[ticket.slot] = None
        self._held[ticket.background] -= 1
        self._free.append(ticket.slot)

    def _admit(self, waiting: int, left_ns: int, budget_ns: int) -> None:
        least_ns = self._least_ns[0]
        if budget_ns < least_ns:
            raise DeadlineImpossible(
                f"A budget of {budget_ns / 1e6:g} ms is shorter than the network's own time of "
                f"{least_ns / 1e6:.2f} ms; ask for more."
            )
        # An idle server always tries: only what runs can show that a prediction was too dark.
        if waiting and (finish_ns := self._finish_ns(waiting)) > left_ns:
            raise Overloaded(
                f"The answer would come after {finish_ns / 1e6:.0f} ms, past the budget of {budget_ns / 1e6:g} ms.",
                self._retry_after_s(),
            )

    def _waiting(self, background: bool) -> int:
        # The second class waits behind everybody, the first only behind itself.
        waiting = 0
        for held in self._everybody_held:
            waiting += held[0] + held[1] if background else held[0]
        return waiting

    def _finish_ns(self, waiting: int) -> int:
        own_ns = self._own_ns.get(waiting)
        if own_ns is None:
            own_ns = self._own_ns[waiting] = int(self._costs.finish_ns(waiting) * self._stretch)
        share, rivals_ns = self._rivals_share[0], self._rivals_ns[0]
        if share or rivals_ns:
            # The engine's other tables get no more of its time than this one; what they had lately, they will want.
            share = min(share, 500)
            own_ns += max(min(rivals_ns, own_ns), own_ns * share // (1000 - share))
        return own_ns + self._margin_ns

    def _retry_after_s(self) -> float:
        return self._finish_ns(sum(sum(held[:2]) for held in self._everybody_held)) / 1e9


def _scalars(column: npt.NDArray[np.int64]) -> "memoryview[int]":
    # One number through a memoryview costs half of what it costs through NumPy.
    return memoryview(cast(Any, column.reshape(-1))).cast("B").cast("q")
