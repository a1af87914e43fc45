"""Latency budget and priority of a request, from its headers."""

import re

from penstock.core.errors import InvalidInput
from penstock.serve.exchange.request import Head

BUDGET_HEADER = "penstock-latency-ms"
PRIORITY_HEADER = "penstock-priority"
PRIORITIES = ("interactive", "background")
MAX_BUDGET_MS = 600_000
# `float` alone would take 1_0, infinity and digits of other scripts.
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def options_of(head: Head) -> tuple[int | None, bool]:
    """Parse the latency budget of a request in nanoseconds, None for the server's, and whether it has low priority.

    Raises:
        InvalidInput: Either is malformed.
    """
    return budget_ns_of(head.headers.get(BUDGET_HEADER)), is_low_priority(head.headers.get(PRIORITY_HEADER))


def budget_ns_of(text: str | None) -> int | None:
    """Parse the latency budget of a request into nanoseconds.

    Raises:
        InvalidInput: The text is not a number of milliseconds above 0.
    """
    if text is None:
        return None
    budget_ms = float(text) if _NUMBER.fullmatch(text) else -1.0
    if not 0 < budget_ms <= MAX_BUDGET_MS:
        raise InvalidInput(
            f"Penstock-Latency-Ms is {text!r}; it must be a number above 0, and {MAX_BUDGET_MS:,} at most."
        )
    return int(budget_ms * 1e6)


def is_low_priority(text: str | None) -> bool:
    """Parse the priority of a request.

    Raises:
        InvalidInput: There is no such priority.
    """
    if text is None:
        return False
    if text.lower() not in PRIORITIES:
        raise InvalidInput(f"Penstock-Priority is {text!r}; it must be {' or '.join(PRIORITIES)}.")
    return text.lower() == "background"
