"""Cost of an engine tick without the network."""

import sys
import time
from typing import Any, final

import numpy as np

from penstock.core.errors import BenchError
from penstock.core.spec import Array, TensorSpec
from penstock.runtime.executor import Executor, StepInput, StepOutput
from penstock.serve.engine.engine import Engine
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import OK, SlotTable, TableLayout

ROWS = 4096
RUNS = 200
BUDGET_NS = 10**12
INPUT = TensorSpec(dtype="uint8", shape=(28, 28), meaning="784 bytes")
OUTPUT = TensorSpec(dtype="float32", shape=(10,), meaning="ten numbers", name="output")


@final
class _FirstPixel(Executor):
    """Returns the first pixel of each row instead of running a network, so that the gathering can be checked."""

    def __init__(self) -> None:
        self.input, self.output, self.max_rows = INPUT, OUTPUT, ROWS
        self._answer = np.zeros((ROWS, 10), np.float32)

    def step(self, batch: StepInput) -> StepOutput:
        """Copy one number a row."""
        rows = batch.slots_B.size
        self._answer[:rows, 0] = batch.chunk_B[:, 0, 0]
        return StepOutput(output_B=self._answer[:rows])


def engine_and_writer(executor: Executor, layout: TableLayout, costs: Costs) -> tuple[Engine, TableWriter]:
    """Return both sides of a private table, with a budget that no row misses."""
    table = SlotTable.private(layout)
    engine = Engine(executor, table, budget_ns=BUDGET_NS, clock_ns=time.monotonic_ns, costs=costs)
    return engine, TableWriter(table, budget_ns=BUDGET_NS, wake=lambda: None)


@final
class _TickBench:
    def __init__(self) -> None:
        layout = TableLayout(slots=ROWS, chunks=1, input=INPUT, output=OUTPUT)
        self.engine, self.frontend = engine_and_writer(_FirstPixel(), layout, Costs([1, ROWS], [1.0, 2.0]))
        self.wrong = 0

    def fill(self, rows: int) -> None:
        """Submit requests with known answers."""
        for row in range(rows):
            chunk = np.full(INPUT.shape, row % 251, np.uint8)

            def done(status: int, output: Array, last: bool, expected: int = row % 251) -> None:
                self.wrong += status != OK or output[0] != expected or not last

            self.frontend.submit(chunk, done=done, arrival_ns=time.monotonic_ns())

    def collect(self, rows: int) -> None:
        """Collect the answers and check them."""
        taken = self.frontend.collect()
        if taken != rows or self.wrong:
            raise BenchError(f"a tick answered {taken} of {rows} rows and {self.wrong} of them wrongly.")


def us_4096() -> list[float]:
    """Return the microseconds of a tick at 4,096 ready rows."""
    bench = _TickBench()
    times: list[float] = []
    for _ in range(RUNS):
        bench.fill(ROWS)
        start = time.perf_counter_ns()
        bench.engine.tick(time.monotonic_ns())
        times.append((time.perf_counter_ns() - start) / 1e3)
        bench.collect(ROWS)
    return times[RUNS // 10 :]


def calls_ratio() -> list[float]:
    """Return the Python and C calls of a tick at 4,096 ready rows over those at 1."""
    bench = _TickBench()

    def calls(rows: int) -> int:
        bench.fill(rows)
        count = 0

        def profile(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        now_ns = time.monotonic_ns()
        sys.setprofile(profile)
        bench.engine.tick(now_ns)
        sys.setprofile(None)
        bench.collect(rows)
        return count

    calls(1)
    return [calls(ROWS) / calls(1) for _ in range(5)]
