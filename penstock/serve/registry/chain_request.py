"""One request of a chain on its way through the steps."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from penstock.core.chains.chain_run import FunctionCall, PartRows, Progress, Row
from penstock.core.errors import ComputeFailed, RequestError, TooLate
from penstock.core.spec import Array
from penstock.serve.frontend.function_pool import FunctionJob, log_cause
from penstock.serve.frontend.table_writer import Done, SlotHandle
from penstock.serve.registry.chain_steps import ChainSteps
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.registry.whole_answer import GOOD, WholeAnswer
from penstock.serve.table.slots import ANSWERED

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step that a request went through.

    Args:
        name: Its name.
        duration_ns: Its time.
        rows: Inputs of the part; 0 for a function.
        error: Why it ended the request; None if it did not.
        results: Answers of the part; None for a row that was rejected.
    """

    name: str
    duration_ns: int
    rows: int
    error: RequestError | None
    results: Sequence[Array | None] = ()


Observe = Callable[[StepReport], None]
# The part, the status of the result, one output, given flat, and whether it is the last.
StreamOutput = Callable[[ServedModel, int, Array, bool], None]
# The output chunk, or the error and the step that it came from, -1 for the chain's own.
RunDone = Callable[[Array | RequestError, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTerms:
    """The terms of a request.

    Args:
        arrival_ns: Its arrival time.
        budget_ns: Its latency budget.
        low_priority: Whether it runs after the others.
        observe: Called after each step; may be None.
        stream: Takes each output of a last part whose answers take steps; None for a whole answer.
        every_part: Whether it takes those of the parts before, too. The rows of an `each` have no outputs there.
    """

    arrival_ns: int
    budget_ns: int
    low_priority: bool
    observe: Observe | None = None
    stream: StreamOutput | None = None
    every_part: bool = False


@final
@dataclass(eq=False, slots=True)
class ChainRun:
    """One input on its way through the steps of a chain.

    Args:
        steps: The steps.
        terms: The terms of the request.
        finished: Called once with the output or the error, unless it is cancelled.

    Attributes:
        ended: Why the answer of its last step ended, if that is a part whose answers take steps; else empty.
    """

    steps: ChainSteps
    terms: RequestTerms
    finished: RunDone
    ended: str = field(init=False, default="")
    _progress: Progress = field(init=False)
    _over: bool = field(init=False, default=False)
    _step: int = field(init=False, default=-1)
    _started_ns: int = field(init=False, default=0)
    _job: FunctionJob | None = field(init=False, default=None)
    _timer: asyncio.TimerHandle | None = field(init=False, default=None)
    # Of the part that runs now: chunks that wait, slots, results.
    _waiting: list[tuple[int, Array]] = field(init=False, default_factory=list[tuple[int, Array]])
    _handles: dict[int, SlotHandle] = field(init=False, default_factory=dict[int, SlotHandle])
    _results: list[Array | None] = field(init=False, default_factory=list[Array | None])
    _left: int = field(init=False, default=0)
    _deadline_ns: int = field(init=False, default=0)
    # Why its deadline is before the request's; empty where the rest fits.
    _squeeze: str = field(init=False, default="")

    def start(self, chunk: Array) -> None:
        """Begin with the first step."""
        self._progress = self.steps.plan.steps(chunk)
        self._advance(None)

    def cancel(self) -> None:
        """Cancel all work that has not run, and make no more callbacks."""
        self._over = True
        if self._job is not None:
            self._job.cancel()
        self._stop_timer()
        for handle in list(self._handles.values()):
            handle.cancel()
        self._handles.clear()
        self._waiting.clear()

    def _advance(self, value: Any) -> None:
        if self._over:
            return  # the observer cancelled it
        try:
            request = self._progress.send(value)
        except StopIteration as done:
            self._over = True
            self.finished(done.value, -1)
        except RequestError as error:
            log_cause(self.steps.plan.chain.name, error)
            self._end(error, -1)
        else:
            self._step, self._started_ns = request.step, self.steps.now_ns()
            if isinstance(request, FunctionCall):
                self._start_job(request.function, self._called)
            else:
                self._begin_part(request)

    def _start_job(self, function: Callable[[], Any], done: Callable[[Any], None]) -> None:
        def ended(found: Any, own_ns: int) -> None:
            self._job = None
            self._stop_timer()
            done(found)

        left_ns = max(0, self.terms.arrival_ns + self.terms.budget_ns - self.steps.now_ns())
        self._job = FunctionJob(self._step, function, ended, left_ns)
        try:
            self.steps.pool.submit(self._job)
        except RequestError as error:
            self._fail(error)
            return
        # A thread cannot be stopped, but nobody waits for it longer than the budget.
        self._timer = asyncio.get_running_loop().call_later(left_ns / 1e9, self._expire)

    def _expire(self) -> None:
        budget_ms, name = self.terms.budget_ns / 1e6, self.steps.name_of(self._step)
        error = TooLate(f"Deadline of {budget_ms:g} ms exceeded in step {name!r}; come back later.", 1.0)
        self._report(0, error)
        self._end(error, self._step)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _called(self, found: Any) -> None:
        if isinstance(found, RequestError):
            self._report(0, found)
            self._end(found, self._step)
        else:
            self._report(0, None)
            self._advance(found)

    def _begin_part(self, request: PartRows) -> None:
        count = len(request.rows)
        self._results, self._left = [None] * count, count
        if not count:
            self.steps.observe(self._step, 0, 0)
            self._report(0, None)
            self._advance([])
            return
        try:
            part = self.steps.part(self._step)
            self._deadline_ns = self._step_deadline_ns()
        except RequestError as error:
            self._fail(error)
            return
        if any(row.is_raw for row in request.rows):
            self._start_job(partial(_prepared, part, request.rows), partial(self._submit_all, part))
        else:
            self._submit_all(part, [row.array for row in request.rows])

    def _step_deadline_ns(self) -> int:
        """Deadline of this step: the request's, less the predicted time of the steps after it."""
        terms, now_ns = self.terms, self.steps.now_ns()
        deadline_ns = terms.arrival_ns + terms.budget_ns
        own_ns, rest_ns = self.steps.rest_ns(self._step, terms.low_priority)
        left_ns, self._squeeze = max(0, deadline_ns - now_ns), ""
        if own_ns + rest_ns <= left_ns:
            return deadline_ns - rest_ns
        if self.steps.is_idle(self._step, terms.low_priority):
            # The later steps' times may be wrong, and only a request that reaches them can correct these.
            return deadline_ns
        # Too little time: the steps share it in proportion to their predicted times.
        share_ns = left_ns * own_ns // max(1, own_ns + rest_ns)
        if self._step + 1 < self.steps.count:
            slow, slow_ns = self.steps.slowest(self._step + 1, terms.low_priority)
            self._squeeze = (
                f" It had {share_ns / 1e6:.1f} of the {left_ns / 1e6:.1f} ms that were left, since step {slow!r} is "
                f"expected to take {slow_ns / 1e6:.0f} ms."
            )
        return now_ns + share_ns

    def _submit_all(self, part: ServedModel, chunks: Any) -> None:
        if isinstance(chunks, RequestError):
            self._fail(chunks)
            return
        self._waiting = []
        step, lengths = self._step, [0]
        for index, chunk in enumerate(chunks):
            if isinstance(chunk, RequestError):
                self._row_ended(index, chunk)
                if self._left_step(step):
                    return
            else:
                lengths.append(part.length_of(chunk))
                self._waiting.append((index, chunk))
        self.steps.observe(self._step, len(chunks), max(lengths))
        self._submit_waiting(part)

    def _submit_waiting(self, part: ServedModel) -> None:
        step = self._step
        # At most as many rows at once as a request may have: the others follow as these end.
        while not self._left_step(step) and self._waiting and len(self._handles) < part.max_rows:
            index, chunk = self._waiting.pop(0)
            first = self._step == 0
            start_ns = self.terms.arrival_ns if first else self._started_ns
            try:
                self._handles[index] = part.submit(
                    chunk,
                    self._done_of(part, index),
                    start_ns,
                    max(1, self._deadline_ns - start_ns),
                    self.terms.low_priority,
                )
            except RequestError as error:
                part.count_rejection(error)
                self._row_ended(index, error)

    def _done_of(self, part: ServedModel, index: int) -> Done:
        if part.application.generate is None:
            return partial(self._row_done, part, index)

        def whole_done(status: int, answer: Array, ended: str) -> None:
            if self._step == self.steps.count - 1:
                self.ended = ended
            self._row_done(part, index, status, answer, True)

        whole = WholeAnswer(part.application, whole_done)
        stream, each = self.terms.stream, self.steps.plan.chain.steps[self._step].each
        if stream is None or each is not None or not (self.terms.every_part or self._step == self.steps.count - 1):
            return whole

        def both(status: int, output: Array, last: bool) -> None:
            if status in GOOD:
                stream(part, status, output, last)
            whole(status, output, last)

        return both

    def _row_done(self, part: ServedModel, index: int, status: int, output: Array, last: bool) -> None:
        self._handles.pop(index, None)
        step = self._step
        if status in GOOD:
            part.counts[ANSWERED] += 1
            # The output is a view of the table.
            self._row_ended(index, output.copy())
        else:
            error = part.error_of(status, self.terms.budget_ns)
            part.count_rejection(error)
            self._row_ended(index, error)
        if not self._left_step(step):
            self._submit_waiting(part)

    def _left_step(self, step: int) -> bool:
        return self._over or self._step != step

    def _row_ended(self, index: int, result: Array | RequestError) -> None:
        if self._over:
            return
        if not isinstance(result, RequestError):
            self._results[index] = result
        elif not self.steps.plan.chain.steps[self._step].partial:
            self._fail(result)
            return
        self._left -= 1
        if self._left == 0:
            results = self._results
            self._report(len(results), None, results)
            self._advance(results)

    def _fail(self, error: RequestError) -> None:
        error = self.steps.of_step(error, self._step)
        if isinstance(error, TooLate) and self._squeeze:
            error = TooLate(f"{error}{self._squeeze}", error.retry_after_s)
        self._report(len(self._results), error)
        self._end(error, self._step)

    def _report(self, rows: int, error: RequestError | None, results: Sequence[Array | None] = ()) -> None:
        if self.terms.observe is not None:
            self.terms.observe(
                StepReport(
                    name=self.steps.name_of(self._step),
                    duration_ns=self.steps.now_ns() - self._started_ns,
                    rows=rows,
                    error=error,
                    results=results,
                )
            )

    def _end(self, error: RequestError, step: int) -> None:
        if not self._over:
            self.cancel()
            self.finished(error, step)


def _prepared(part: ServedModel, rows: list[Row]) -> list[Array | RequestError]:
    """Prepare the raw arrays among some rows."""
    pool = part.decode_pool
    found: list[Array | RequestError] = []
    for row in rows:
        try:
            assert pool is not None or not row.is_raw, part.name
            found.append(pool.prepare(row.array) if pool is not None and row.is_raw else row.array)
        except RequestError as error:
            found.append(error)
        except (Exception, SystemExit):
            log.exception("the prepare of %r raised; that row alone fails", part.name)
            found.append(ComputeFailed("The application's prepare failed on this input; the server's log says how."))
    return found
