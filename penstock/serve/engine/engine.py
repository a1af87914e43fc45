"""The engine: it owns the network and the state of every slot, and runs one batch a tick.

There is no Python loop over requests: a tick makes the same number of Python calls for 1 row as for 4,096. Only where
the application's network raises is a batch bisected, so that the other requests of the batch are answered.
"""

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ServeError
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.serve.engine.faults import begin_isolated
from penstock.serve.engine.length_measurement import measuring_lengths
from penstock.serve.engine.length_scheduler import length_backlog, schedule_lengths
from penstock.serve.engine.scheduler import BatchSchedule, Columns, Rows, schedule, urgency
from penstock.serve.table import slots
from penstock.serve.table.costs import OVERHEAD_NS, Costs
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import LengthGrid
from penstock.serve.table.slots import SlotTable

# B rows of the batch

log = logging.getLogger(__name__)

# A new request waits for the running batch and then for its own, so neither may take more than half the budget.
MAX_BUDGET_SHARE = 0.5
# A larger batch must raise the rows per second by this factor to be worth its latency.
MIN_GAIN = 1.02
# Chunks of a late stream that one tick runs, one behind the other, where that delays no other row.
MAX_CHUNKS_AHEAD = 4
MEASURED_RUNS = 5
MEASURING_NS = 700_000_000


@dataclass(frozen=True, slots=True)
class Backlog:
    """Ready rows of a table.

    Args:
        rows: Their number.
        slack_ns: Time after which a batch would be late for the most urgent of them.
        batch_ns: Predicted time of the next batch.
        work_ns: Predicted time of all of them.
    """

    rows: int
    slack_ns: int
    batch_ns: int
    work_ns: int


class _RunningBatch(NamedTuple):
    """A batch that was begun: its rows, and the ring entries of its chunks and outputs."""

    rows_B: Rows
    from_B: Rows
    to_B: Rows
    busy_B: Rows
    start_ns: int
    begun: Any
    failed_B: npt.NDArray[np.bool_] | None


