"""A load generator: open loop without coordinated omission, closed loop, every answer checked.

Open loop: requests are due at the times of a Poisson process, independent of the server, and each latency counts from
the time at which the request was *due*, so that waiting for a free connection counts. Closed loop: each connection
sends its next request when its last one is answered; that finds the highest rate, not a latency.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import numpy.typing as npt

from penstock.bench.compiled_program import SenderKind
from penstock.bench.load.compiled_sender import run_compiled, sender_program
from penstock.bench.load.sender import SenderJob, SenderResult, Target, run_sender, sender_pool
from penstock.core.errors import BenchError

# n requests of a measurement

Floats = npt.NDArray[np.float64]

# Wait for the last answers after the last request was due.
STRAGGLERS_S = 5.0
# Beyond this share of requests sent late, a load does not measure the server.
MAX_LATE = 0.01
# Every process must have connected by the start; a request due before would count as late.
START_AHEAD_S = 0.5
CONNECT_S = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Rate, connections and duration of a load.

    Args:
        rate: Requests a second of the open loop; None for the closed loop.
        connections: Total connections.
        seconds: Duration of the measurement.
        warm_up_s: Duration of the same load before it.
        processes: Processes that send.
        cpus: Their cores; None for any.
        seed: Seed of the arrivals.
        sender: `"python"`, `"compiled"`, or `"auto"`: compiled where a C++ compiler is installed.
    """

    rate: float | None
    connections: int
    seconds: float
    warm_up_s: float = 1.0
    processes: int = 1
    cpus: frozenset[int] | None = None
    seed: int = 0
    sender: SenderKind = "python"

    def __post_init__(self) -> None:
        for name in ("rate", "connections", "seconds", "processes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BenchError(f"--{name} is {value}; it must be above 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult(SenderResult):
    """Outcomes over all processes.

    Args:
        load: The load.
        seconds: Duration of the measurement.
    """

    load: Load
    seconds: float

    @property
    def answered_a_second(self) -> float:
        """Right answers a second."""
        return self.latency_s.size / self.seconds

    def share_within(self, budget_ms: float) -> float:
        """Return the share of all requests due with a right answer within a budget."""
        return np.count_nonzero(self.latency_s <= budget_ms / 1e3) / max(self.offered, 1)

    def goodput(self, budget_ms: float) -> float:
        """Return the right answers a second within a budget."""
        return np.count_nonzero(self.latency_s <= budget_ms / 1e3) / self.seconds

    @property
    def was_late(self) -> bool:
        """True if the senders themselves came to more than a hundredth of the requests late."""
        return self.late > MAX_LATE * self.offered

    @property
    def shortfall(self) -> str:
        """The requests without a right answer, how late answers were, and delays of the senders; may be empty."""
        counts = {"refused": self.refused, "failed": self.failed, "lost": self.lost}
        said = [f"{count / self.offered:.2%} {what}" for what, count in counts.items() if count]
        notes = [f"{', '.join(said)}; p99 of the answers {self.percentile_ms(99):.1f} ms"] if said else []
        if self.late:
            notes.append(f"{self.late / self.offered:.2%} sent late by the load itself")
        if self.queued:
            notes.append(f"{self.queued / self.offered:.2%} waited for a free connection")
        return f" ({'; '.join(notes)})" if notes else ""

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the latency of right answers, in milliseconds; infinity if there are none."""
        return float(np.percentile(self.latency_s, percent)) * 1e3 if self.latency_s.size else float("inf")


@final
class NoRateWithinBudget(BenchError):
    """A server does not keep the budget even at a thousandth of the highest rate."""


def measure(target: Target, load: Load, *, none_answered: bool = False) -> LoadResult:
    """Put a load on a server.

    Args:
        target: The server.
        load: The load.
        none_answered: Accept a result without a single answer, as under a load that is too high.

    Raises:
        BenchError: An answer was wrong, or none came.
    """
    program = sender_program(load.sender)
    if program is not None:
        result = _summed(load, run_compiled(program, _jobs(target, load)))
    else:
        with sender_pool(load.processes) as pool:
            result = _summed(load, list(pool.map(run_sender, _jobs(target, load))))
    if result.wrong:
        raise BenchError(
            f"{result.wrong:,} of {result.checked:,} answers are not the golden ones; a wrong answer has no speed."
        )
    if not result.latency_s.size and not none_answered:
        raise BenchError(
            f"not one of {result.offered:,} requests was answered ({result.refused:,} refused, {result.failed:,} "
            f"failed, {result.lost:,} lost); see the server's log."
        )
    return result


def _jobs(target: Target, load: Load) -> list[SenderJob]:
    start_s = time.monotonic() + START_AHEAD_S + CONNECT_S * load.connections
    return [_job(target, load, process, start_s) for process in range(load.processes)]


def _job(target: Target, load: Load, process: int, start_s: float) -> SenderJob:
    measured_from_s = start_s + load.warm_up_s
    return SenderJob(
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
    """Return the times of a Poisson process from 0 to the end of the load, in seconds."""
    rng = np.random.default_rng([load.seed, process])
    length_s = load.warm_up_s + load.seconds
    count = int(rate * length_s + 8 * (rate * length_s) ** 0.5 + 8)
    times_s = rng.exponential(1 / rate, count).cumsum()
    return times_s[times_s < length_s]


def find_goodput(
    target: Target,
    load: Load,
    *,
    budget_ms: float,
    highest: float,
    lowest: float = 0.0,
    say: Callable[[str], None] = lambda _: None,
    share: float = 0.99,
    attempts: int = 1,
) -> tuple[float, list[LoadResult]]:
    """Search the highest Poisson rate at which a share of ALL requests is answered within the budget.

    Args:
        target: The server.
        load: The load; its rate is ignored.
        budget_ms: The budget in milliseconds.
        highest: A rate that is too high, such as 1.5 times that of the closed loop.
        lowest: A rate that is known to keep the budget.
        say: Called with a sentence after each trial.
        share: Required share of all requests due.
        attempts: Failed trials until a rate counts as too high; more than 1 where something other than the server, such
            as a pause of the machine, may fail one.

    Returns:
        The rate, to within 4%, and every trial.

    Raises:
        BenchError: An answer was wrong.
        NoRateWithinBudget: No rate keeps the budget.
    """
    low, high = lowest, highest
    trials: list[LoadResult] = []
    rate = (low + high) / 2
    while high - low > 0.04 * high:
        good = False
        for _ in range(attempts):
            trial = measure(target, replace(load, rate=rate, seed=load.seed + len(trials)), none_answered=True)
            trials.append(trial)
            good = trial.share_within(budget_ms) >= share
            say(f"{rate:,.0f}/s: {trial.share_within(budget_ms):.2%} within {budget_ms:g} ms{trial.shortfall}")
            if good:
                break
        low, high = (rate, high) if good else (low, rate)
        rate = (low + high) / 2
        if high < highest / 1000:
            raise NoRateWithinBudget(f"even {high:,.0f} requests a second are not answered within {budget_ms:g} ms.")
    return low, trials


def parse_cores(text: str | None, option: str) -> frozenset[int] | None:
    """Parse the cores of an option, as `1,2`.

    Args:
        text: Its value; None if it is not given.
        option: Its name, such as `--cpu`.

    Raises:
        BenchError: The text is something else.
    """
    try:
        return None if text is None else frozenset(map(int, text.split(",")))
    except ValueError:
        raise BenchError(f"{option} is {text!r}; write the numbers of cores, as {option} 1 or {option} 1,2.") from None


def _summed(load: Load, parts: Sequence[SenderResult]) -> LoadResult:
    counts = ("offered", "refused", "failed", "wrong", "lost", "checked", "late", "queued")
    return LoadResult(
        load=load,
        seconds=load.seconds,
        latency_s=np.concatenate([part.latency_s for part in parts]),
        **{name: sum(getattr(part, name) for part in parts) for name in counts},
    )
