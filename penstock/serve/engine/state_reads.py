"""States of live streams between the executor and the table: out for tickets, and in for streams that go on here."""

from collections import deque
from typing import Any, NamedTuple, final

import numpy as np

from penstock.runtime.executor import Executor
from penstock.serve.engine.scheduler import Rows
from penstock.serve.table import slots
from penstock.serve.table.slots import SlotTable

# B rows of the batch

# States of one batch that are read at most: on a CPU the copy takes a fraction of a millisecond. Front-ends ask again.
MAX_BYTES = 1 << 20


class WantedStates(NamedTuple):
    """Slots whose states are wanted, and the number of chunks in each by then, as `submitted` counts."""

    rows_B: Rows
    number_B: Rows


@final
class StateReads:
    """Reads the states that front-ends want, those of a batch at a time, and publishes them in the table.

    Args:
        executor: The network.
        table: The slots; the engine is the only writer of `state` and `saved`.
    """

    def __init__(self, executor: Executor, table: SlotTable) -> None:
        self._executor, self._table = executor, table
        size = table.layout.state_bytes
        assert size == executor.state_bytes, (size, executor.state_bytes)
        self._max_rows = max(1, MAX_BYTES // size)
        self._state, self._restored = (column.view(np.uint8)[:, :size] for column in (table.state, table.restored))
        # With what the executor began.
        self._under_way: deque[tuple[WantedStates, Any]] = deque()

    def restore(self, rows_B: Rows, flags_B: Rows) -> None:
        """Give rows that go on from a state that state, before their step begins.

        Args:
            rows_B: Slots of the batch.
            flags_B: Flags of their chunks.
        """
        restored_B = flags_B & slots.RESTORES != 0
        if restored_B.any():
            rows = rows_B[restored_B]
            self._executor.write_states(rows, self._restored[rows])

    def wanted(self, rows_B: Rows, flags_B: Rows, number_B: Rows) -> WantedStates | None:
        """Find the states that are wanted after a batch; None for none.

        Args:
            rows_B: Slots of the batch.
            flags_B: Flags of their chunks.
            number_B: Number of each chunk in its slot, from 0.
        """
        wanted_B = flags_B & slots.SAVES != 0
        if not wanted_B.any():
            return None
        most = self._max_rows
        return WantedStates(rows_B[wanted_B][:most], number_B[wanted_B][:most] + 1)

    def begin(self, wanted: WantedStates | None) -> None:
        """Begin to read states, after the step of their batch was begun and before the next one is."""
        if wanted is not None:
            self._under_way.append((wanted, self._executor.begin_read(wanted.rows_B)))

    def publish(self) -> None:
        """Put states into the table that have come, without waiting for others."""
        while self._under_way and self._executor.read_done(self._under_way[0][1]):
            wanted, begun = self._under_way.popleft()
            self._state[wanted.rows_B] = self._executor.finish_read(begun)
            self._table.saved[wanted.rows_B] = wanted.number_B
