"""Slots of live streams whose chunks and results are moved many at a time, by NumPy.

A slot belongs to no group, or to one. Those of a group are still slots of `TableWriter`, which opens, cancels and
releases them: only chunks that are whole, and results that are neither late nor the last, take this way.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias, cast, final

import numpy as np
import numpy.typing as npt

from penstock.core.spec import Array
from penstock.serve.table.slots import SlotTable

# B slots at a time

Slots: TypeAlias = npt.NDArray[np.int64]
# Given slots, each once, and where their results lie among all outputs: which of them it handed out.
Done = Callable[[Slots, Slots], npt.NDArray[np.bool_]]


@final
class RowGroups:
    """The groups of one front-end's slots.

    Args:
        table: The slots.
        wake: Called when there is new work for the engine.

    Attributes:
        output: All outputs, `[slots * results, numbers]`.
        status: Their statuses.
        output_length: Their numbers that are valid.
    """

    def __init__(self, table: SlotTable, wake: Callable[[], None]) -> None:
        self._table, self._wake = table, wake
        self._chunks, self._results = table.chunks, table.results
        self._input = cast(Any, table.input.reshape(-1).view(np.uint8)).reshape(table.slots * self._chunks, -1)
        self.output = table.output.reshape(table.slots * self._results, -1)
        self.status, self.output_length = table.status.reshape(-1), table.output_length.reshape(-1)
        self._length, self._flags = table.length.reshape(-1), table.flags.reshape(-1)
        self._deadline_ns, self._arrival_ns = table.deadline_ns.reshape(-1), table.arrival_ns.reshape(-1)
        # The group of each slot, 0 for none; and where each is in what is looked at now.
        self._group = np.zeros(table.slots, np.int64)
        self._place = np.zeros(table.slots, np.int64)
        self._owners: dict[int, Done] = {}
        self._last_group = self._members = 0

    @property
    def in_use(self) -> bool:
        """True if a slot belongs to a group."""
        return self._members > 0

    def add(self, done: Done) -> int:
        """Add a group; return its number.

        Args:
            done: Called with the results of its slots.
        """
        self._last_group += 1
        self._owners[self._last_group] = done
        return self._last_group

    def remove(self, group: int) -> None:
        """Remove a group that has no slots."""
        del self._owners[group]

    def join(self, slot: int, group: int) -> None:
        """Put a slot into a group."""
        self._group[slot] = group
        self._members += 1

    def leave(self, slot: int) -> None:
        """Take a slot out of its group."""
        self._group[slot] = 0
        self._members -= 1

    def first_of_each(self, slots_B: Slots) -> npt.NDArray[np.bool_]:
        """True at the first place of each slot."""
        order_B = np.arange(slots_B.size)
        self._place[slots_B[::-1]] = order_B[::-1]
        return self._place[slots_B] == order_B

    def has_room(self, slots_B: Slots) -> npt.NDArray[np.bool_]:
        """True for slots with room for a chunk."""
        table = self._table
        # The engine writes `busy` before `consumed`; read in the other order, a busy row never seems done.
        ahead_B = table.submitted[slots_B] - table.consumed[slots_B]
        return ahead_B + table.busy[slots_B] < self._chunks

    def put(self, slots_B: Slots, chunks_Bb: Array, *, arrival_ns: int, deadline_ns_B: Slots, flags: int) -> None:
        """Put a whole chunk into each of some slots that have room.

        Args:
            slots_B: The slots, each once.
            chunks_Bb: The bytes of the chunks, `[B, bytes]`.
            arrival_ns: When they arrived.
            deadline_ns_B: Their deadlines.
            flags: Flags of all of them.
        """
        submitted_B = self._table.submitted[slots_B]
        entries_B = slots_B * self._chunks + submitted_B % self._chunks
        self._input[entries_B] = chunks_Bb
        self._length[entries_B] = self._table.layout.input.shape[0]
        self._deadline_ns[entries_B] = deadline_ns_B
        self._arrival_ns[entries_B] = arrival_ns
        self._flags[entries_B] = flags
        # Last: it publishes the chunks.
        self._table.submitted[slots_B] = submitted_B + 1
        self._wake()

    def hand_out(self, slots_B: Slots) -> deque[int]:
        """Hand out the results of groups; return the slots of the others, in order.

        Args:
            slots_B: The slots with results, as often as they have some.
        """
        table, rest = self._table, deque[int]()
        while slots_B.size:
            firsts_B = self.first_of_each(slots_B)
            now_B, slots_B = slots_B[firsts_B], slots_B[~firsts_B]
            taken_B = table.taken[now_B]
            groups_B = self._group[now_B] * (table.produced[now_B] != taken_B)
            entries_B = now_B * self._results + taken_B % self._results
            done_B = np.zeros(now_B.size, np.bool_)
            for group in np.unique(groups_B).tolist():
                if group:
                    own_B = groups_B == group
                    done_B[own_B] = self._owners[group](now_B[own_B], entries_B[own_B])
            handed_B = now_B[done_B]
            table.taken[handed_B] += 1
            if (table.produced[handed_B] - taken_B[done_B] >= self._results).any():
                # The engine left these rows out, and may rest.
                self._wake()
            if handed_B.size < now_B.size:
                # What is left to the others must not be overtaken by a later result of the same slot.
                rest.extend(now_B[~done_B].tolist())
                rest.extend(slots_B.tolist())
                break
        return rest