@final
class Engine:
    """Runs the ready slots of one table in batches.

    Args:
        executor: The network.
        table: The slots; this engine is the only writer of the engine columns.
        budget_ns: Latency budget of a request that names none.
        clock_ns: The monotonic clock of the deadlines, in nanoseconds.
        max_rows: A limit of the batch below what the budget allows; None for no other.
        costs: Batch costs; None where `measuring` will find them. Those of an input whose lengths vary are
            `LengthCosts`.
        traced: Record the batch size of each result, for traces.
    """

    def __init__(
        self,
        executor: Executor,
        table: SlotTable,
        *,
        budget_ns: int,
        clock_ns: Callable[[], int],
        max_rows: int | None = None,
        costs: Costs | LengthCosts | None = None,
        traced: bool = False,
    ) -> None:
        self._executor = executor
        self._table = table
        self._budget_ns = budget_ns
        self._clock_ns = clock_ns
        self._traced = traced
        self._columns = Columns.of(table)
        self._input = table.input.reshape(-1, *table.layout.input.shape)
        self._output = table.output.reshape(-1, *table.layout.output.shape)
        self._flat = {
            column.name: getattr(table, column.name).reshape(-1)
            for column in table.layout.columns()
            if column.shape == table.flags.shape
        }
        spec = table.layout.input
        self._record = spec if isinstance(spec, RecordSpec) else None
        self._adopted = executor.adopt(self._input, self._output)
        # Read after `adopt`, which may lower the executor's limit.
        self._max_rows = min(max_rows or executor.max_rows, executor.max_rows, table.slots)
        rows = 0 if self._adopted else self._max_rows
        self._gathered = np.zeros((rows, *table.layout.input.shape), table.layout.input.numpy_dtype)
        self._generation = np.zeros(table.slots, np.int64)
        self._checks_finite = table.layout.output.takes_nan
        output = table.layout.output
        self._frame_size = output.size // output.shape[0] if output.shape else 1
        self._grid = LengthGrid.of(spec)
        self._costs = costs if isinstance(costs, Costs) else Costs([1], [0.0])
        # Used in their place where lengths vary.
        self._length_costs: LengthCosts | None = None
        if self._grid is not None:
            unknown = LengthCosts(self._grid, [1], np.zeros((len(self._grid.edges), 1)))
            self._length_costs = costs if isinstance(costs, LengthCosts) else unknown
            self._length_costs.padded = executor.pads_to_edges
        self._end_ns = 0
        self.costs.publish(table)

    @property
    def costs(self) -> Costs | LengthCosts:
        """The measured time of a batch by its rows, and by its length where lengths vary."""
        return self._length_costs or self._costs

    def describe_costs(self) -> str:
        """The times of one row and of the largest batch, for the log."""
        costs = self._length_costs
        if costs is None:
            most = self._costs.largest
            return f"1 row {self._costs.of(1) / 1e6:.2f} ms, {most} rows {self._costs.of(most) / 1e6:.2f} ms"
        each = ((length, costs.at(length)) for length in costs.grid.edges)
        return "; ".join(
            f"length {length}: 1 row {at.of(1) / 1e6:.2f} ms, {at.largest} rows {at.of(at.largest) / 1e6:.2f} ms"
            for length, at in each
        )

    def measuring(self, example: Array) -> Generator[None]:
        """Measure every bucket on this machine and choose the largest batch that is worth running.

        Yield before each bucket, so that other models are served meanwhile.

        Args:
            example: One realistic raw input chunk.

        Raises:
            ServeError: The network alone is slower than the budget.
        """
        if self._grid is not None:
            yield from self._measuring_lengths(self._grid, example)
            return
        self._gathered[:] = example
        rows: list[int] = []
        medians: list[float] = []
        min_compute_ns = 0.0
        end_ns = self._clock_ns() + MEASURING_NS
        for bucket in batch_sizes(self._max_rows):
            yield
            times_ns = self._measured_ns(bucket)
            if bucket == 1:
                min_compute_ns = float(times_ns.min())
            self._check_budget(min_compute_ns, "one request")
            if rows and np.median(times_ns) > self._budget_ns * MAX_BUDGET_SHARE:
                break
            rows.append(bucket)
            medians.append(float(np.median(times_ns)))
            if self._clock_ns() > end_ns:
                break
        worth = count_worthwhile(rows, medians)
        rows, medians = rows[:worth], medians[:worth]
        self._costs = Costs(rows, medians, min_compute_ns=min_compute_ns)
        self._costs.publish(self._table)

    def _measuring_lengths(self, grid: LengthGrid, example: Array) -> Generator[None]:
        assert self._record is not None

        def measured_ns(record: Array, rows: int, limit_ns: int) -> npt.NDArray[np.int64]:
            self._gathered[:rows] = record
            return self._measured_ns(rows, limit_ns)

        costs = yield from measuring_lengths(
            grid,
            self._record,
            example,
            batch_sizes(self._max_rows),
            measured_ns,
            count_worthwhile,
            max_ns=self._budget_ns * MAX_BUDGET_SHARE,
            limit_ns=MEASURING_NS,
        )
        self._check_budget(costs.min_compute_L[0], f"one request of the smallest length, {grid.edges[0]},")
        late = costs.min_compute_L > self._budget_ns
        if late.any():
            log.warning(
                "one request of length %d takes %.1f ms on this machine, more than the latency budget of %g ms; "
                "requests so long are refused unless they have a larger budget",
                grid.edges[int(late.argmax())],
                costs.min_compute_L[int(late.argmax())] / 1e6,
                self._budget_ns / 1e6,
            )
        costs.padded = self._executor.pads_to_edges
        self._length_costs = costs
        costs.publish(self._table)

    def _check_budget(self, min_compute_ns: float, of: str) -> None:
        if min_compute_ns > self._budget_ns:
            raise ServeError(
                f"the network takes {min_compute_ns / 1e6:.1f} ms for {of} on this machine, more than the "
                f"latency budget of {self._budget_ns / 1e6:g} ms; raise --latency-ms or use a smaller network."
            )

    def improve(self, rows: int, ns: float) -> None:
        """Take over the time of a batch size whose graph was replaced by a faster one; larger ones may be worth it now.

        Args:
            rows: The batch size.
            ns: Its time.
        """
        sizes = set(batch_sizes(self._max_rows))
        if rows not in sizes or (rows > 1 and ns > self._budget_ns * MAX_BUDGET_SHARE):
            return
        times_ns = {**self._costs.times_ns, rows: ns}
        known = sorted(times_ns)
        worth = count_worthwhile(known, [times_ns[size] for size in known])
        self._costs = Costs(
            known[:worth],
            [times_ns[size] for size in known[:worth]],
            handling_ns=self._costs.handling_ns,
            min_compute_ns=min(self._costs.min_compute_ns, times_ns[1]),
        )
        self._costs.publish(self._table)

    def tick(self, now_ns: int) -> BatchSchedule:
        """Run the next batch, if there is one.

        Args:
            now_ns: The time.

        Returns:
            The rows that ran and expired, and the number of rows that wait.
        """
        if self._length_costs is None:
            chosen = schedule(self._columns, now_ns, self._costs)
        else:
            chosen = schedule_lengths(self._columns, self._table.length, now_ns, self._length_costs)
        if chosen.expire.size:
            self._expire(chosen)
        if chosen.run.size:
            self._run(chosen.run)
        return chosen

    def backlog(self, now_ns: int) -> Backlog:
        """Predict the work of the ready rows."""
        if self._length_costs is not None:
            return Backlog(*length_backlog(self._columns, self._table.length, now_ns, self._length_costs))
        rows, slack_ns = urgency(self._columns, now_ns, self._costs)
        if not rows:
            return Backlog(0, 0, 0, 0)
        batch_ns = self._costs.of(min(rows, self._costs.largest))
        return Backlog(rows, slack_ns, batch_ns, self._costs.finish_ns(rows - 1))

    def publish_other_tables(self, work_ns: int, share: float) -> None:
        """Publish the load of the device's other tables, for admission control.

        Args:
            work_ns: Predicted time of their ready rows.
            share: Their share of the recent device time.
        """
        self._table.other_tables_ns[0] = work_ns
        self._table.other_tables_share[0] = int(share * 1000)

    def _run(self, rows_B: Rows) -> None:
        batches = [rows_B, *self._chunks_ahead(rows_B)]
        if not self._adopted:
            for batch_B in batches:
                self._finish(self._begin(batch_B))
            return
        running = [self._begin(batch_B, ahead) for ahead, batch_B in enumerate(batches)]
        for batch in running:
            self._finish(batch)

    def _chunks_ahead(self, rows_B: Rows) -> list[Rows]:
        """Rows whose next chunks are ready too, chunk by chunk, while together they take no longer than the first."""
        table = self._table
        if table.chunks == 1 or not self._executor.runs_ahead:
            return []
        waiting_B = table.submitted[rows_B] - table.consumed[rows_B]
        ahead_B = np.minimum(waiting_B, table.chunks - (table.produced[rows_B] - table.taken[rows_B]))
        batches: list[Rows] = []
        left_ns = self._costs.of(rows_B.size)
        for ahead in range(1, MAX_CHUNKS_AHEAD):
            late_B = rows_B[ahead_B > ahead]
            left_ns -= self._costs.of(late_B.size) if late_B.size else left_ns + 1
            if left_ns < 0:
                break
            batches.append(late_B)
        return batches

    def _begin(self, rows_B: Rows, ahead: int = 0) -> _RunningBatch:
        table, flat, chunks = self._table, self._flat, self._table.chunks
        busy_B = table.busy[rows_B]
        from_B = rows_B * chunks + (table.consumed[rows_B] + ahead - busy_B) % chunks
        to_B = rows_B * chunks + (table.produced[rows_B] + ahead) % chunks
        generation_B = table.generation[rows_B]
        fresh_B = generation_B != self._generation[rows_B]
        self._generation[rows_B] = generation_B
        batch = StepInput(
            slots_B=rows_B,
            chunk_B=self._gather(from_B),
            length_B=flat["length"][from_B] * (1 - busy_B),
            fresh_B=fresh_B,
            last_B=flat["flags"][from_B] & slots.LAST != 0,
            from_B=from_B if self._adopted else None,
            to_B=to_B if self._adopted else None,
        )
        start_ns = self._clock_ns()
        begun, failed_B = begin_isolated(self._executor, batch, adopted=self._adopted)
        return _RunningBatch(rows_B, from_B, to_B, busy_B, start_ns, begun, failed_B)

    def _gather(self, from_B: Rows) -> Array:
        if self._adopted:
            return self._gathered
        if self._record is not None:
            return self._record.gather(self._input, from_B, self._gathered)
        chunk_B = self._gathered[: from_B.size]
        np.take(self._input, from_B, 0, chunk_B, "clip")
        return chunk_B

    def _finish(self, batch: _RunningBatch) -> None:
        table, flat = self._table, self._flat
        rows_B, from_B, to_B = batch.rows_B, batch.from_B, batch.to_B
        result = self._executor.finish(batch.begun)
        end_ns = self._clock_ns()
        if not self._adopted:
            self._output[to_B] = result.output_B
        status_B = np.full(rows_B.size, slots.OK, np.int64)
        if self._checks_finite:
            finite_B = finite_rows(self._table.layout.output, result) if result.finite_B is None else result.finite_B
            status_B[~finite_B] = slots.NOT_FINITE
        if batch.failed_B is not None:
            status_B[batch.failed_B] = slots.FAILED
        frames_B = self._output[0].size if result.length_B is None else result.length_B * self._frame_size
        flat["output_length"][to_B] = frames_B
        still_busy_B = np.zeros_like(batch.busy_B) if result.busy_B is None else result.busy_B & (status_B == slots.OK)
        flat["status"][to_B] = status_B
        if self._traced:
            flat["batch_rows"][to_B] = rows_B.size
        # A batch that was begun while another ran had to wait for that one.
        took_ns = end_ns - max(batch.start_ns, self._end_ns)
        self._end_ns = end_ns
        if self._length_costs is None:
            self._costs.observe(rows_B.size, took_ns)
            self._costs.publish(table)
        else:
            self._length_costs.observe(rows_B.size, int(flat["length"][from_B].max()), took_ns)
            self._length_costs.publish(table)
            table.uncaptured[0] = self._executor.uncaptured_batches
        queue_B, compute_ns = batch.start_ns - flat["arrival_ns"][from_B], end_ns - batch.start_ns
        # Always, for front-ends whose clients ask for them: a check for those would cost as much.
        flat["queue_ns"][to_B] = queue_B
        flat["compute_ns"][to_B] = compute_ns
        self._count(queue_B, compute_ns, flat["deadline_ns"][from_B], status_B, end_ns)
        self._publish(rows_B, 1 - batch.busy_B, still_busy_B)

    def _expire(self, chosen: BatchSchedule) -> None:
        table, rows = self._table, chosen.expire
        put = rows * table.chunks + table.produced[rows] % table.chunks
        self._flat["output_length"][put] = 0
        self._flat["status"][put] = slots.EXPIRED
        self._flat["batch_rows"][put] = 0
        table.outcomes[slots.EXPIRED] += rows.size
        self._publish(rows, 1 - table.busy[rows], np.zeros(rows.size, np.int64))

    def _publish(self, rows_B: Rows, took_B: Rows, busy_B: Array) -> None:
        table = self._table
        # In this order: a front-end that sees a chunk consumed also sees its result and whether the row is busy.
        table.produced[rows_B] += 1
        table.busy[rows_B] = busy_B
        table.consumed[rows_B] += took_B
        # A loop over the few front-ends, never over requests.
        for frontend, ring in enumerate(table.done):
            own_B = rows_B if len(table.done) == 1 else rows_B[rows_B // table.layout.slots_each == frontend]
            count = table.done_count[frontend]
            ring[np.arange(count, count + own_B.size) % ring.size] = own_B
            table.done_count[frontend] = count + own_B.size

    def _count(self, queue_B: Rows, compute_ns: int, deadline_ns_B: Rows, status_B: Rows, end_ns: int) -> None:
        table, rows, latency_B = self._table, queue_B.size, queue_B + compute_ns
        table.batch_counts[np.searchsorted(slots.BATCH_EDGES, rows)] += 1
        table.compute_counts[np.searchsorted(slots.TIME_EDGES_NS, compute_ns)] += rows
        for counts, times_B in ((table.queue_counts, queue_B), (table.latency_counts, latency_B)):
            counts += np.bincount(np.searchsorted(slots.TIME_EDGES_NS, times_B), minlength=counts.size)
        table.sums += (rows, queue_B.sum(), compute_ns * rows, latency_B.sum())
        table.outcomes[:4] += np.bincount(status_B, minlength=4)
        late = np.count_nonzero(end_ns > deadline_ns_B)
        if late:
            # A row that was cancelled while it ran misses no deadline.
            table.outcomes[4] += late - np.count_nonzero(deadline_ns_B == slots.CANCELLED_NS)

    def _measured_ns(self, rows: int, limit_ns: int = MEASURING_NS // 4) -> npt.NDArray[np.int64]:
        spec = self._table.layout.input
        entries = np.arange(rows) * self._table.chunks if self._adopted else None
        batch = StepInput(
            slots_B=np.arange(rows),
            chunk_B=self._gathered[:rows],
            length_B=np.full(rows, spec.shape[0] if spec.shape else 1),
            fresh_B=np.ones(rows, np.bool_),
            from_B=entries,
            to_B=entries,
        )
        times: list[int] = []
        # The first run of a size allocates and does not count; a slow network gets fewer runs.
        while len(times) <= MEASURED_RUNS and sum(times) < limit_ns:
            start_ns = self._clock_ns()
            self._executor.step(batch)
            times.append(self._clock_ns() - start_ns)
        return np.array(times[1:] or times)


def batch_sizes(largest: int) -> list[int]:
    """The batch sizes that are measured: powers of two, and the largest."""
    powers = [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent <= largest]
    return powers if powers[-1] == largest else [*powers, largest]


def count_worthwhile(rows: list[int], ns: list[float]) -> int:
    """Count the sizes worth running: up to the last that answers more rows per second than all before it."""
    best, worth = 0.0, 1
    for index, rate in enumerate(size / (time + OVERHEAD_NS) for size, time in zip(rows, ns, strict=True)):
        if rate > best * MIN_GAIN:
            best, worth = rate, index + 1
    return worth


def finite_rows(output: ChunkSpec, result: StepOutput) -> npt.NDArray[np.bool_]:
    """Mask the rows whose valid output holds neither NaN nor infinity."""
    if isinstance(output, RecordSpec):
        return output.finite(result.output_B)
    output_B, rows = result.output_B, len(result.output_B)
    # The usual case, in which all values are finite, takes one pass.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(output_B.sum(dtype=np.float64)):
            return np.ones(rows, np.bool_)
    finite: Array = np.isfinite(output_B)
    if result.length_B is not None:
        valid = np.arange(output_B.shape[1]) < result.length_B[:, None]
        finite |= ~valid.reshape(*valid.shape, *[1] * (output_B.ndim - 2))
    return np.logical_and.reduce(finite.reshape(rows, -1), 1)
