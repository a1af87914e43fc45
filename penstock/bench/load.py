"""A load generator that does not lie: open loop without coordinated omission, closed loop, every answer checked.

Open loop: requests come at the random moments of a Poisson process, whatever the server does, and each latency counts
from the moment at which the request was *due*; one that had to wait for a free connection has waited. Closed loop:
each connection sends its next request when its last one is answered; that finds the highest rate, not a latency.
"""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from threading import BrokenBarrierError
from typing import final

import numpy as np
import numpy.typing as npt

from penstock.bench.client import Job, Sent, Target, meet, run_job
from penstock.core.errors import BenchError

# n requests of a measurement

Floats = npt.NDArray[np.float64]

# Waiting for the last answers after the last request was due.
STRAGGLERS_S = 5.0
# The processes must be there and have connected by the start; what was due before it would count as late.
READY_S = 120.0
START_AHEAD_S = 0.5
CONNECT_S = 0.001
PERCENTILES = (50, 90, 98, 99, 99.9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is asked of the server and for how long.

    Args:
        rate: Requests a second of the open loop; None for the closed loop.
        connections: Connections in all.
        seconds: How long is measured.
        warm_up_s: How long the same load runs before that.
        processes: Processes that send.
        cpus: The cores on which they run; None for any.
        seed: Of the arrivals.
    """

    rate: float | None
    connections: int
    seconds: float
    warm_up_s: float = 1.0
    processes: int = 1
    cpus: frozenset[int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rate", "connections", "seconds", "processes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BenchError(f"the load has {name} {value}; it must be above 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What became of every request that was due while it was measured.

    Args:
        load: What was asked.
        seconds: How long was measured.
        latency_s: Of each right answer, `[n]`, from when it was due.
        offered: Requests due.
        refused: Answered 503 or 504.
        failed: Any other status.
        wrong: Answered 200 with something else than the golden answer.
        lost: Never answered: the connection broke, or the wait for stragglers ended.
        checked: How many answers were compared with the golden ones.
    """

    load: Load
    seconds: float
    latency_s: Floats
    offered: int
    refused: int
    failed: int
    wrong: int
    lost: int
    checked: int

    @property
    def answered_a_second(self) -> float:
        """Right answers a second."""
        return self.latency_s.size / self.seconds

    def share_within(self, budget_ms: float) -> float:
        """The share of all requests due that were answered rightly within a budget."""
        return np.count_nonzero(self.latency_s <= budget_ms / 1e3) / max(self.offered, 1)

    def goodput(self, budget_ms: float) -> float:
        """Right answers within a budget, a second."""
        return np.count_nonzero(self.latency_s <= budget_ms / 1e3) / self.seconds

    def percentile_ms(self, percent: float) -> float:
        """A percentile of the latency of right answers, in milliseconds; infinity where there is none."""
        return float(np.percentile(self.latency_s, percent)) * 1e3 if self.latency_s.size else float("inf")


@final
class NoRateKept(BenchError):
    """A server keeps the budget not even at a thousandth of the highest rate."""


def measure(target: Target, load: Load, *, none_answered: bool = False) -> Measured:
    """Put a load on a server and say what became of it.

    Args:
        target: The server.
        load: The load.
        none_answered: Whether it may be that no request at all is answered, as under a load that is too high.

    Raises:
        BenchError: Answers were wrong, or not one came.
    """
    context = multiprocessing.get_context("spawn")
    everybody = context.Barrier(load.processes + 1)
    with ProcessPoolExecutor(load.processes, context, initializer=meet, initargs=(everybody,)) as pool:
        for _ in range(load.processes):
            pool.submit(abs, 0)  # a process is started when there is something to do
        try:
            everybody.wait(READY_S)
        except BrokenBarrierError:
            raise BenchError(f"the load generator's processes did not start within {READY_S:g} s.") from None
        start_s = time.monotonic() + START_AHEAD_S + CONNECT_S * load.connections
        sent = list(pool.map(run_job, [_job(target, load, process, start_s) for process in range(load.processes)]))
    measured = _summed(load, sent)
    if measured.wrong:
        raise BenchError(
            f"{measured.wrong:,} of {measured.checked:,} answers are not the golden ones; a wrong answer has no speed."
        )
    if not measured.latency_s.size and not none_answered:
        raise BenchError(
            f"not one of {measured.offered:,} requests was answered ({measured.refused:,} refused, {measured.failed:,} "
            f"failed, {measured.lost:,} lost); see the server's log."
        )
    return measured


def _job(target: Target, load: Load, process: int, start_s: float) -> Job:
    """One process's share of a load."""
    measured_from_s = start_s + load.warm_up_s
    return Job(
        target=target,
        due_s=None if load.rate is None else start_s + poisson(load.rate / load.processes, load, process),
        start_s=start_s,
        measured_from_s=measured_from_s,
        end_s=measured_from_s + load.seconds,
        connections=max(1, load.connections // load.processes),
        stragglers_s=STRAGGLERS_S,
        cpus=load.cpus,
    )


def poisson(rate: float, load: Load, process: int) -> Floats:
    """The moments of a Poisson process from 0 to the end of the load, in seconds."""
    rng = np.random.default_rng([load.seed, process])
    length_s = load.warm_up_s + load.seconds
    count = int(rate * length_s + 8 * (rate * length_s) ** 0.5 + 8)
    moments = rng.exponential(1 / rate, count).cumsum()
    return moments[moments < length_s]


def find_goodput(
    target: Target,
    load: Load,
    *,
    budget_ms: float,
    highest: float,
    say: Callable[[str], None] | None = None,
    share: float = 0.99,
    attempts: int = 1,
) -> tuple[float, list[Measured]]:
    """The highest Poisson rate at which a share of ALL requests is answered within the budget.

    Args:
        target: The server.
        load: The load; its rate is what is searched.
        budget_ms: The budget in milliseconds.
        highest: A rate that is surely too high, the closed loop's say times 1.5.
        say: Called with a sentence after each trial.
        share: Of all requests due.
        attempts: A rate is too high once so many trials of it failed; more than 1 where something else than the server,
            such as a pause of the machine, may fail one.

    Returns:
        The rate, to within 4%, and every trial.

    Raises:
        BenchError: An answer was wrong.
        NoRateKept: The budget is kept at no rate.
    """
    low, high = 0.0, highest
    trials: list[Measured] = []
    rate = highest / 2
    while high - low > 0.04 * high:
        good = False
        for _ in range(attempts):
            trial = measure(target, replace(load, rate=rate, seed=load.seed + len(trials)), none_answered=True)
            trials.append(trial)
            good = trial.share_within(budget_ms) >= share
            if say is not None:
                say(f"{rate:,.0f}/s: {trial.share_within(budget_ms):.2%} within {budget_ms:g} ms")
            if good:
                break
        low, high = (rate, high) if good else (low, rate)
        rate = (low + high) / 2
        if high < highest / 1000:
            raise NoRateKept(f"even {high:,.0f} requests a second are not answered within {budget_ms:g} ms.")
    return low, trials


def _summed(load: Load, parts: Sequence[Sent]) -> Measured:
    def total(name: str) -> int:
        return sum(getattr(part, name) for part in parts)

    return Measured(
        load=load,
        seconds=load.seconds,
        latency_s=np.concatenate([part.latency_s for part in parts]),
        offered=total("offered"),
        refused=total("refused"),
        failed=total("failed"),
        wrong=total("wrong"),
        lost=total("lost"),
        checked=total("checked"),
    )
