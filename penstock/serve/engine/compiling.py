"""Batches that are compiled while their model is served: each one that is faster is used from then on."""

import asyncio
import logging
import threading
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any, final

from penstock.runtime.runnable import Runnable
from penstock.serve.engine.batch_measurement import count_worthwhile
from penstock.serve.engine.engine import Engine
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.slots import SlotTable

if TYPE_CHECKING:
    # It loads torch, which an engine that runs ONNX Runtime does without.
    from penstock.runtime.gpu.compilation import CompiledBatch
    from penstock.runtime.gpu.compile_ahead import CompileAhead
    from penstock.runtime.gpu.compile_records import CompileRecords

log = logging.getLogger(__name__)

# Host time of a batch besides its graph; the engine follows the real one.
HOST_NS = 60_000


@final
class Compiling:
    """Compiles a model's batches in a thread, from its making on, and publishes the progress in its table.

    Args:
        ahead: Compiles them.
        engine: The engine that serves the model.
        table: Its table.
        runnable: The model.
        max_rows: The largest batch that the engine has memory for.
        max_ns: Where lengths vary, batches that take longer are not worth running.
    """

    def __init__(
        self,
        ahead: "CompileAhead | CompileRecords",
        engine: Engine,
        table: SlotTable,
        runnable: Runnable,
        *,
        max_rows: int = 1 << 30,
        max_ns: float = inf,
    ) -> None:
        self._ahead: Any = ahead
        self._engine, self._table, self._runnable = engine, table, runnable
        self._max_rows, self._max_ns = max_rows, max_ns
        costs = engine.costs
        largest = costs.largest_L if isinstance(costs, LengthCosts) else costs.largest
        self._sizes: list[Any] = self._ahead.sizes(largest)
        self._compiled: list[CompiledBatch] = []
        self._loop = asyncio.get_running_loop()
        self._closed = False
        # What ended it before its time.
        self._failure = ""
        self._describe(done=False)
        # A thread that does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="compiling", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop compiling; the thread ends when it has checked the batch size that it is at."""
        self._closed = True
        self._ahead.close()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread of one that was closed."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            for batch in self._ahead.batches(self._sizes):
                self._call(self._use, batch)
        except Exception as error:
            # The top of this thread: the model is served on as it is.
            log.exception("%s is not compiled further", self._runnable.application.name)
            self._failure = f"{type(error).__name__}: {error}"[:300].rstrip(".")
        self._call(self._end)

    def _call(self, function: Callable[..., None], *given: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *given)
        except RuntimeError:
            # The loop is closed: the server ends.
            self._ahead.close()

    def _use(self, batch: "CompiledBatch") -> None:
        if self._closed:
            return
        self._compiled.append(batch)
        if batch.ms is not None:
            self._improve(batch, batch.ms * 1e6 + HOST_NS)
        self._describe(done=False)

    def _improve(self, batch: "CompiledBatch", ns: float) -> None:
        costs = self._engine.costs
        if not isinstance(costs, LengthCosts):
            self._engine.improve(batch.rows, ns)
        elif batch.level is not None and batch.level < len(costs.grid.edges) and batch.rows <= self._max_rows:
            length = costs.grid.edges[-1 - batch.level]
            costs.improve(batch.rows, length, ns, count_worthwhile if ns <= self._max_ns else None)

    def _end(self) -> None:
        if self._closed:
            return
        self._describe(done=True)
        faster = [batch.rows for batch in self._compiled if batch.ms is not None]
        log.info(
            "%s: %d of %d %s run compiled; %s",
            self._runnable.application.name,
            len(faster),
            len(self._sizes),
            self._ahead.unit,
            self._engine.describe_costs(),
        )

    def _describe(self, *, done: bool) -> None:
        faster = sum(batch.ms is not None for batch in self._compiled)
        doing = "compiled" if done else f"compiled so far, {len(self._sizes) - len(self._compiled)} to come"
        said = f"{self._runnable.runs_by}, {faster} of {len(self._sizes)} {self._ahead.unit} {doing}"
        reason = self._ahead.reason or self._failure
        fallback = f"some batches run uncompiled, often slower, because they cannot be compiled ({reason})."
        self._table.describe(said, " ".join(filter(None, (self._runnable.fallback, fallback if reason else ""))))
