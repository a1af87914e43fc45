"""A server as the simulation knows it: measured costs, and what admission control makes of them."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import BenchError
from penstock.serve.engine.batch_measurement import MAX_BUDGET_SHARE, count_worthwhile
from penstock.serve.frontend.admission import admits
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import MAX_COSTS

Floats = npt.NDArray[np.float64]

# Rows ahead that a prediction is tabulated for: more never wait at one server.
MAX_WAITING = 65_536
MAX_STREAMS = 1 << 24
# Beyond this, the median of a batch's time is an eighth of its mean.
MAX_JITTER = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerModel:
    """One server of a fleet: an engine, its front-ends and its network.

    Args:
        rows: Measured batch sizes, ascending from 1.
        ms: The network's time for each, in milliseconds.
        handling_us: Engine time to read and answer one row, as in the costs of `/v1/stats`.
        frontend_us: Front-end processor time of a request or chunk.
        frontend_cores: Cores of the front-ends.
        message_bytes: Bytes of a request or chunk, headers included.
        gigabits: Incoming bandwidth in Gbit/s.
        jitter: Standard deviation of the logarithm of a batch's time over its cost, unknown to the scheduler.
    """

    rows: Sequence[int]
    ms: Sequence[float]
    handling_us: float = 0.0
    frontend_us: float = 0.0
    frontend_cores: float = 1.0
    message_bytes: float = 0.0
    gigabits: float = 25.0
    jitter: float = 0.05

    def __post_init__(self) -> None:
        rows, ms = list(self.rows), list(self.ms)
        if not rows or len(rows) != len(ms) or len(rows) > MAX_COSTS:
            raise BenchError(f"costs have {len(rows)} sizes and {len(ms)} times; give 1 to {MAX_COSTS} of each.")
        if rows[0] != 1 or any(after <= before for before, after in pairwise(rows)):
            raise BenchError(f"batch sizes are {rows}; give them ascending, the first of them 1.")
        if rows[-1] > MAX_WAITING:
            raise BenchError(f"the largest batch has {rows[-1]:,} rows; give at most {MAX_WAITING:,}.")
        if not all(math.isfinite(value) and value > 0 for value in ms):
            raise BenchError(f"batch times are {ms} ms; each must be above 0.")
        for name in ("handling_us", "frontend_us", "message_bytes", "jitter"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise BenchError(f"{name} is {getattr(self, name):g}; it must not be below 0.")
        if self.jitter > MAX_JITTER:
            raise BenchError(f"jitter is {self.jitter:g}; give 0 to {MAX_JITTER:g}.")
        for name in ("frontend_cores", "gigabits"):
            if not getattr(self, name) > 0:
                raise BenchError(f"{name} is {getattr(self, name):g}; it must be above 0.")

    def costs(self, budget_ms: float) -> Costs:
        """Return the scheduler's costs, without sizes that the engine would not use within the budget.

        Args:
            budget_ms: The latency budget.

        Raises:
            BenchError: One row takes longer than the budget.
        """
        if self.ms[0] > budget_ms:
            raise BenchError(
                f"the network takes {self.ms[0]:g} ms for one row, more than the latency budget of {budget_ms:g} ms; "
                f"give a longer budget or a faster server."
            )
        used = next((at for at, ms in enumerate(self.ms) if at and ms > MAX_BUDGET_SHARE * budget_ms), len(self.ms))
        rows, ns = list(self.rows[:used]), [ms * 1e6 for ms in self.ms[:used]]
        worth = count_worthwhile(rows, ns)
        return Costs(rows[:worth], ns[:worth], handling_ns=self.handling_us * 1e3)


@final
class CostTables:
    """The predictions of `Costs` as arrays, which many servers read at once. Times are in seconds.

    Args:
        costs: The costs.
        budget_s: Latency budget; infinity for servers that admit everything.
        margin_s: Added to predicted finishes, as a front-end does for what it reads in between.

    Attributes:
        largest: The largest batch.
        sizes: Measured batch sizes.
        batch_s: Time of a batch by its rows; 0 for none.
        finish_s: Time until a new row is answered, by the rows ahead.
        min_compute_s: The network's shortest time for one row.
    """

    def __init__(self, costs: Costs, budget_s: float, margin_s: float = 0.0) -> None:
        self.costs, self.budget_s, self.margin_s = costs, budget_s, margin_s
        self.largest, self.sizes = costs.largest, list(costs.rows)
        self.batch_s = np.array([0.0, *(costs.of(rows) / 1e9 for rows in range(1, self.largest + 1))])
        most = min(MAX_WAITING, self._rows_within(budget_s) + 2 * self.largest)
        self.finish_s = np.array([costs.finish_ns(waiting) / 1e9 for waiting in range(most)])
        self.min_compute_s = costs.min_compute_ns / 1e9

    def _rows_within(self, budget_s: float) -> int:
        if not math.isfinite(budget_s):
            return MAX_WAITING
        return int(budget_s / self.batch_s[self.largest] + 1) * self.largest

    def predicted_s(self, waiting: npt.NDArray[np.int64]) -> Floats:
        """Predict the time until new rows behind `waiting` are answered, of any shape."""
        return self.finish_s[np.minimum(waiting, len(self.finish_s) - 1)]

    def stream_limit(self, chunk_s: float) -> int:
        """Return how many live streams admission control accepts."""
        budget_ns = round(self.budget_s * 1e9)

        def refused(streams: int) -> bool:
            return not admits(streams, chunk_s, self.costs, budget_ns)

        return max(1, bisect_left(range(1, MAX_STREAMS), True, key=refused))
