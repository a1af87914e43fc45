"""Batch costs by rows and length: measured at start on a grid, interpolated between, updated while serving."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from penstock.serve.table.costs import HANDLING_WEIGHT, WEIGHT, Costs
from penstock.serve.table.lengths import LengthGrid
from penstock.serve.table.slots import MAX_COSTS, SlotTable

# L lengths of the grid, S batch sizes of the grid, C batches, R rows

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# A batch is efficient if it does this part of the work a second that a full one does.
EFFICIENT = 0.9


@final
class LengthCosts:
    """The time of a batch by its rows and its longest row, to whose length it is padded.

    Args:
        grid: The length buckets; the edges are the lengths of the grid.
        rows: Batch sizes in ascending order, the first of them 1.
        ns_LS: Times of the network, in nanoseconds.
        largest: The largest batch worth running at each length.
        handling_ns: As for `Costs`.
        min_compute_ns: The shortest time measured for one row of each length; the first column of `ns_LS` by default.

    Attributes:
        padded: A batch is padded to the edge of its length bucket, as CUDA graphs need it, not to its longest row.
    """

    def __init__(
        self,
        grid: LengthGrid,
        rows: Sequence[int],
        ns_LS: npt.ArrayLike,
        *,
        largest: Sequence[int] | None = None,
        handling_ns: float = 0.0,
        min_compute_ns: Sequence[float] | None = None,
    ) -> None:
        self.grid = grid
        self.rows = list(rows)
        self.handling_ns = handling_ns
        self.padded = False
        self._ns_LS: Floats = np.array(ns_LS, np.float64)
        assert self._ns_LS.shape == (len(grid.edges), len(self.rows)), (self._ns_LS.shape, grid, rows)
        assert self.rows[0] == 1, rows
        assert len(self.rows) <= MAX_COSTS, rows
        given = np.array(largest or [self.rows[-1]] * len(grid.edges))
        # A batch that is worth running is worth it for shorter rows too.
        self.largest_L: list[int] = np.maximum.accumulate(given[::-1])[::-1].tolist()
        self.min_compute_L: Floats = np.array(self._ns_LS[:, 0] if min_compute_ns is None else min_compute_ns)
        self._edges: Floats = np.array(grid.edges, np.float64)
        self._whole_edges: Ints = np.array(grid.edges)
        self._sizes: Floats = np.array(self.rows, np.float64)
        self._steps: Floats = np.arange(float(max(self._edges.size, self._sizes.size)))
        self._flat_ns: Floats | None = None
        self._full_2L: Floats | None = None
        self._at: dict[int, Costs] = {}
        self._curves: list[list[float]] = []
        self._min_compute: list[float] = []

    def largest(self, length: int) -> int:
        """The largest batch worth running at a length."""
        return self.largest_L[self.grid.bucket(length)]

    def of(self, rows: int, length: int) -> int:
        """Predict the time of a batch in nanoseconds."""
        return self.at(length).of(rows)

    def of_each(self, rows_C: Ints, lengths_C: Ints) -> Floats:
        """Predict the times of several batches in nanoseconds, each with its rows and its length."""
        sizes = self._sizes.size
        low_C, share_C = _place(self._edges, self._steps[: self._edges.size], self._rooms_of(lengths_C))
        left_C, part_C = _place(self._sizes, self._steps[:sizes], rows_C)
        if self._flat_ns is None:
            # The last row and column are twice there, so that each point has a next one.
            self._flat_ns = np.pad(self._ns_LS, (0, 1), "edge").ravel()
        at_C = low_C * (sizes + 1) + left_C
        below_C, above_C = self._flat_ns[at_C], self._flat_ns[at_C + (sizes + 1)]
        below_C += (self._flat_ns[at_C + 1] - below_C) * part_C
        above_C += (self._flat_ns[at_C + (sizes + 2)] - above_C) * part_C
        return below_C + (above_C - below_C) * share_C + self.handling_ns * rows_C

    def buckets_of(self, lengths_R: Ints) -> Ints:
        """Find the length buckets of rows."""
        return self._edges.searchsorted(lengths_R)

    def alone_of(self, lengths_R: Ints) -> Floats:
        """Predict the times of single rows in nanoseconds."""
        return np.interp(self._rooms_of(lengths_R), self._edges, self._ns_LS[:, 0]) + self.handling_ns

    def at(self, length: int) -> Costs:
        """The costs of batches of one length, up to the largest worth running."""
        if self.padded:
            length = self.grid.edges[self.grid.bucket(length)]
        found = self._at.get(length)
        if found is None:
            # Without NumPy, because admission needs one length at a time.
            if not self._curves:
                self._curves, self._min_compute = self._ns_LS.tolist(), self.min_compute_L.tolist()
            low, high, share = self._beside(length)
            below, above = self._curves[low], self._curves[high]
            most = self.largest(length)
            ns = [
                left * (1 - share) + right * share
                for rows, left, right in zip(self.rows, below, above, strict=True)
                if rows <= most
            ]
            min_compute_ns = self._min_compute[low] * (1 - share) + self._min_compute[high] * share
            rows = self.rows[: len(ns)]
            found = Costs(rows, ns, handling_ns=self.handling_ns, min_compute_ns=min_compute_ns)
            self._at[length] = found
        return found

    def min_compute_of(self, lengths_R: Ints) -> Floats:
        """The shortest times of the network for single rows, in nanoseconds."""
        return np.interp(self._rooms_of(lengths_R), self._edges, self.min_compute_L)

    def shares_of(self, lengths_R: Ints) -> Floats:
        """The least time that rows take as part of a full batch of their own length, in nanoseconds."""
        return np.interp(self._rooms_of(lengths_R), self._edges, self._full()[0])

    def efficient_of(self, lengths_R: Ints) -> Floats:
        """The times of the smallest batches that are nearly as efficient as full ones, in nanoseconds."""
        return np.interp(self._rooms_of(lengths_R), self._edges, self._full()[1])

    def finish_ns(self, waiting: Sequence[int], sums: Sequence[int], length: int) -> int:
        """Predict the time in nanoseconds until a new row is answered.

        Args:
            waiting: Rows ahead of it, by length bucket.
            sums: The sums of their lengths, by length bucket.
            length: Its length.
        """
        own, longest, total = self.grid.bucket(length), length, sum(waiting)
        others_ns = own_ns = 0.0
        for bucket, rows in enumerate(waiting):
            if not rows:
                continue
            # Counts and sums are read while other front-ends write them, so the mean may be of no bucket.
            mean = min(max(sums[bucket] // rows, 1), self.grid.edges[bucket])
            longest = max(longest, mean)
            if bucket == own:
                own_ns = self.at(max(length, mean)).finish_ns(rows)
            else:
                # As many batches of their own, the last of them shared with others.
                costs = self.at(mean)
                full = min(rows, costs.largest)
                others_ns += costs.of(full) * (rows / full)
        apart_ns = others_ns + (own_ns or self.at(length).of(1))
        together = self.at(longest)
        # Few rows run together where that takes less time.
        return int(min(apart_ns, together.of(total + 1)) if total < together.largest else apart_ns)

    def observe(self, rows: int, length: int, ns: int) -> None:
        """Update the grid with a batch that took the network `ns`."""
        if self.padded:
            length = self.grid.edges[self.grid.bucket(length)]
        predicted_ns = self.of(rows, length) - self.handling_ns * rows
        step = WEIGHT * min(ns - predicted_ns, predicted_ns)
        low, high, share = self._beside(length)
        right = bisect_left(self.rows, rows)
        left = right if self.rows[right] == rows else right - 1
        part = 0.0 if left == right else (rows - self.rows[left]) / (self.rows[right] - self.rows[left])
        for at, nearness in ((low, 1 - share), (high, share)):
            self._ns_LS[at, left] += step * nearness * (1 - part)
            self._ns_LS[at, right] += step * nearness * part
        self._changed()

    def observe_handling(self, ns: float) -> None:
        """Update the handling time of one row."""
        most = 2 * self.handling_ns + 10_000
        self.handling_ns += HANDLING_WEIGHT * (min(ns, most) - self.handling_ns)
        self._changed()

    def improve(
        self,
        rows: int,
        length: int,
        ns: float,
        count_worthwhile: Callable[[list[int], list[float]], int] | None = None,
    ) -> None:
        """Take over the time of a batch whose graph was replaced by a faster one.

        Args:
            rows: Its rows.
            length: An edge of the grid.
            ns: Its time.
            count_worthwhile: Counts the batch sizes that are worth running, of sizes and times; None where batches of
                this time are not.
        """
        bucket = self.grid.bucket(length)
        if rows not in self.rows:
            if count_worthwhile is None or len(self.rows) == MAX_COSTS:
                return
            self._add_size(rows)
        at = self.rows.index(rows)
        self._ns_LS[bucket, at] = ns
        if rows == 1:
            self.min_compute_L[bucket] = min(self.min_compute_L[bucket], ns)
        elif count_worthwhile is not None:
            known = [size for size in self.rows if size <= max(rows, self.largest_L[bucket])]
            worth = known[count_worthwhile(known, self._ns_LS[bucket, : len(known)].tolist()) - 1]
            # A shorter batch is worth at least as many rows.
            self.largest_L[: bucket + 1] = [max(each, worth) for each in self.largest_L[: bucket + 1]]
        self._changed()

    def _add_size(self, rows: int) -> None:
        """Add a batch size; beyond the largest, times are in proportion to the rows."""
        sizes = sorted([*self.rows, rows])
        beyond = np.maximum(np.array(sizes) / self.rows[-1], 1)
        self._ns_LS = np.array([np.interp(sizes, self.rows, ns_S) * beyond for ns_S in self._ns_LS])
        self.rows = sizes
        self._sizes = np.array(sizes, np.float64)
        self._steps = np.arange(float(max(self._edges.size, self._sizes.size)))

    def publish(self, table: SlotTable) -> None:
        """Write the grid into the table's header, for the admission control of the front-ends."""
        count = len(self.rows)
        table.cost_ns[:, :count] = self._ns_LS
        table.cost_rows[:, :count] = self.rows
        table.cost_rows[:, count:] = 0
        table.cost_largest[:] = self.largest_L
        table.cost_padded[0] = self.padded
        table.handling_ns[0] = int(self.handling_ns)
        table.min_compute_ns[:] = self.min_compute_L

    @classmethod
    def published(cls, table: SlotTable, grid: LengthGrid) -> "LengthCosts":
        """Read the grid from the table's header."""
        count = int(np.count_nonzero(table.cost_rows[0]))
        costs = cls(
            grid,
            table.cost_rows[0, :count].tolist(),
            table.cost_ns[:, :count],
            largest=table.cost_largest.tolist(),
            handling_ns=float(table.handling_ns[0]),
            min_compute_ns=table.min_compute_ns.tolist(),
        )
        costs.padded = bool(table.cost_padded[0])
        return costs

    def _changed(self) -> None:
        self._full_2L = None
        self._flat_ns = None
        self._at.clear()
        self._curves = []

    def _rooms_of(self, lengths_R: Ints) -> Ints:
        """The lengths to which rows are padded as the longest of a batch."""
        return self._whole_edges[self._edges.searchsorted(lengths_R)] if self.padded else lengths_R

    def _full(self) -> Floats:
        """The share of a row in a full batch, and the time of an efficient batch, `[2, L]`."""
        if self._full_2L is None:
            worth_LS = self._sizes <= np.array(self.largest_L)[:, None]
            each_LS = np.where(worth_LS, self._ns_LS / self._sizes, np.inf) + self.handling_ns
            shares_L = each_LS.min(1)
            size_L = (each_LS * EFFICIENT <= shares_L[:, None]).argmax(1)
            batch_L = each_LS[np.arange(len(size_L)), size_L] * self._sizes[size_L]
            self._full_2L = np.stack([shares_L, batch_L])
        return self._full_2L

    def _beside(self, length: int) -> tuple[int, int, float]:
        """Find the lengths of the grid below and above, and the share of the way between them."""
        edges = self.grid.edges
        high = bisect_left(edges, length)
        if high == 0 or edges[min(high, len(edges) - 1)] <= length:
            at = min(high, len(edges) - 1)
            return at, at, 0.0
        return high - 1, high, (length - edges[high - 1]) / (edges[high] - edges[high - 1])


def _place(points: Floats, steps: Floats, values_C: Ints) -> tuple[Ints, Floats]:
    """Find the point at or below each value, and its share of the way to the next one."""
    place_C = np.interp(values_C, points, steps)
    below_C = place_C.astype(np.int64)
    place_C -= below_C
    return below_C, place_C
