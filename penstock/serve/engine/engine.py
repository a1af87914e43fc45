"""The engine: it owns the network and the state of every slot, and runs one batch a tick.

There is no Python loop over requests: a tick makes the same number of Python calls for 1 row as for 4,096. Only where
the application's network raises is a batch bisected, so that the other requests of the batch are answered.
"""

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import DeviceLost
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.core.wording.counted import counted
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.serve.engine.batch_hold import RowRate, hold_ns, is_busy
from penstock.serve.engine.batch_measurement import (
    MAX_BUDGET_SHARE,
    MEASURED_RUNS,
    MEASURING_NS,
    batch_sizes,
    check_budget,
    count_worthwhile,
    measuring_batches,
)
from penstock.serve.engine.faults import FailedRows, begin_isolated, step_isolated
from penstock.serve.engine.length_measurement import measuring_lengths
from penstock.serve.engine.length_scheduler import length_backlog, schedule_lengths
from penstock.serve.engine.results import ResultColumns, Wake, no_wake, ring_columns
from penstock.serve.engine.scheduler import (
    NO_ROWS,
    BatchSchedule,
    Columns,
    Rows,
    most_urgent,
    ready_slots,
    schedule,
    urgency,
)
from penstock.serve.engine.state_reads import StateReads, WantedStates
from penstock.serve.table import slots
from penstock.serve.table.costs import Costs
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import LengthGrid
from penstock.serve.table.slots import SlotTable

# B rows of the batch

log = logging.getLogger(__name__)

