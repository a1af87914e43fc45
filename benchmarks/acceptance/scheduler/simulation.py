"""A server in simulated time: the real scheduler and admission control beside the policies of other servers.

Batch times are those of the cost curve with noise that the policies do not know; ours follows them with `Costs`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from penstock.serve.engine.scheduler import Columns, schedule
from penstock.serve.table.costs import Costs

# n requests

Floats = npt.NDArray[np.float64]
NS = 1_000_000_000
JITTER = 0.05
STALL_SHARE, STALL_FACTOR = 0.01, 3.0
SIZES = (1, 2, 4, 8, 16, 32, 64)
WAITS_MS = (0.0, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrivalTrace:
    """Requests in the order of their arrival.

    Args:
        name: Kind of load.
        arrival_s: Arrival times, `[n]`, ascending, in seconds.
        budget_s: Latency budgets, `[n]`, in seconds.
    """

    name: str
    arrival_s: Floats
    budget_s: Floats

    @property
    def deadline_s(self) -> Floats:
        """Deadlines, `[n]`, in seconds."""
        return self.arrival_s + self.budget_s


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedMachine:
    """A machine whose batch time is an overhead and a time a row.

    Args:
        name: Description.
        overhead_ms: Overhead of a batch.
        row_ms: Time of each row.
        max_batch: Largest batch, in rows.
    """

    name: str
    overhead_ms: float
    row_ms: float
    max_batch: int = SIZES[-1]

    def batch_s(self, rows: int) -> float:
        """Return the time of a batch without noise, in seconds."""
        return (self.overhead_ms + self.row_ms * rows) / 1e3

    @property
    def capacity(self) -> float:
        """Requests a second in the largest batches."""
        return self.max_batch / self.batch_s(self.max_batch)


# Serves a trace on a machine with a seed, and returns the time of each answer in seconds, `[n]`, infinity for none.
Policy = Callable[[ArrivalTrace, SimulatedMachine, int], Floats]


class _NoisyMachine:
    def __init__(self, machine: SimulatedMachine, seed: int) -> None:
        self._machine = machine
        self._rng = np.random.default_rng(seed)

    def batch_s(self, rows: int) -> float:
        factor = float(self._rng.lognormal(0.0, JITTER))
        if self._rng.random() < STALL_SHARE:
            factor *= STALL_FACTOR
        return self._machine.batch_s(rows) * factor


def penstock_policy(trace: ArrivalTrace, machine: SimulatedMachine, seed: int) -> Floats:
    """Run the engine's scheduler with the front-end's admission control from predicted finish times."""
    count = len(trace.arrival_s)
    arrival_ns = (trace.arrival_s * NS).astype(np.int64)
    deadline_ns = (trace.deadline_s * NS).astype(np.int64)
    zeros = np.zeros(count, np.int64)
    submitted, consumed = zeros.copy(), zeros.copy()
    sizes = [size for size in SIZES if size <= machine.max_batch]
    costs = Costs(sizes, [machine.batch_s(size) * NS for size in sizes])
    clock, answered_s = _NoisyMachine(machine, seed), np.full(count, np.inf)
    now_ns, read = 0, 0
    while True:
        arrived = int(np.searchsorted(arrival_ns, now_ns, "right"))
        for index in range(read, arrived):
            waiting = int((submitted - consumed).sum())
            # The wait in the socket counts.
            if not waiting or now_ns + costs.finish_ns(waiting) <= deadline_ns[index]:
                submitted[index] = 1
        read = arrived
        columns = Columns(submitted, consumed, consumed, consumed, zeros, deadline_ns[:, None], zeros[:, None])
        chosen = schedule(columns, now_ns, costs)
        consumed[chosen.expire] = 1
        if chosen.run.size:
            taken_ns = int(clock.batch_s(chosen.run.size) * NS)
            costs.observe(chosen.run.size, taken_ns)
            now_ns += taken_ns
            consumed[chosen.run] = 1
            answered_s[chosen.run] = now_ns / NS
        elif chosen.expire.size:
            continue
        elif read == count:
            return answered_s
        else:
            now_ns = max(now_ns, int(arrival_ns[read]))


def batch_when_idle(trace: ArrivalTrace, machine: SimulatedMachine, seed: int) -> Floats:
    """Run all waiting requests in order, up to the largest batch; drop none."""
    return fixed_delay(machine.max_batch, 0.0)(trace, machine, seed)


def fixed_delay(size: int, wait_ms: float) -> Policy:
    """Run a batch when `size` requests wait or the oldest has waited `wait_ms`, as most servers do; drop none."""

    def serve(trace: ArrivalTrace, machine: SimulatedMachine, seed: int) -> Floats:
        clock, count = _NoisyMachine(machine, seed), len(trace.arrival_s)
        answered_s, now, first = np.full(count, np.inf), 0.0, 0
        while first < count:
            full = trace.arrival_s[first + size - 1] if first + size <= count else np.inf
            now = max(now, trace.arrival_s[first], min(full, trace.arrival_s[first] + wait_ms / 1e3))
            rows = min(size, int(np.searchsorted(trace.arrival_s, now, "right")) - first)
            now += clock.batch_s(rows)
            answered_s[first : first + rows] = now
            first += rows
        return answered_s

    return serve


def tuned_fixed_delay(trace: ArrivalTrace, machine: SimulatedMachine, seed: int) -> Floats:
    """Fixed delay with the best size and wait for this trace, an upper bound of tuning by hand."""
    tried = [
        fixed_delay(size, wait_ms)(trace, machine, seed)
        for size, wait_ms in product(SIZES, WAITS_MS)
        if size <= machine.max_batch
    ]
    return max(tried, key=lambda answered_s: in_time(trace, answered_s))


def in_time(trace: ArrivalTrace, answered_s: Floats) -> int:
    """Return the number of requests answered within their budgets."""
    return int(np.count_nonzero(answered_s <= trace.deadline_s))


def optimum(trace: ArrivalTrace, machine: SimulatedMachine) -> int:
    """Return the most requests that any schedule can answer in time without noise, exactly.

    The deadlines must be in the order of the arrivals. With k requests answered in time, the last batch ending with
    request j and b rows large, the best rows are the requests j-b+1..j, which have the latest deadlines of those that
    have arrived. So F[k, j] = min over b of max(min over i <= j-b of F[k-b, i], arrival_j) + batch(b), unless that is
    past the deadline of request j-b+1.
    """
    arrival, deadline = trace.arrival_s, trace.deadline_s
    assert (np.diff(deadline) >= 0).all(), "deadlines must be in the order of the arrivals"
    count = len(arrival)
    # best[k][i]: the earliest time at which k of the first i requests are answered in time.
    best = [np.zeros(count + 1)]
    for answered in range(1, count + 1):
        finish = np.full(count + 1, np.inf)
        for size in range(1, min(machine.max_batch, answered) + 1):
            before = best[answered - size][: count + 1 - size]
            end = np.maximum(before, arrival[size - 1 :]) + machine.batch_s(size)
            end[end > deadline[: count + 1 - size]] = np.inf
            np.minimum(finish[size:], end, out=finish[size:])
        np.minimum.accumulate(finish, out=finish)
        if np.isinf(finish[-1]):
            return answered - 1
        best.append(finish)
    return count


POLICIES: dict[str, Policy] = {
    "penstock": penstock_policy,
    "fixed delay, tuned to the trace": tuned_fixed_delay,
    "batch when idle": batch_when_idle,
}
