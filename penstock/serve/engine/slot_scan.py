# cython: boundscheck=False, wraparound=False
"""The ready rows of a table and what a batch must know of them, slot by slot: quick where compiled (decision 082).

Where the interpreter runs it, the scheduler and the engine do the same by NumPy, since a loop over slots would take too
long. Each method is a call of its own: what a front-end publishes last is read by the first, and all else afterwards.
"""

from importlib.machinery import EXTENSION_SUFFIXES
from typing import final

import numpy as np
import numpy.typing as npt

from penstock.core.spec import Array
from penstock.serve.table import slots
from penstock.serve.table.slots import SlotTable

# B rows of the batch

COMPILED = __file__.endswith(tuple(EXTENSION_SUFFIXES))


@final
class SlotScan:
    """Reads the columns of a table that choose a batch and begin it.

    Args:
        table: The slots.
    """

    __slots__ = (
        "_begun",
        "_busy",
        "_chunks",
        "_consumed",
        "_deadline_ns",
        "_first",
        "_flags",
        "_found",
        "_found_rows",
        "_generation",
        "_last",
        "_length",
        "_produced",
        "_submitted",
        "_taken",
    )

    def __init__(self, table: SlotTable) -> None:
        self._submitted, self._taken, self._consumed = table.submitted, table.taken, table.consumed
        self._produced, self._busy = table.produced, table.busy
        self._generation, self._begun = table.generation, table.begun
        self._deadline_ns, self._flags = table.deadline_ns.reshape(-1), table.flags.reshape(-1)
        self._length = table.length.reshape(-1)
        self._chunks = table.chunks
        self._first, self._last = slots.FIRST, slots.LAST | slots.RESETS
        self._found_rows: npt.NDArray[np.int64] = np.zeros(table.slots, np.int64)
        self._found = self._found_rows

    def ready(self) -> npt.NDArray[np.int64]:
        """Find the slots that have a step to take and room for its result, as `scheduler.ready_slots` does."""
        found = 0
        for slot in range(len(self._submitted)):
            waits = self._submitted[slot] != self._consumed[slot] or self._busy[slot] != 0
            if waits and self._produced[slot] - self._taken[slot] < self._chunks:
                self._found[found] = slot
                found += 1
        return self._found_rows[:found].copy()

    def least_deadline_ns(self, rows_B: Array) -> int:
        """Return the earliest deadline of the current chunks of ready rows."""
        least_ns = 1 << 62
        for row in range(len(rows_B)):
            slot = rows_B[row]
            entry = slot * self._chunks + (self._consumed[slot] - self._busy[slot]) % self._chunks
            deadline_ns = self._deadline_ns[entry]
            if deadline_ns < least_ns:
                least_ns = deadline_ns
        return int(least_ns)

    def begin(
        self, rows_B: Array, from_B: Array, busy_B: Array, length_B: Array, fresh_B: Array, last_B: Array
    ) -> None:
        """Note that the streams of rows are run, and tell what the network must know of their chunks.

        Args:
            rows_B: Slots.
            from_B: Ring entries of their chunks.
            busy_B: 1 where a row runs without a new chunk.
            length_B: Takes the valid lengths of the chunks; 0 where there is no new one.
            fresh_B: Takes 1 where a stream begins, else 0; `uint8`.
            last_B: Takes 1 where the network must give what it holds back, else 0; `uint8`.
        """
        for row in range(len(rows_B)):
            slot, entry = rows_B[row], from_B[row]
            flags = self._flags[entry]
            fresh = self._generation[slot] != self._begun[slot]
            if self._chunks > 1 and flags & self._first and not busy_B[row]:
                # After a chunk that resets. A row that takes another step has begun with its chunk already.
                fresh = True
            self._begun[slot] = self._generation[slot]
            length_B[row] = 0 if busy_B[row] else self._length[entry]
            fresh_B[row] = fresh
            last_B[row] = (flags & self._last) != 0