# Shorter batches are over before another one is prepared.
OVERLAPPED_NS = 1_000_000
# While a batch runs, the next one is chosen so long before its end, and so many times what that took lately.
AHEAD_NS, AHEAD = 200_000, 1.5
POLL_S = 0.0002
# Weight of the newest batch in the moving average of that time.
FOLLOW = 0.1
# Chunks of a late stream that one tick runs, one behind the other, where that delays no other row.
MAX_CHUNKS_AHEAD = 4


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
    """A batch that was begun: its rows, ring entries of chunks and outputs, its predicted time, and wanted states."""

    rows_B: Rows
    from_B: Rows
    to_B: Rows
    busy_B: Rows
    start_ns: int
    predicted_ns: int
    begun: Any
    failed_B: npt.NDArray[np.bool_] | None
    wanted: WantedStates | None


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
        wake: Wakes front-ends in other processes.

    Attributes:
        others_wait: Tells whether other tables of the device have rows.
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
        wake: Wake = no_wake,
    ) -> None:
        self._executor = executor
        self._table = table
        self.others_wait: Callable[[], bool] = lambda: False
        self._budget_ns = budget_ns
        self._clock_ns = clock_ns
        self._columns = Columns.of(table)
        self._input = table.input.reshape(-1, *table.layout.input.shape)
        self._output = table.output.reshape(-1, *table.layout.output.shape)
        self._flat = ring_columns(table)
        spec = table.layout.input
        self._record = spec if isinstance(spec, RecordSpec) else None
        self._adopted = executor.adopt(self._input, self._output)
        # Read after `adopt`, which may lower the executor's limit.
        self._max_rows = min(max_rows or executor.max_rows, executor.max_rows, table.slots)
        rows = 0 if self._adopted else self._max_rows
        self._gathered = np.zeros((rows, *table.layout.input.shape), table.layout.input.numpy_dtype)
        self._results = ResultColumns(table, traced=traced, writes_output=not self._adopted, wake=wake)
        self._states = StateReads(executor, table) if table.layout.state_bytes else None
        self._grid = LengthGrid.of(spec)
        self._costs = costs if isinstance(costs, Costs) else Costs([1], [0.0])
        # Used in their place where lengths vary.
        self._length_costs: LengthCosts | None = None
        if self._grid is not None:
            unknown = LengthCosts(self._grid, [1], np.zeros((len(self._grid.edges), 1)))
            self._length_costs = costs if isinstance(costs, LengthCosts) else unknown
            self._length_costs.padded = executor.pads_to_edges
        self._end_ns = 0
        # One batch of rows with one chunk each, of an executor that overlaps batches.
        self._times_ns: dict[int, float] = {}
        self._overlaps = executor.overlaps and table.chunks == 1
        self._running: _RunningBatch | None = None
        self._begin_ns = 0.0
        self._row_rate = RowRate()
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
            return f"1 row {self._costs.of(1) / 1e6:.2f} ms, {counted(most, 'row')} {self._costs.of(most) / 1e6:.2f} ms"
        each = ((length, costs.at(length)) for length in costs.grid.edges)
        return "; ".join(
            f"length {length}: 1 row {at.of(1) / 1e6:.2f} ms, "
            f"{counted(at.largest, 'row')} {at.of(at.largest) / 1e6:.2f} ms"
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
        costs = yield from measuring_batches(
            batch_sizes(self._max_rows), self._measured_ns, budget_ns=self._budget_ns, clock_ns=self._clock_ns
        )
        self._costs = costs
        costs.publish(self._table)

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
        check_budget(costs.min_compute_L[0], f"one request of the smallest length, {grid.edges[0]},", self._budget_ns)
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

    def improve(self, rows: int, ns: float) -> None:
        """Take over the time of a batch size whose graph was replaced by a faster one; larger ones may be worth it now.

        Args:
            rows: The batch size.
            ns: Its time.
        """
        sizes = set(batch_sizes(self._max_rows))
        if rows not in sizes or (rows > 1 and ns > self._budget_ns * MAX_BUDGET_SHARE):
            return
        # Of all sizes: one that is not worth running now may be again when a larger one is improved.
        times_ns = self._times_ns = self._times_ns | self._costs.times_ns | {rows: ns}
        known = sorted(times_ns)
        worth = count_worthwhile(known, [times_ns[size] for size in known])
        self._costs = Costs(
            known[:worth],
            [times_ns[size] for size in known[:worth]],
            handling_ns=self._costs.handling_ns,
            min_compute_ns=min(self._costs.min_compute_ns, times_ns[1]),
        )
        self._costs.publish(self._table)

    @property
    def running(self) -> bool:
        """True while a batch runs that the next `tick` finishes."""
        return self._running is not None

    @property
    def has_ready_rows(self) -> bool:
        """True if rows can run."""
        return ready_slots(self._columns).size > 0

    def tick(self, now_ns: int) -> BatchSchedule:
        """Run the next batch, if there is one.

        Where the executor overlaps batches and no other table waits, the batch after it is begun shortly before its
        end, and finished by the next tick. It is chosen as late as possible, because requests that come until then are
        in it.

        Args:
            now_ns: The time.

        Returns:
            The rows that ran and expired, and the number of rows that wait.
        """
        running, self._running = self._running, None
        expired, waiting = NO_ROWS, 0
        if running is None:
            chosen = self._schedule(self._columns, now_ns)
            if not chosen.run.size:
                return chosen
            if not self._overlaps:
                self._run(chosen.run)
                return chosen
            expired, waiting, running = chosen.expire, chosen.waiting, self._begin_timed(chosen.run)
        try:
            if running.predicted_ns >= OVERLAPPED_NS and self._wait_for(running):
                chosen = self._next_of(running)
                expired, waiting = np.concatenate([expired, chosen.expire]), chosen.waiting
                if chosen.run.size:
                    self._running = self._begin_timed(chosen.run)
        finally:
            self._finish(running)
        return BatchSchedule(running.rows_B, expired, waiting)

    def _schedule(self, columns: Columns, now_ns: int) -> BatchSchedule:
        """Choose a batch, and answer the rows that would be late."""
        if self._length_costs is None:
            chosen = schedule(columns, now_ns, self._costs)
        else:
            chosen = schedule_lengths(columns, self._table.length, now_ns, self._length_costs)
        if chosen.expire.size:
            self._results.expire(chosen.expire)
        return chosen

    def _predicted_ns(self, rows_B: Rows, from_B: Rows) -> int:
        if self._length_costs is None:
            return int(self._costs.of(rows_B.size))
        return int(self._length_costs.of(rows_B.size, int(self._flat["length"][from_B].max())))

    def _begin_timed(self, rows_B: Rows) -> _RunningBatch:
        begun = self._begin(rows_B)
        self._begin_ns += FOLLOW * (self._clock_ns() - begun.start_ns - self._begin_ns)
        return begun

    def _wait_for(self, running: _RunningBatch) -> bool:
        """Wait until shortly before the end of a batch; a wait of the host.

        Returns:
            Whether another one may be begun: no other table has rows.
        """
        columns, executor = self._columns, self._executor
        ready = np.count_nonzero(columns.submitted != columns.consumed) - running.rows_B.size
        ahead_ns = AHEAD_NS + AHEAD * (self._begin_ns + min(ready, self._max_rows) * executor.staging_ns)
        begin_ns = self._end_of(running) - ahead_ns
        while not self.others_wait():
            left_ns = begin_ns - self._clock_ns()
            if left_ns <= 0 or executor.done(running.begun):
                return True
            time.sleep(min(left_ns / 1e9, POLL_S))
        return False

    def _next_of(self, running: _RunningBatch) -> BatchSchedule:
        """Choose the batch after one that runs."""
        columns, now_ns = self._columns, self._clock_ns()
        consumed = columns.consumed.copy()
        consumed[running.rows_B] = columns.submitted[running.rows_B]
        # A prediction must not make rows late on a device that is idle already.
        begins_ns = now_ns if self._executor.done(running.begun) else max(now_ns, self._end_of(running))
        return self._schedule(columns.with_others(consumed=consumed), begins_ns)

    def _end_of(self, running: _RunningBatch) -> int:
        return max(running.start_ns, self._end_ns) + running.predicted_ns

    def hold_ns(self, now_ns: int, *, contended: bool = False) -> int:
        """Compute how long the next batch waits for more chunks of live streams; 0 where it runs at once.

        Args:
            now_ns: The time.
            contended: Whether other tables have rows.
        """
        if self._table.chunks == 1 or self._length_costs is not None:
            return 0
        rows, slack_ns = most_urgent(self._columns, now_ns)
        if not rows:
            return 0
        rate = self._row_rate.rate
        return hold_ns(rows, slack_ns, rate, self._budget_ns, self._costs, contended=contended)

    @property
    def gathers(self) -> bool:
        """True if the next batch should have more chunks of live streams, though some have waited already."""
        return self._table.chunks > 1 and self._length_costs is None and is_busy(self._row_rate.rate, self._costs)

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
        table, chunks = self._table, self._table.chunks
        busy_B = table.busy[rows_B]
        from_B = to_B = rows_B
        number_B = None
        if chunks > 1 or self._states is not None:
            number_B = table.consumed[rows_B] + ahead - busy_B
            from_B = rows_B * chunks + number_B % chunks
            to_B = rows_B * chunks + (table.produced[rows_B] + ahead) % chunks
        length_B, fresh_B, last_B = self._begin_rows(rows_B, from_B, busy_B)
        wanted = None
        if self._states is not None:
            assert number_B is not None
            flags_B = self._flat["flags"][from_B]
            # In the place of the state that the slot's stream before has left.
            fresh_B &= flags_B & slots.RESTORES == 0
            self._states.restore(rows_B, flags_B)
            wanted = self._states.wanted(rows_B, flags_B, number_B)
        batch = self._step_input(rows_B, from_B, to_B, length_B, fresh_B, last_B)
        start_ns = self._clock_ns()
        begun, failed_B = begin_isolated(self._executor, batch, adopted=self._adopted)
        if self._states is not None and self._adopted:
            # The device copies them before it runs the next step of these rows.
            self._states.begin(wanted)
        predicted_ns = self._predicted_ns(rows_B, from_B) if self._overlaps else 0
        return _RunningBatch(rows_B, from_B, to_B, busy_B, start_ns, predicted_ns, begun, failed_B, wanted)

    def _begin_rows(
        self, rows_B: Rows, from_B: Rows, busy_B: Rows
    ) -> tuple[Rows, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Note that the streams of rows are run, before they are: one that ends this process must be known then.

        Returns:
            The valid lengths of their chunks, which streams begin, and which end or reset.
        """
        scan = self._columns.scan
        if scan is not None:
            length_B = np.empty(rows_B.size, np.int64)
            fresh_B, last_B = np.empty(rows_B.size, np.bool_), np.empty(rows_B.size, np.bool_)
            scan.begin(rows_B, from_B, busy_B, length_B, fresh_B.view(np.uint8), last_B.view(np.uint8))
            return length_B, fresh_B, last_B
        table = self._table
        flags_B = self._flat["flags"][from_B]
        generation_B = table.generation[rows_B]
        fresh_B = generation_B != table.begun[rows_B]
        if table.chunks > 1:
            # After a chunk that resets. A row that takes another step has begun with its chunk already.
            fresh_B |= (flags_B & slots.FIRST != 0) & (busy_B == 0)
        table.begun[rows_B] = generation_B
        length_B = self._flat["length"][from_B] * (1 - busy_B)
        return length_B, fresh_B, flags_B & (slots.LAST | slots.RESETS) != 0

    def _step_input(
        self,
        rows_B: Rows,
        from_B: Rows,
        to_B: Rows,
        length_B: Rows,
        fresh_B: npt.NDArray[np.bool_],
        last_B: npt.NDArray[np.bool_],
    ) -> StepInput:
        return StepInput(
            slots_B=rows_B,
            chunk_B=self._gather(from_B),
            length_B=length_B,
            fresh_B=fresh_B,
            last_B=last_B,
            from_B=from_B if self._adopted else None,
            to_B=to_B if self._adopted else None,
        )

    def _gather(self, from_B: Rows) -> Array:
        if self._adopted:
            return self._gathered
        if self._record is not None:
            return self._record.gather(self._input, from_B, self._gathered)
        chunk_B = self._gathered[: from_B.size]
        np.take(self._input, from_B, 0, chunk_B, "clip")
        return chunk_B

    def _finish(self, batch: _RunningBatch) -> None:
        table, rows_B = self._table, batch.rows_B
        result, failed_B = self._result(batch)
        end_ns = self._clock_ns()
        # A batch that was begun while another ran had to wait for that one.
        took_ns = end_ns - max(batch.start_ns, self._end_ns)
        self._end_ns = end_ns
        costs, flat = self._length_costs, self._flat
        # Before the results are told: the entries may be written again from then on.
        length = 0 if costs is None else int(flat["length"][batch.from_B].max())
        self._results.write(rows_B, batch.from_B, batch.to_B, batch.busy_B, result, failed_B, batch.start_ns, end_ns)
        if self._states is not None:
            if not self._adopted:
                self._states.begin(batch.wanted)
            self._states.publish()
        self._row_rate.add(rows_B.size, end_ns)
        if costs is None:
            # An improvement may have made smaller batches worth more than this one.
            if rows_B.size <= self._costs.largest:
                self._costs.observe(rows_B.size, took_ns)
            self._costs.publish(table)
        else:
            costs.observe(rows_B.size, length, took_ns)
            costs.publish(table)
            table.uncaptured[0] = self._executor.uncaptured_batches

    def _result(self, batch: _RunningBatch) -> tuple[StepOutput, FailedRows]:
        try:
            return self._executor.finish(batch.begun), batch.failed_B
        except DeviceLost:
            raise
        except Exception:
            # The results are the application's, such as lengths that it may not give; the other requests go on.
            if self._adopted:
                raise
            log.warning("the results of a batch of %d cannot be used; it runs again", batch.rows_B.size)
        length_B, _, last_B = self._begin_rows(batch.rows_B, batch.from_B, batch.busy_B)
        fresh_B = np.ones(batch.rows_B.size, np.bool_)
        again = self._step_input(batch.rows_B, batch.from_B, batch.to_B, length_B, fresh_B, last_B)
        return step_isolated(self._executor, again)

    def _measured_ns(self, rows: int, limit_ns: int) -> npt.NDArray[np.int64]:
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
