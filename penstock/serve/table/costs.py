"""Batch costs on this machine: measured at start for every bucket, updated while serving."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import final

import numpy as np

from penstock.serve.table.slots import MAX_COSTS, SlotTable

# Weight of one run in the curve, the same up and down: a curve that prefers slow runs would refuse, on a noisy machine,
# requests that it could answer.
WEIGHT = 0.1
HANDLING_WEIGHT = 0.05
# Time of a batch besides its network, whatever its size: scheduling, gathering, statistics, publishing.
OVERHEAD_NS = 100_000


@final
class Costs:
    """The time of a batch by its rows: a polyline through measured sizes, and the handling of each row.

    Args:
        rows: Batch sizes in ascending order, the first of them 1.
        ns: Times of the network for them, in nanoseconds.
        handling_ns: Engine time to read and answer one row; 0 where other processes do that.
        min_compute_ns: The shortest time ever measured for one row; the first of `ns` by default.
    """

    def __init__(
        self, rows: Sequence[int], ns: Sequence[float], *, handling_ns: float = 0.0, min_compute_ns: float | None = None
    ) -> None:
        assert list(rows[:1]) == [1], rows
        assert len(rows) == len(ns) <= MAX_COSTS, (rows, ns)
        self.rows = list(rows)
        self.handling_ns = handling_ns
        self._ns = [float(value) for value in ns]
        self._full_ns: int | None = None
        # Where the sizes were published.
        self._table: SlotTable | None = None
        self.min_compute_ns = int(self._ns[0] if min_compute_ns is None else min_compute_ns)

    @property
    def largest(self) -> int:
        """The largest batch worth running within the budget."""
        return self.rows[-1]

    @property
    def times_ns(self) -> dict[int, float]:
        """Times of the network by batch size."""
        return dict(zip(self.rows, self._ns, strict=True))

    def of(self, rows: int) -> int:
        """Predict the time of a batch of `rows` in nanoseconds, 1 <= rows <= largest."""
        return int(self._network_ns(rows) + self.handling_ns * rows)

    def finish_ns(self, waiting: int) -> int:
        """Predict the time in nanoseconds until a new row behind `waiting` rows is answered."""
        if waiting < self.largest:
            return self.of(waiting + 1)
        # More rows will have arrived by then: its own batch is as full as those before it.
        if self._full_ns is None:
            self._full_ns = self.of(self.largest)
        return (waiting // self.largest + 1) * self._full_ns

    def observe(self, rows: int, ns: int) -> None:
        """Update the curve with a batch of `rows` that took the network `ns`."""
        right = bisect_left(self.rows, rows)
        left = right if self.rows[right] == rows else right - 1
        share = 1.0 if left == right else (rows - self.rows[left]) / (self.rows[right] - self.rows[left])
        predicted_ns = self._network_ns(rows)
        # One outlier, such as a page fault, moves the curve by at most a tenth of its own height.
        self._full_ns = None
        step = WEIGHT * min(ns - predicted_ns, predicted_ns)
        self._ns[right] += step * share
        if left != right:
            self._ns[left] += step * (1 - share)

    def observe_handling(self, ns: float) -> None:
        """Update the handling time of one row."""
        most = 2 * self.handling_ns + 10_000
        self._full_ns = None
        self.handling_ns += HANDLING_WEIGHT * (min(ns, most) - self.handling_ns)

    def publish(self, table: SlotTable) -> None:
        """Write the curve into the table's header, for the admission control of the front-ends."""
        count = len(self.rows)
        table.cost_ns[0, :count] = self._ns
        if self._table is not table:
            # The sizes of a curve never change.
            self._table = table
            table.cost_rows[0, :count] = self.rows
            table.cost_rows[0, count:] = 0
        table.handling_ns[0] = int(self.handling_ns)
        table.min_compute_ns[0] = self.min_compute_ns

    def read(self, rows: "memoryview[int]", ns: "memoryview[int]", handling_ns: float, min_compute_ns: int) -> bool:
        """Take over a curve of the same batch sizes from the columns of a table's header.

        Args:
            rows: The column of batch sizes.
            ns: The column of their times.
            handling_ns: See the class.
            min_compute_ns: See the class.

        Returns:
            Whether the sizes are the same; else nothing is changed.
        """
        count = len(self.rows)
        if count < len(rows) and rows[count]:
            return False
        for at in range(count):
            if rows[at] != self.rows[at]:
                return False
        for at in range(count):
            self._ns[at] = float(ns[at])
        self.handling_ns, self.min_compute_ns, self._full_ns = handling_ns, min_compute_ns, None
        return True

    @classmethod
    def published(cls, table: SlotTable) -> "Costs":
        """Read the curve from the table's header."""
        count = int(np.count_nonzero(table.cost_rows))
        rows, ns = table.cost_rows[0, :count].tolist(), table.cost_ns[0, :count].tolist()
        return cls(rows, ns, handling_ns=float(table.handling_ns[0]), min_compute_ns=float(table.min_compute_ns[0]))

    def _network_ns(self, rows: int) -> float:
        right = bisect_left(self.rows, rows)
        if self.rows[right] == rows:
            return self._ns[right]
        share = (rows - self.rows[right - 1]) / (self.rows[right] - self.rows[right - 1])
        return self._ns[right - 1] * (1 - share) + self._ns[right] * share
