"""`penstock bench serve URL`: a running server under an open or a closed loop."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.bench.client import Target
from penstock.bench.load import Load, Measured, find_goodput, measure
from penstock.bench.null_server import null_server
from penstock.core.errors import BenchError

# The generator must be able to do this many times what it measures, or it would measure itself.
HEADROOM = 2.0
NULL_SECONDS = 1.5
NULL_CONNECTIONS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A measurement that the generator was shown to be fast enough for.

    Args:
        measured: What became of the requests.
        null_rate: What the generator reaches against a server that does nothing, in requests a second.
    """

    measured: Measured
    null_rate: float


def null_rate(target: Target, load: Load, server_cpus: frozenset[int] | None) -> float:
    """Requests a second that the generator reaches against a server that only answers."""
    assert target.answers is not None
    with null_server(target.answers[0].tobytes(), server_cpus) as port:
        empty = replace(target, host="127.0.0.1", port=port, answers=None)
        closed = replace(load, rate=None, connections=NULL_CONNECTIONS, seconds=NULL_SECONDS, warm_up_s=0.3)
        return measure(empty, closed).answered_a_second


def measure_checked(target: Target, load: Load, server_cpus: frozenset[int] | None) -> Verdict:
    """Measure, and refuse the figure if the generator could hardly have gone faster.

    Raises:
        BenchError: The generator reaches less than twice the rate against a server that does nothing.
    """
    ceiling = null_rate(target, load, server_cpus)
    measured = measure(target, load)
    rate = max(measured.answered_a_second, load.rate or 0.0)
    if ceiling < HEADROOM * rate:
        raise BenchError(
            f"the load generator reaches {ceiling:,.0f} requests/s against a server that does nothing, less than twice "
            f"the {rate:,.0f}/s measured; give it more cores or --processes."
        )
    return Verdict(measured=measured, null_rate=ceiling)


def goodput_checked(
    target: Target, load: Load, server_cpus: frozenset[int] | None, budget_ms: float, say: Callable[[str], None]
) -> tuple[float, Verdict]:
    """The highest Poisson rate kept within the budget, found from the closed loop's rate downwards.

    Raises:
        BenchError: As `measure_checked`, or no rate is kept.
    """
    closed = measure(target, replace(load, rate=None, connections=64, seconds=2.0))
    say(f"closed loop: {closed.answered_a_second:,.0f}/s")
    best, trials = find_goodput(target, load, budget_ms=budget_ms, highest=closed.answered_a_second * 1.3, say=say)
    kept = [trial for trial in trials if trial.load.rate == best]
    if not kept:
        raise BenchError(f"no rate that was tried is kept within {budget_ms:g} ms.")
    ceiling = null_rate(target, load, server_cpus)
    if ceiling < HEADROOM * best:
        raise BenchError(
            f"the load generator reaches only {ceiling:,.0f}/s, less than twice the {best:,.0f}/s measured."
        )
    return best, Verdict(measured=kept[-1], null_rate=ceiling)
