"""The result columns of the table: outputs, times, counts, and which rows are done, once a batch has run.

NumPy counts the statistics when the results are published, because that takes as long as everything else for a small
batch. Where `RowResults` is compiled, it counts while it writes.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import final

import numpy as np
import numpy.typing as npt

from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array
from penstock.runtime.executor import StepOutput
from penstock.serve.engine.row_results import COMPILED, RowResults
from penstock.serve.engine.scheduler import Rows
from penstock.serve.table import slots
from penstock.serve.table.slots import SlotTable

# B rows of the batch

# The edges of the histograms as numbers, for one value.
_TIME_EDGES_NS: list[int] = slots.TIME_EDGES_NS.tolist()
_BATCH_EDGES: list[int] = slots.BATCH_EDGES.tolist()

# Outputs of at most so many numbers are checked one by one, which takes less than a call of NumPy.
FEW_NUMBERS = 4096

# `wake(frontend)`: tells a front-end, by its index, that something is new.
Wake = Callable[[int], None]


def no_wake(frontend: int) -> None:
    """Tell nobody: the front-end is in this process, and looks by itself."""


@final
class ResultColumns:
    """The engine's result columns of one table.

    Args:
        table: The slots; the engine is the only writer of these columns.
        traced: Record the batch size of each result, for traces.
        writes_output: Whether outputs are copied into the table; False where the executor has put them there.
        wake: Wakes the front-ends.
    """

    def __init__(self, table: SlotTable, *, traced: bool, writes_output: bool, wake: Wake = no_wake) -> None:
        self._wake = wake
        self._table, self._traced, self._writes_output = table, traced, writes_output
        self._flat = ring_columns(table)
        self._output = table.output.reshape(-1, *table.layout.output.shape)
        output = table.layout.output
        self._checks_finite = output.takes_nan
        self._frame_size = output.size // output.shape[0] if output.shape else 1
        self._row_size = self._output[0].size
        self._rows = RowResults(table, self._flat, self._row_size) if COMPILED else None

    def write(
        self,
        rows_B: Rows,
        from_B: Rows,
        to_B: Rows,
        busy_B: Rows,
        result: StepOutput,
        failed_B: npt.NDArray[np.bool_] | None,
        start_ns: int,
        end_ns: int,
    ) -> None:
        """Write the results of a batch, and hand its rows to the front-ends.

        Args:
            rows_B: Slots.
            from_B: Ring entries of their chunks.
            to_B: Ring entries of their outputs.
            busy_B: 1 where a row ran without a new chunk.
            result: What the network gave.
            failed_B: Rows that it failed on; None for none.
            start_ns: When the batch began.
            end_ns: When it ended.
        """
        flat = self._flat
        if self._writes_output:
            self._output[to_B] = result.output_B
        # All are OK, which is 0.
        status_B = np.zeros(rows_B.size, np.int64)
        if self._checks_finite:
            self._check_finite(result, status_B)
        if failed_B is not None:
            status_B[failed_B] = slots.FAILED
        if self._traced:
            flat["batch_rows"][to_B] = rows_B.size
        still_busy_B = 0 if result.busy_B is None else result.busy_B & (status_B == slots.OK)
        if self._rows is not None and result.length_B is None:
            self._rows.write(from_B, to_B, status_B, start_ns, end_ns)
            if result.busy_B is None:
                self._publish_whole(self._rows, rows_B)
            else:
                self._publish(rows_B, 1 - busy_B, still_busy_B)
            return
        numbers_B = self._row_size if result.length_B is None else result.length_B * self._frame_size
        flat["output_length"][to_B] = numbers_B
        flat["status"][to_B] = status_B
        queue_B, compute_ns = start_ns - flat["arrival_ns"][from_B], end_ns - start_ns
        # Read before the front-ends may put in others.
        deadline_ns_B = flat["deadline_ns"][from_B]
        # Always, for front-ends whose clients ask for them: a check for those would cost as much.
        flat["queue_ns"][to_B] = queue_B
        flat["compute_ns"][to_B] = compute_ns
        self._publish(rows_B, 1 - busy_B, still_busy_B)
        self._count(queue_B, compute_ns, deadline_ns_B, status_B, end_ns)

    def _check_finite(self, result: StepOutput, status_B: Rows) -> None:
        output, output_B, finite_B = self._table.layout.output, result.output_B, result.finite_B
        if finite_B is None:
            few = output_B.dtype == np.float32 and output_B.size <= FEW_NUMBERS and result.length_B is None
            if self._rows is not None and few:
                self._rows.check_finite(output_B.reshape(len(output_B), self._row_size), status_B)
                return
            finite_B = finite_rows(output, result)
        if finite_B is not None:
            status_B[~finite_B] = slots.NOT_FINITE

    def expire(self, rows: Rows) -> None:
        """Answer rows that would be late."""
        table, flat = self._table, self._flat
        put = rows * table.chunks + table.produced[rows] % table.chunks
        flat["output_length"][put] = 0
        flat["status"][put] = slots.EXPIRED
        flat["batch_rows"][put] = 0
        table.outcomes[slots.EXPIRED] += rows.size
        self._publish(rows, 1 - table.busy[rows], 0)

    def _publish_whole(self, written: RowResults, rows_B: Rows) -> None:
        """Publish results of a network whose rows are never busy."""
        consumed_B = np.empty(rows_B.size, np.int64)
        written.produce(rows_B, consumed_B)
        # By a call, so that no compiler moves it before the results.
        self._table.consumed[rows_B] = consumed_B
        if len(self._table.done) > 1:
            announce(self._table, rows_B, self._wake)
            return
        self._table.done_count[0] = written.list_done(rows_B)
        self._wake(0)

    def _publish(self, rows_B: Rows, took_B: Rows, busy_B: Array | int) -> None:
        table = self._table
        # In this order: a front-end that sees a chunk consumed also sees its result and whether the row is busy.
        table.produced[rows_B] += 1
        table.busy[rows_B] = busy_B
        table.consumed[rows_B] += took_B
        announce(table, rows_B, self._wake)

    def _count(self, queue_B: Rows, compute_ns: int, deadline_ns_B: Rows, status_B: Rows, end_ns: int) -> None:
        table, rows = self._table, queue_B.size
        table.batch_counts[bisect_left(_BATCH_EDGES, rows)] += 1
        table.compute_counts[bisect_left(_TIME_EDGES_NS, compute_ns)] += rows
        latency_B = queue_B + compute_ns
        for counts, times_B in ((table.queue_counts, queue_B), (table.latency_counts, latency_B)):
            counts += np.bincount(slots.TIME_EDGES_NS.searchsorted(times_B), minlength=counts.size)
        table.sums += (rows, queue_B.sum(), compute_ns * rows, latency_B.sum())
        table.outcomes[:4] += np.bincount(status_B, minlength=4)
        late = np.count_nonzero(end_ns > deadline_ns_B)
        if late:
            # A row that was cancelled while it ran misses no deadline.
            table.outcomes[4] += late - np.count_nonzero(deadline_ns_B == slots.CANCELLED_NS)


def ring_columns(table: SlotTable) -> dict[str, Array]:
    """Return the columns with a value for each chunk or result, flat, by name."""
    columns = table.layout.columns()
    return {
        column.name: getattr(table, column.name).reshape(-1) for column in columns if column.shape == table.flags.shape
    }


def announce(table: SlotTable, rows_B: Rows, wake: Wake) -> None:
    """Tell the front-ends which of their slots have something new.

    Args:
        table: The slots.
        rows_B: Those with something new.
        wake: Wakes the front-ends that have some of them.
    """
    frontends, slots_each = len(table.done), table.layout.slots_each
    # A loop over the few front-ends, never over requests.
    for frontend, ring in enumerate(table.done):
        own_B = rows_B if frontends == 1 else rows_B[rows_B // slots_each == frontend]
        if not own_B.size:
            continue
        count = int(table.done_count[frontend])
        begin = count % ring.size
        if begin + own_B.size <= ring.size:
            ring[begin : begin + own_B.size] = own_B
        else:
            ring[np.arange(begin, begin + own_B.size) % ring.size] = own_B
        table.done_count[frontend] = count + own_B.size
        wake(frontend)


def finite_rows(output: ChunkSpec, result: StepOutput) -> npt.NDArray[np.bool_] | None:
    """Mask the rows whose valid output holds neither NaN nor infinity; None if all are."""
    if isinstance(output, RecordSpec):
        return output.finite(result.output_B)
    output_B, rows = result.output_B, len(result.output_B)
    finite: Array = np.isfinite(output_B)
    if finite.all():
        return None
    if result.length_B is not None:
        valid = np.arange(output_B.shape[1]) < result.length_B[:, None]
        finite |= ~valid.reshape(*valid.shape, *[1] * (output_B.ndim - 2))
    return np.logical_and.reduce(finite.reshape(rows, -1), 1)
