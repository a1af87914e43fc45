"""Measurement of answers that take steps, at start: beginning rows, and a step of rows in progress."""

from collections.abc import Callable, Generator

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ServeError
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.runtime.generation.generating import Generating, GeneratingAhead
from penstock.serve.engine.batch_measurement import (
    MAX_BUDGET_SHARE,
    MEASURED_RUNS,
    MEASURING_NS,
    batch_sizes,
    count_worthwhile,
)
from penstock.serve.engine.length_measurement import measuring_lengths
from penstock.serve.table.costs import Costs
from penstock.serve.table.generation_costs import GenerationCosts
from penstock.serve.table.length_costs import LengthCosts
from penstock.serve.table.lengths import LengthGrid

Times = npt.NDArray[np.int64]

# Requests whose answers begin together, at most: more make those in progress wait for long.
MAX_BEGIN_ROWS = 32
# Times the time to begin one request, which is left in the budget of a step.
MARGIN = 1.5
# Where rows begin beside the steps, the share of a step's budget that a measured step may take.
BESIDE_SHARE = 0.9
# There, steps that are measured as one: rows do not begin beside each of them.
STEPS_TOGETHER = 8


def measuring_generation(
    executor: Generating,
    example: Array,
    *,
    max_rows: int,
    first_budget_ns: int,
    step_budget_ns: int,
    clock_ns: Callable[[], int],
) -> Generator[None, None, GenerationCosts]:
    """Measure both functions of a network; yield before each measurement.

    Args:
        executor: The network.
        example: One realistic raw input chunk.
        max_rows: The most rows that may be in progress.
        first_budget_ns: Budget of the first output.
        step_budget_ns: Budget of each further output.
        clock_ns: The clock.

    Raises:
        ServeError: The network alone is slower than a budget.
    """

    def begin_ns(chunk: Array, rows: int, limit_ns: int) -> Times:
        chunk_B = np.repeat(np.asarray(chunk).reshape(1, *executor.input.shape), rows, 0)
        return _timed(lambda: executor.begin_alone(chunk_B), clock_ns, limit_ns)

    begin = yield from _measuring_begin(executor, example, min(max_rows, MAX_BEGIN_ROWS), first_budget_ns, begin_ns)
    one_ns = begin.of(1, begin.grid.longest) if isinstance(begin, LengthCosts) else begin.of(1)
    beside = isinstance(executor, GeneratingAhead)
    # A request must be able to begin before a step without making it late; where that takes long, half of it is left.
    max_ns = max(step_budget_ns * MAX_BUDGET_SHARE, step_budget_ns - MARGIN * one_ns)
    if beside:
        max_ns = step_budget_ns * BESIDE_SHARE
    step = yield from _measuring_steps(executor, example, max_rows, step_budget_ns, max_ns, clock_ns)
    alone = begin.min_compute_L[0] if isinstance(begin, LengthCosts) else begin.min_compute_ns
    _check_budget("the first output of one request", alone + step.min_compute_ns, first_budget_ns, "first_ms")
    # Nothing is known of the answers yet; the half of the most is on the safe side.
    return GenerationCosts(begin, step, max(1.0, executor.max_steps / 2), beside=beside)


def _measuring_begin(
    executor: Generating, example: Array, max_rows: int, budget_ns: int, begin_ns: Callable[[Array, int, int], Times]
) -> Generator[None, None, Costs | LengthCosts]:
    sizes, max_ns = batch_sizes(max_rows), budget_ns * MAX_BUDGET_SHARE
    grid = LengthGrid.of(executor.input)
    if grid is not None:
        assert isinstance(executor.input, RecordSpec)
        return (
            yield from measuring_lengths(
                grid, executor.input, example, sizes, begin_ns, count_worthwhile, max_ns=max_ns, limit_ns=MEASURING_NS
            )
        )
    times: list[Times] = []
    for rows in sizes:
        yield
        measured = begin_ns(example, rows, MEASURING_NS // 4)
        if times and np.median(measured) > max_ns:
            break
        times.append(measured)
    medians = [float(np.median(each)) for each in times]
    worth = count_worthwhile(sizes[: len(medians)], medians)
    return Costs(sizes[:worth], medians[:worth], min_compute_ns=float(times[0].min()))


def _measuring_steps(
    executor: Generating,
    example: Array,
    max_rows: int,
    budget_ns: int,
    max_ns: float,
    clock_ns: Callable[[], int],
) -> Generator[None, None, Costs]:
    sizes, medians, least_ns = batch_sizes(max_rows), [], 0.0
    together = STEPS_TOGETHER if isinstance(executor, GeneratingAhead) else 1
    end_ns = clock_ns() + MEASURING_NS
    for rows in sizes:
        yield
        step = executor.rehearsal(example, rows)
        times = _timed(lambda: [step() for _ in range(together)], clock_ns, MEASURING_NS // 4) / together  # noqa: B023
        if not medians:
            least_ns = float(times.min())
            _check_budget("a step of one request", least_ns, budget_ns, "step_ms")
        elif np.median(times) > max_ns:
            break
        medians.append(float(np.median(times)))
        if clock_ns() > end_ns:
            break
    worth = count_worthwhile(sizes[: len(medians)], medians)
    return Costs(sizes[:worth], medians[:worth], min_compute_ns=least_ns)


def _timed(run: Callable[[], object], clock_ns: Callable[[], int], limit_ns: int) -> Times:
    times: list[int] = []
    # The first run of a size allocates and does not count; a slow network gets fewer runs.
    while len(times) <= MEASURED_RUNS and sum(times) < limit_ns:
        start_ns = clock_ns()
        run()
        times.append(clock_ns() - start_ns)
    return np.array(times[1:] or times)


def _check_budget(of: str, ns: float, budget_ns: int, field: str) -> None:
    if ns > budget_ns:
        raise ServeError(
            f"the network takes {ns / 1e6:.1f} ms for {of} on this machine, more than the budget of "
            f"{budget_ns / 1e6:g} ms; raise {field} of the application's Generate (or --latency-ms, where it has "
            f"none), or use a smaller network."
        )
