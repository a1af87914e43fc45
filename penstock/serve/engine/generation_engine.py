"""The engine of answers that take steps: rows join and leave a batch of state between steps.

The rows in progress are one batched state and some columns beside it, in the same order: slot, steps taken, maximum of
steps, time of the last output. A tick begins waiting rows or steps all that are in progress, as `schedule_generation`
decides; it makes the same number of Python calls for 1 row as for 256, except where the network raises.

An executor that launches steps (`GeneratingAhead`) always has the next one launched when a tick waits for one, so that
the device does not wait for the host. There a tick steps the rows in progress and begins others beside them; they join
in the first tick that finds them ready.
"""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import final

import numpy as np

from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.runtime.executor import StepOutput
from penstock.runtime.generation.generating import GeneratingAhead, GeneratingInTurn, GenerationStep, Mask
from penstock.serve.engine.engine import Backlog
from penstock.serve.engine.generation_faults import begin_isolated, rejected_rows, step_isolated
from penstock.serve.engine.generation_measurement import measuring_generation
from penstock.serve.engine.generation_scheduler import InProgress, not_busy, schedule_generation
from penstock.serve.engine.results import Wake, announce, finite_rows, no_wake
from penstock.serve.engine.rows_in_progress import NOTHING, Beginning, Launched, RowsInProgress
from penstock.serve.engine.scheduler import NO_ROWS, BatchSchedule, Columns, Rows
from penstock.serve.table import slots
from penstock.serve.table.costs import Costs
from penstock.serve.table.generation_costs import GenerationCosts
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import LengthGrid
from penstock.serve.table.slots import SlotTable

# B rows in progress

NEVER_NS = 1 << 62
# Steps that are launched beside the one whose results the engine waits for.
STEPS_AHEAD = 1


