"""Results and statistics of the rows of a batch, row by row: quick where it is compiled (decision 082).

Where the interpreter runs it, `ResultColumns` does the same by NumPy, since a loop over rows would take too long.
"""

from importlib.machinery import EXTENSION_SUFFIXES
from typing import final

from penstock.core.spec import Array
from penstock.serve.table import slots
from penstock.serve.table.slots import SlotTable

# B rows of the batch

COMPILED = __file__.endswith(tuple(EXTENSION_SUFFIXES))


@final
class RowResults:
    """The columns of a table that have a value for each result, and the counts of all results.

    Args:
        table: The slots.
        flat: The columns with a value for each chunk or result, flat, by name.
        row_size: Numbers of an output.
    """

    __slots__ = (
        "_arrival_ns",
        "_batch_counts",
        "_batch_edges",
        "_cancelled_ns",
        "_compute_counts",
        "_compute_ns",
        "_consumed",
        "_deadline_ns",
        "_done",
        "_done_count",
        "_latency_counts",
        "_not_finite",
        "_outcomes",
        "_output_length",
        "_produced",
        "_queue_counts",
        "_queue_ns",
        "_row_size",
        "_status",
        "_sums",
        "_time_edges_ns",
    )

    def __init__(self, table: SlotTable, flat: dict[str, Array], row_size: int) -> None:
        self._arrival_ns, self._deadline_ns = flat["arrival_ns"], flat["deadline_ns"]
        self._output_length, self._status = flat["output_length"], flat["status"]
        self._queue_ns, self._compute_ns = flat["queue_ns"], flat["compute_ns"]
        self._produced, self._consumed = table.produced, table.consumed
        self._batch_counts, self._compute_counts = table.batch_counts, table.compute_counts
        self._queue_counts, self._latency_counts = table.queue_counts, table.latency_counts
        self._sums, self._outcomes = table.sums, table.outcomes
        self._time_edges_ns, self._batch_edges = slots.TIME_EDGES_NS, slots.BATCH_EDGES
        self._row_size, self._cancelled_ns, self._not_finite = row_size, slots.CANCELLED_NS, slots.NOT_FINITE
        # Of the first front-end.
        self._done, self._done_count = table.done[0], table.done_count

    def write(self, from_B: Array, to_B: Array, status_B: Array, start_ns: int, end_ns: int) -> None:
        """Write the results of rows with whole outputs, and count them.

        Args:
            from_B: Ring entries of their chunks, `int64`.
            to_B: Ring entries of their outputs, likewise.
            status_B: Their status, likewise.
            start_ns: When the batch began.
            end_ns: When it ended.
        """
        compute_ns, rows = end_ns - start_ns, len(from_B)
        queue_sum, late = 0, 0
        for row in range(rows):
            entry, to = from_B[row], to_B[row]
            queue_ns, deadline_ns = start_ns - self._arrival_ns[entry], self._deadline_ns[entry]
            self._output_length[to] = self._row_size
            self._status[to] = status_B[row]
            self._queue_ns[to] = queue_ns
            self._compute_ns[to] = compute_ns
            queue_sum += queue_ns
            self._queue_counts[bin_of(self._time_edges_ns, queue_ns)] += 1
            self._latency_counts[bin_of(self._time_edges_ns, queue_ns + compute_ns)] += 1
            self._outcomes[status_B[row]] += 1
            # A row that was cancelled while it ran misses no deadline.
            late += end_ns > deadline_ns != self._cancelled_ns
        self._batch_counts[bin_of(self._batch_edges, rows)] += 1
        self._compute_counts[bin_of(self._time_edges_ns, compute_ns)] += rows
        self._sums[0] += rows
        self._sums[1] += queue_sum
        self._sums[2] += compute_ns * rows
        self._sums[3] += queue_sum + compute_ns * rows
        self._outcomes[4] += late

    def check_finite(self, output_BN: Array, status_B: Array) -> None:
        """Set the status of rows whose outputs hold NaN or infinity.

        Args:
            output_BN: The outputs, `float32`, flat.
            status_B: Their status, `int64`.
        """
        for row in range(len(output_BN)):
            for at in range(output_BN.shape[1]):
                # Neither NaN nor infinity is, less itself, 0.
                if output_BN[row, at] - output_BN[row, at] != 0:
                    status_B[row] = self._not_finite

    def list_done(self, rows_B: Array) -> int:
        """List slots with results for the only front-end.

        Args:
            rows_B: Slots, `int64`.

        Returns:
            The number of all that were ever listed, to be published.
        """
        count = self._done_count[0]
        for row in range(len(rows_B)):
            self._done[(count + row) % len(self._done)] = rows_B[row]
        return count + len(rows_B)

    def produce(self, rows_B: Array, consumed_B: Array) -> None:
        """Count the results of slots whose rows took a new chunk each.

        Args:
            rows_B: Slots, `int64`.
            consumed_B: Takes the number of chunks that each slot has consumed from now on, likewise.
        """
        for row in range(len(rows_B)):
            slot = rows_B[row]
            self._produced[slot] += 1
            consumed_B[row] = self._consumed[slot] + 1


def bin_of(edges: Array, value: int | Array) -> int:
    """Return the bin of a histogram: the first whose upper edge is not below the value."""
    first, last = 0, len(edges)
    while first < last:
        middle = (first + last) // 2
        if edges[middle] < value:
            first = middle + 1
        else:
            last = middle
    return first
