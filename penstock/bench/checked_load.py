"""A load on a running server by a generator that was shown to be fast enough."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.bench.load.generator import Load, LoadResult, find_goodput, measure
from penstock.bench.load.null_server import null_server
from penstock.bench.load.sender import Target
from penstock.core.errors import BenchError

# The generator must reach this many times the measured rate, or the figure would be its own.
HEADROOM = 2.0
NULL_SECONDS = 1.5
NULL_CONNECTIONS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedResult:
    """A result, and the generator's own ceiling.

    Args:
        result: Outcomes of the requests.
        null_rate: The generator's rate against a server that does nothing, in requests a second.
    """

    result: LoadResult
    null_rate: float


def null_rate(target: Target, load: Load, server_cpus: frozenset[int] | None) -> float:
    """Return the generator's rate against a server that does nothing, in requests a second."""
    assert target.answers is not None
    with null_server(target.answers[0].tobytes(), server_cpus) as port:
        empty = replace(target, host="127.0.0.1", port=port, answers=None)
        closed = replace(load, rate=None, connections=NULL_CONNECTIONS, seconds=NULL_SECONDS, warm_up_s=0.3)
        return measure(empty, closed).answered_a_second


def measure_checked(target: Target, load: Load, server_cpus: frozenset[int] | None) -> CheckedResult:
    """Measure, and refuse the figure if the generator is too slow.

    Raises:
        BenchError: The generator reaches less than twice the rate against a server that does nothing.
    """
    ceiling = null_rate(target, load, server_cpus)
    result = measure(target, load)
    return _checked(result, max(result.answered_a_second, load.rate or 0.0), ceiling)


def goodput_checked(
    target: Target, load: Load, server_cpus: frozenset[int] | None, budget_ms: float, say: Callable[[str], None]
) -> tuple[float, CheckedResult]:
    """Search the highest Poisson rate within the budget, from the closed loop's rate downwards.

    Raises:
        BenchError: As `measure_checked`, or no rate keeps the budget.
    """
    closed = measure(target, replace(load, rate=None, connections=64, seconds=2.0))
    say(f"closed loop: {closed.answered_a_second:,.0f}/s")
    best, trials = find_goodput(target, load, budget_ms=budget_ms, highest=closed.answered_a_second * 1.3, say=say)
    kept = [trial for trial in trials if trial.load.rate == best]
    if not kept:
        raise BenchError(f"no rate that was tried is kept within {budget_ms:g} ms.")
    return best, _checked(kept[-1], best, null_rate(target, load, server_cpus))


def _checked(result: LoadResult, rate: float, ceiling: float) -> CheckedResult:
    if ceiling < HEADROOM * rate:
        raise BenchError(
            f"the load generator reaches {ceiling:,.0f} requests/s against a server that does nothing, less than twice "
            f"the {rate:,.0f}/s measured; give it more cores or --processes."
        )
    return CheckedResult(result=result, null_rate=ceiling)
