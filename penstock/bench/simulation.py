"""A server in simulated time: the real scheduler and admission beside what other servers do, over the same requests.

The batch times that a policy meets are the curve's with noise that it does not know; ours follows them with `Costs`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.serve.costs import Costs
from penstock.serve.scheduler import Columns, schedule

# n requests

Floats = npt.NDArray[np.float64]
NS = 1_000_000_000
JITTER = 0.05
STALL_SHARE, STALL_FACTOR = 0.01, 3.0
SIZES = (1, 2, 4, 8, 16, 32, 64)
WAITS_MS = (0.0, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Requests as they come.

    Args:
        name: What kind of load it is.
        arrival_s: When each comes, `[n]`, ascending, in seconds.
        budget_s: How long each may take, `[n]`, in seconds.
    """

    name: str
    arrival_s: Floats
    budget_s: Floats

    @property
    def deadline_s(self) -> Floats:
        """When each must be answered, `[n]`."""
        return self.arrival_s + self.budget_s

    @property
    def seconds(self) -> float:
        """From the first arrival to the last deadline."""
        return float(self.deadline_s.max())


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a batch takes: an overhead and a time a row.

    Args:
        name: What it is like.
        overhead_ms: Of a batch.
        row_ms: Of each row.
        most: The largest batch.
    """

    name: str
    overhead_ms: float
    row_ms: float
    most: int = SIZES[-1]

    def batch_s(self, rows: int) -> float:
        """The time of a batch without noise, in seconds."""
        return (self.overhead_ms + self.row_ms * rows) / 1e3

    @property
    def capacity(self) -> float:
        """Requests a second in the largest batches."""
        return self.most / self.batch_s(self.most)


class Policy(Protocol):
    """Serves a trace on a machine: gives when each request was answered, infinity where it never was."""

    def __call__(self, trace: Trace, machine: Machine, seed: int) -> Floats:
        """`[n]`, in seconds."""
        ...


class _Clocked:
    """A machine with its noise."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self._machine = machine
        self._rng = np.random.default_rng(seed)

    def batch_s(self, rows: int) -> float:
        factor = float(self._rng.lognormal(0.0, JITTER))
        if self._rng.random() < STALL_SHARE:
            factor *= STALL_FACTOR
        return self._machine.batch_s(rows) * factor


def ours(trace: Trace, machine: Machine, seed: int) -> Floats:
    """The scheduler as it serves, with the front-end's admission from predicted finishing times."""
    count = len(trace.arrival_s)
    arrival_ns = (trace.arrival_s * NS).astype(np.int64)
    deadline_ns = (trace.deadline_s * NS).astype(np.int64)
    zeros = np.zeros(count, np.int64)
    submitted, consumed = zeros.copy(), zeros.copy()
    sizes = [size for size in SIZES if size <= machine.most]
    costs = Costs(sizes, [machine.batch_s(size) * NS for size in sizes])
    clock, answered_s = _Clocked(machine, seed), np.full(count, np.inf)
    now_ns, read = 0, 0
    while True:
        arrived = int(np.searchsorted(arrival_ns, now_ns, "right"))
        for index in range(read, arrived):
            waiting = int((submitted - consumed).sum())
            # Time that was spent in the socket is spent.
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


def batch_when_idle(trace: Trace, machine: Machine, seed: int) -> Floats:
    """Take whatever waits, in order, up to the largest batch; drop nothing."""
    return fixed_delay(machine.most, 0.0)(trace, machine, seed)


def fixed_delay(size: int, wait_ms: float) -> Policy:
    """What most servers do: a batch when `size` requests wait or the oldest has waited `wait_ms`; drop nothing."""

    def serve(trace: Trace, machine: Machine, seed: int) -> Floats:
        clock, count = _Clocked(machine, seed), len(trace.arrival_s)
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


def tuned_fixed_delay(trace: Trace, machine: Machine, seed: int) -> Floats:
    """Fixed delay with the size and wait that are best for this very trace: tuned better than anybody could."""
    tried = [
        fixed_delay(size, wait_ms)(trace, machine, seed)
        for size, wait_ms in product(SIZES, WAITS_MS)
        if size <= machine.most
    ]
    return max(tried, key=lambda answered_s: in_time(trace, answered_s))


def in_time(trace: Trace, answered_s: Floats) -> int:
    """How many requests were answered within their budgets."""
    return int(np.count_nonzero(answered_s <= trace.deadline_s))


def optimum(trace: Trace, machine: Machine) -> int:
    """The most requests that any schedule could answer in time, knowing the future and without noise. Exact.

    For deadlines in the order of the arrivals. With k requests answered in time, the last batch ending with request j
    and b rows large, that batch is best made of the requests j-b+1..j, which have the latest deadlines of those that
    have come. So F[k, j] = min over b of max(min over i <= j-b of F[k-b, i], arrival_j) + batch(b), where that is not
    past the deadline of request j-b+1.
    """
    arrival, deadline = trace.arrival_s, trace.deadline_s
    assert (np.diff(deadline) >= 0).all(), "deadlines must come in the order of the arrivals"
    count = len(arrival)
    # best[k][i]: the earliest moment at which k requests are answered in time, all of them among the first i.
    best = [np.zeros(count + 1)]
    for answered in range(1, count + 1):
        finish = np.full(count + 1, np.inf)
        for size in range(1, min(machine.most, answered) + 1):
            before = best[answered - size][: count + 1 - size]
            end = np.maximum(before, arrival[size - 1 :]) + machine.batch_s(size)
            end[end > deadline[: count + 1 - size]] = np.inf
            np.minimum(finish[size:], end, out=finish[size:])
        np.minimum.accumulate(finish, out=finish)
        if np.isinf(finish[-1]):
            return answered - 1
        best.append(finish)
    return count


POLICIES: dict[str, Callable[[Trace, Machine, int], Floats]] = {
    "penstock": ours,
    "fixed delay, tuned to the trace": tuned_fixed_delay,
    "batch when idle": batch_when_idle,
}