@final
class GenerationEngine:
    """Runs the answers of one table.

    Args:
        executor: The network.
        table: The slots; this engine is the only writer of the engine columns.
        first_budget_ns: Budget from the arrival of a request to its first output.
        step_budget_ns: Budget of each further output.
        clock_ns: The monotonic clock of the deadlines, in nanoseconds.
        max_rows: A limit of the rows in progress below what the budget allows; None for no other.
        costs: Measured costs; None where `measuring` will find them.
        traced: Record queue time and rows of each output, for traces.
        wake: Wakes front-ends in other processes.
    """

    def __init__(
        self,
        executor: GeneratingInTurn | GeneratingAhead,
        table: SlotTable,
        *,
        first_budget_ns: int,
        step_budget_ns: int,
        clock_ns: Callable[[], int],
        max_rows: int | None = None,
        costs: GenerationCosts | None = None,
        traced: bool = False,
        wake: Wake = no_wake,
    ) -> None:
        assert table.chunks == 1, table.chunks
        self._executor, self._table = executor, table
        self._first_budget_ns, self._step_budget_ns = first_budget_ns, step_budget_ns
        self._max_rows = min(max_rows or executor.max_rows, executor.max_rows, table.slots)
        self._clock_ns = clock_ns
        self._traced, self._wake = traced, wake
        self._columns = Columns.of(table)
        self._flat = {
            name: getattr(table, name).reshape(-1) for name in ("output_length", "status", "queue_ns", "batch_rows")
        }
        self._output = table.output.reshape(-1, *table.layout.output.shape)
        spec = table.layout.output
        self._numbers = spec.size
        self._checks_finite = spec.takes_nan
        self.progress = NOTHING
        # Rows that begin in the next tick, and those that have begun and not joined.
        self._chosen = NO_ROWS
        self._beginning: deque[Beginning] = deque()
        self._launched: deque[Launched] = deque()
        self._end_ns = 0
        beside = isinstance(executor, GeneratingAhead)
        self.costs = costs or GenerationCosts(self._unknown(), Costs([1], [0.0]), 1.0, beside=beside)
        self.costs.publish(table)

    def _unknown(self) -> Costs | LengthCosts:
        grid = LengthGrid.of(self._table.layout.input)
        return Costs([1], [0.0]) if grid is None else LengthCosts(grid, [1], np.zeros((len(grid.edges), 1)))

    def measuring(self, example: Array) -> Generator[None]:
        """Measure both functions on this machine and choose the most rows in progress; yield before each measurement.

        Args:
            example: One realistic raw input chunk.

        Raises:
            ServeError: The network alone is slower than a budget.
        """
        self.costs = yield from measuring_generation(
            self._executor,
            example,
            max_rows=self._max_rows,
            first_budget_ns=self._first_budget_ns,
            step_budget_ns=self._step_budget_ns,
            clock_ns=self._clock_ns,
        )
        self.costs.publish(self._table)

    def describe_costs(self) -> str:
        """The times of one row and of the most rows, for the log."""
        step, most = self.costs.step, self.costs.max_rows
        length = self.costs.begin.grid.longest if isinstance(self.costs.begin, LengthCosts) else 0
        return (
            f"beginning 1 row {self.costs.begin_ns(1, length) / 1e6:.2f} ms; a step of 1 row {step.of(1) / 1e6:.2f} "
            f"ms, of {most} rows {step.of(most) / 1e6:.2f} ms"
        )

    @property
    def running(self) -> bool:
        """False: each tick finishes what it begins."""
        return False

    def tick(self, now_ns: int) -> BatchSchedule:
        """Begin waiting rows, or step those in progress; an executor that launches steps does both.

        Args:
            now_ns: The time.

        Returns:
            The rows that began or were stepped, those that expired, and the number of rows that wait.
        """
        self._join_ready()
        cancelled = self._drop_cancelled()
        self._launch_ahead()
        began, self._chosen = self._chosen, NO_ROWS
        if began.size:
            self._begin(began)
        chosen = schedule_generation(
            not_busy(self._columns), self._table.length, now_ns, self._in_progress(), self.costs
        )
        if chosen.expire.size:
            self._fail(chosen.expire, slots.EXPIRED, taken=True)
        if chosen.begin.size and chosen.step and self.costs.beside:
            # A tick that chooses rows and begins them too would take longer than a step.
            self._chosen = chosen.begin
        elif chosen.begin.size:
            self._begin(chosen.begin)
            began = chosen.begin
        run = self._step() if chosen.step else began
        self._table.in_progress[0] = self.progress.rows + self._rows_beginning
        return BatchSchedule(run, np.concatenate([chosen.expire, cancelled]), chosen.waiting)

    def backlog(self, now_ns: int) -> Backlog:
        """Predict the work of the next tick: a step of the rows in progress, and of those that wait."""
        table, rows = self._table, self.progress.rows + self._rows_beginning
        waiting = (table.submitted != table.consumed).nonzero()[0]
        if not rows + waiting.size:
            return Backlog(0, 0, 0, 0)
        batch_ns = self.costs.step_ns(rows + 1)
        due_ns = self._in_progress().due_ns
        work_ns = batch_ns if rows else 0
        if waiting.size:
            longest = int(table.length[waiting].max())
            begin_ns = self.costs.begin_ns(waiting.size, longest)
            due_ns = min(due_ns, int(table.deadline_ns[waiting, 0].min()) - begin_ns)
            batch_ns = max(batch_ns, begin_ns)
            work_ns += begin_ns
        return Backlog(rows + waiting.size, due_ns - now_ns - batch_ns, batch_ns, work_ns)

    def publish_other_tables(self, work_ns: int, share: float) -> None:
        """Publish the load of the device's other tables, see `Engine.publish_other_tables`."""
        self._table.other_tables_ns[0] = work_ns
        self._table.other_tables_share[0] = int(share * 1000)

    @property
    def _rows_beginning(self) -> int:
        return sum(each.slot_B.size for each in self._beginning)

    def _in_progress(self) -> InProgress:
        progress = self.progress
        due_ns = int(progress.last_ns_B.min()) + self._step_budget_ns if progress.rows else NEVER_NS
        return InProgress(progress.rows, due_ns, self._rows_beginning)

    def _begin(self, rows_B: Rows) -> None:
        table, spec, start_ns = self._table, self._table.layout.input, self._clock_ns()
        if isinstance(spec, RecordSpec):
            chunk_B = spec.gather(table.input[:, 0], rows_B, spec.empty(rows_B.size))
        else:
            chunk_B = table.input[rows_B, 0]
        table.begun[rows_B] = table.generation[rows_B]
        begun, failed_B = begin_isolated(self._executor, chunk_B)
        if failed_B.any():
            self._fail(rows_B[failed_B], slots.FAILED, taken=True)
            rows_B, chunk_B = rows_B[~failed_B], chunk_B[~failed_B]
        if not begun:
            return
        # In this order: a front-end that sees the chunk consumed also sees that the row is busy.
        table.busy[rows_B] = 1
        table.consumed[rows_B] += 1
        arrival_ns_B = table.arrival_ns[rows_B, 0]
        counts = np.bincount(np.searchsorted(slots.TIME_EDGES_NS, start_ns - arrival_ns_B))
        table.queue_counts[: counts.size] += counts
        table.sums[1] += (start_ns - arrival_ns_B).sum()
        beginning = Beginning(begun, rows_B, self._executor.limits(chunk_B))
        if isinstance(self._executor, GeneratingAhead):
            self._beginning.append(beginning)
            return
        self._join(beginning)
        self._observe_begin(rows_B, self._clock_ns() - start_ns)

    def _join_ready(self) -> None:
        """Let the rows join that have begun; where none is in progress, wait for them."""
        executor = self._executor
        while self._beginning and isinstance(executor, GeneratingAhead):
            if self.progress.rows and not all(map(executor.is_ready, self._beginning[0].begun)):
                return
            beginning = self._beginning.popleft()
            failed_B = rejected_rows(executor, beginning.begun)
            if failed_B.any():
                self._fail(beginning.slot_B[failed_B], slots.FAILED, taken=False)
                beginning = beginning.without(failed_B)
            if beginning.slot_B.size:
                self._join(beginning)

    def _join(self, beginning: Beginning) -> None:
        before, slot_B = self.progress, beginning.slot_B
        if before.state is None:
            # Steps of rows that have all left.
            self._launched.clear()
        in_progress = [] if before.state is None else [before.state]
        self.progress = RowsInProgress(
            state=self._executor.join([*in_progress, *beginning.begun]),
            slot_B=np.concatenate([before.slot_B, slot_B]),
            steps_B=np.concatenate([before.steps_B, np.zeros(slot_B.size, np.int64)]),
            limit_B=np.concatenate([before.limit_B, beginning.limit_B]),
            # The rows that just began are due a step after this.
            last_ns_B=np.concatenate([before.last_ns_B, np.full(slot_B.size, self._clock_ns())]),
        )

    def _observe_begin(self, rows_B: Rows, took_ns: int) -> None:
        begin = self.costs.begin
        if isinstance(begin, LengthCosts):
            begin.observe(rows_B.size, int(self._table.length[rows_B].max()), took_ns)
        else:
            begin.observe(rows_B.size, took_ns)
        self.costs.publish(self._table)

    def _step(self) -> Rows:
        table = self._table
        result, failed_B, start_ns = self._stepped()
        end_ns = self._clock_ns()
        # Without the rows that joined after the launch.
        progress = self.progress.first(result.done_B.size)
        steps_B, slot_B = progress.steps_B + 1, progress.slot_B
        status_B = np.full(slot_B.size, slots.OK, np.int64)
        if self._checks_finite:
            finite_B = finite_rows(table.layout.output, StepOutput(output_B=result.output_B))
            if finite_B is not None:
                status_B[~finite_B] = slots.NOT_FINITE
        status_B[failed_B] = slots.FAILED
        cut_B = ~result.done_B & (result.full_B | (steps_B >= progress.limit_B))
        status_B[cut_B & (status_B == slots.OK)] = slots.CUT
        over_B = result.done_B | (status_B != slots.OK)
        self._count(progress, over_B, status_B, start_ns, end_ns)
        self._publish(slot_B, over_B, status_B, result.output_B, start_ns)
        later = slice(slot_B.size, None)
        after = replace(
            self.progress,
            state=result.state,
            steps_B=np.concatenate([steps_B, self.progress.steps_B[later]]),
            last_ns_B=np.concatenate([np.full(slot_B.size, end_ns), self.progress.last_ns_B[later]]),
        )
        self.progress = self._without(after, np.concatenate([over_B, np.zeros(after.rows - over_B.size, np.bool_)]))
        # In turn, with the rows that leave, which a step always has to move.
        took_ns = (end_ns if self.costs.beside else self._clock_ns()) - start_ns
        self.costs.step.observe(slot_B.size, took_ns)
        self.costs.publish_step(table)
        return slot_B

    def _launch_ahead(self) -> None:
        """Launch steps first of all, so that the device goes on while the host decides what begins."""
        executor, state = self._executor, self.progress.state
        while isinstance(executor, GeneratingAhead) and state is not None and len(self._launched) <= STEPS_AHEAD:
            self._launched.append(Launched(executor.launch(state), self._clock_ns()))

    def _stepped(self) -> tuple[GenerationStep, Mask, int]:
        """Return the next step of rows in progress, the rows that failed in it, and its start."""
        executor, state, start_ns = self._executor, self.progress.state, self._clock_ns()
        assert state is not None
        if isinstance(executor, GeneratingInTurn):
            return *step_isolated(executor, state), start_ns
        while True:
            launched = self._launched.popleft()
            result = executor.finish(launched.handle, state)
            # It ran when the one before it had ended.
            start_ns, self._end_ns = max(launched.start_ns, self._end_ns), self._clock_ns()
            # All its rows may have left since; the last step was launched for those that are here.
            if result.done_B.size:
                return result, np.zeros(result.done_B.size, np.bool_), start_ns

    def _publish(self, slot_B: Rows, over_B: Mask, status_B: Rows, output_B: Array, start_ns: int) -> None:
        table = self._table
        to_B = slot_B * table.results + table.produced[slot_B] % table.results
        self._output[to_B] = output_B
        self._flat["output_length"][to_B] = self._numbers
        self._flat["status"][to_B] = status_B
        if self._traced:
            self._flat["queue_ns"][to_B] = start_ns - table.arrival_ns[slot_B, 0]
            self._flat["batch_rows"][to_B] = slot_B.size
        self._announce(slot_B, over_B)

    def _announce(self, slot_B: Rows, over_B: Mask, *, taken: bool = False) -> None:
        """Publish a result of each row, which for some is the last; `taken` if it takes their chunk in as well."""
        table = self._table
        # In this order: a front-end that sees a row neither busy nor waiting also sees its last result.
        table.produced[slot_B] += 1
        table.busy[slot_B[over_B]] = 0
        table.consumed[slot_B] += taken
        announce(table, slot_B, self._wake)

    def _fail(self, rows_B: Rows, status: int, *, taken: bool) -> None:
        """Give rows a last result without an output.

        Args:
            rows_B: Their slots.
            status: The result's status.
            taken: Whether their chunk has yet to be taken in.
        """
        table = self._table
        to_B = rows_B * table.results + table.produced[rows_B] % table.results
        self._flat["output_length"][to_B] = 0
        self._flat["status"][to_B] = status
        self._flat["batch_rows"][to_B] = 0
        table.outcomes[status] += rows_B.size
        self._announce(rows_B, np.ones(rows_B.size, np.bool_), taken=taken)

    def _drop_cancelled(self) -> Rows:
        """Let the rows leave whose clients are gone."""
        progress = self.progress
        cancelled_B = self._table.deadline_ns[progress.slot_B, 0] == slots.CANCELLED_NS
        if not cancelled_B.any():
            return NO_ROWS
        gone = progress.slot_B[cancelled_B]
        self.progress = self._without(progress, cancelled_B)
        self._fail(gone, slots.EXPIRED, taken=False)
        return gone

    def _without(self, progress: RowsInProgress, over_B: Mask) -> RowsInProgress:
        if not over_B.any():
            return progress
        if over_B.all():
            return NOTHING
        assert progress.state is not None
        state, order = self._executor.keep(progress.state, ~over_B)
        columns = (progress.slot_B, progress.steps_B, progress.limit_B, progress.last_ns_B)
        slot_B, steps_B, limit_B, last_ns_B = (column[order] for column in columns)
        return RowsInProgress(state=state, slot_B=slot_B, steps_B=steps_B, limit_B=limit_B, last_ns_B=last_ns_B)

    def _count(self, progress: RowsInProgress, over_B: Mask, status_B: Rows, start_ns: int, end_ns: int) -> None:
        table, rows = self._table, progress.rows
        arrival_ns_B = table.arrival_ns[progress.slot_B, 0]
        first_B = progress.steps_B == 0
        latency_B, between_B = end_ns - arrival_ns_B, end_ns - progress.last_ns_B
        table.batch_counts[np.searchsorted(slots.BATCH_EDGES, rows)] += 1
        for counts, times_B in (
            (table.first_counts, latency_B[first_B]),
            (table.step_counts, between_B[~first_B]),
            (table.latency_counts, latency_B[over_B]),
            (table.compute_counts, np.full(np.count_nonzero(over_B), end_ns - start_ns)),
        ):
            # Usually no row is at its first step, and few end.
            if not times_B.size:
                continue
            counts += np.bincount(np.searchsorted(slots.TIME_EDGES_NS, times_B), minlength=counts.size)
        table.generated += (rows, latency_B[first_B].sum(), between_B[~first_B].sum())
        answers = int(np.count_nonzero(over_B))
        table.sums += (answers, 0, (end_ns - start_ns) * answers, latency_B[over_B].sum())
        good_B = over_B & ((status_B == slots.OK) | (status_B == slots.CUT))
        table.outcomes[slots.OK] += np.count_nonzero(good_B)
        for status in (slots.FAILED, slots.NOT_FINITE):
            table.outcomes[status] += np.count_nonzero(status_B == status)
        table.outcomes[4] += np.count_nonzero(first_B & (end_ns > table.deadline_ns[progress.slot_B, 0]))
        if answers:
            self.costs.observe_answer(float((progress.steps_B[over_B] + 1).mean()), answers)
