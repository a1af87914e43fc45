"""The highest rate that a server carries."""

from collections.abc import Callable

from penstock.bench.isolation.well_behaved import WellBehaved
from penstock.core.errors import BenchError

# The server carries a rate if it refuses nothing and its p99 is within this, two times of three.
CARRIED_P99_MS = 10.0
TRIALS, MAJORITY, TRIAL_S, MAX_TRIAL_S = 7, 2, 1.0, 4.0
# A p99 of fewer requests is one pause of the machine.
LEAST_REQUESTS = 500
# What is seen says nothing of the server if the p99 of the clients' own lateness is above this. Then it is tried again,
# so many times in all.
LATE_P99_MS, MOST_ATTEMPTS = 1.0, 6


def carried(clients: WellBehaved, highest: float, say: Callable[[str], None]) -> float:
    """Search the highest rate that a server carries: it refuses nothing, and the p99 is within `CARRIED_P99_MS`.

    Args:
        clients: Send the load; its arrivals are those that are measured later.
        highest: A rate that is too high, such as that of the closed loop.
        say: Called with the rate.

    Raises:
        BenchError: There is none.
    """
    low, high = 0.0, highest
    for _ in range(TRIALS):
        rate = (low + high) / 2
        low, high = (rate, high) if _is_carried(clients, rate) else (low, rate)
    if not low:
        raise BenchError(
            f"not even {high:,.0f} requests/s are answered with a p99 within {CARRIED_P99_MS:g} ms; the machine is too "
            f"busy."
        )
    say(f"The server carries {low:,.0f} requests/s with a p99 within {CARRIED_P99_MS:g} ms.")
    return low


def _is_carried(clients: WellBehaved, rate: float) -> bool:
    carried = failed = 0
    for _ in range(MOST_ATTEMPTS):
        seen = clients.send(rate, min(max(TRIAL_S, LEAST_REQUESTS / rate), MAX_TRIAL_S))
        if not seen.refused and seen.p99_ms <= CARRIED_P99_MS:
            carried += 1
        elif seen.late_p99_ms <= LATE_P99_MS:
            failed += 1
        if MAJORITY in (carried, failed):
            break
    return carried > failed
