"""Measurement of batches at start: the time of each size, and the largest that is worth running."""

from collections.abc import Callable, Generator

import numpy as np
import numpy.typing as npt

from penstock.core.errors import ServeError
from penstock.serve.table.costs import OVERHEAD_NS, Costs

# A new request waits for the running batch and then for its own, so neither may take more than half the budget.
MAX_BUDGET_SHARE = 0.5
# A larger batch must raise the rows per second by this factor to be worth its latency.
MIN_GAIN = 1.02
MEASURED_RUNS = 5
MEASURING_NS = 700_000_000


def measuring_batches(
    sizes: list[int],
    measured_ns: Callable[[int, int], npt.NDArray[np.int64]],
    *,
    budget_ns: int,
    clock_ns: Callable[[], int],
) -> Generator[None, None, Costs]:
    """Measure batch sizes, and choose the largest that is worth running; yield before each.

    Args:
        sizes: The sizes, the smallest first.
        measured_ns: Returns times of a size, for about so many nanoseconds.
        budget_ns: The latency budget.
        clock_ns: The clock.

    Raises:
        ServeError: One row takes longer than the budget.
    """
    rows: list[int] = []
    medians: list[float] = []
    least_ns = 0.0
    end_ns = clock_ns() + MEASURING_NS
    for size in sizes:
        yield
        times_ns = measured_ns(size, MEASURING_NS // 4)
        if not rows:
            least_ns = float(times_ns.min())
            check_budget(least_ns, "one request", budget_ns)
        elif np.median(times_ns) > budget_ns * MAX_BUDGET_SHARE:
            break
        rows.append(size)
        medians.append(float(np.median(times_ns)))
        if clock_ns() > end_ns:
            break
    worth = count_worthwhile(rows, medians)
    return Costs(rows[:worth], medians[:worth], min_compute_ns=least_ns)


def check_budget(least_ns: float, of: str, budget_ns: int) -> None:
    """Refuse a network that is slower than the budget.

    Args:
        least_ns: Its shortest time.
        of: What takes it, for the message.
        budget_ns: The latency budget.

    Raises:
        ServeError: It is slower.
    """
    if least_ns > budget_ns:
        raise ServeError(
            f"the network takes {least_ns / 1e6:.1f} ms for {of} on this machine, more than the latency budget of "
            f"{budget_ns / 1e6:g} ms; raise --latency-ms or use a smaller network."
        )


def batch_sizes(largest: int) -> list[int]:
    """The batch sizes that are measured: powers of two, and the largest."""
    powers = [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent <= largest]
    return powers if powers[-1] == largest else [*powers, largest]


def count_worthwhile(rows: list[int], ns: list[float]) -> int:
    """Count the sizes worth running: up to the last that answers more rows per second than all before it."""
    best, worth = 0.0, 1
    for index, rate in enumerate(size / (each_ns + OVERHEAD_NS) for size, each_ns in zip(rows, ns, strict=True)):
        if rate > best * MIN_GAIN:
            best, worth = rate, index + 1
    return worth
