"""Batches of live streams that wait for more rows where the core is busy, as a pure rule and the rate that it needs.

A chunk of a live stream comes at a known rate. Run as soon as one is there, batches become as small as keeps the core
busy all the time: the core does the same few rows again and again, at the price of small batches. A wait of a part of
the latency budget makes the batch several times larger, and the time of a row shorter. On a core that small batches
leave idle nothing waits.
"""

from dataclasses import dataclass, field
from typing import final

from penstock.serve.table.costs import Costs

# Part of the latency budget that a chunk may wait, from its arrival.
MAX_BUDGET_SHARE = 0.4
# Batches wait where rows in batches of one would take this part of the time, and where the wait makes the time of a row
# shorter by this factor at least.
BUSY, GAIN = 0.5, 0.95
# The rate is measured over so many nanoseconds. Timers of the event loop are of whole milliseconds.
RATE_NS, LEAST_NS = 50_000_000, 1_000_000
# Weight of the newest measurement.
FOLLOW = 0.3


def hold_ns(rows: int, slack_ns: int, rate: float, budget_ns: int, costs: Costs, *, contended: bool = False) -> int:
    """Compute how long a batch of live streams waits for more rows; 0 where it runs at once.

    Args:
        rows: Ready rows.
        slack_ns: Time until the deadline of the most urgent of them, in nanoseconds.
        rate: Rows a nanosecond that come.
        budget_ns: The latency budget of a chunk.
        costs: The measured time of every batch size.
        contended: Whether others wait for the core, which is busy then at any rate of these rows.
    """
    # A deadline counts from the arrival; one that is far off is of a chunk with a budget of its own.
    wait_ns = int(min(slack_ns - (1 - MAX_BUDGET_SHARE) * budget_ns, MAX_BUDGET_SHARE * budget_ns))
    if rate:
        wait_ns = min(wait_ns, int((costs.largest - rows) / rate))
    if wait_ns < LEAST_NS or not (contended or is_busy(rate, costs)):
        return 0
    expected = min(costs.largest, rows + int(rate * wait_ns))
    if costs.of(expected) * rows > GAIN * costs.of(rows) * expected:
        return 0
    return wait_ns


def is_busy(rate: float, costs: Costs) -> bool:
    """Return whether rows of this rate, in nanoseconds, would take much of the core in batches of one."""
    return rate * costs.of(1) >= BUSY


@final
@dataclass(slots=True)
class RowRate:
    """Rate of the rows that ran lately.

    Attributes:
        rate: Rows a nanosecond.
    """

    rate: float = field(default=0.0, init=False)
    _rows: int = field(default=0, init=False)
    _since_ns: int = field(default=0, init=False)

    def add(self, rows: int, now_ns: int) -> None:
        """Note a batch."""
        self._rows += rows
        passed_ns = now_ns - self._since_ns
        if passed_ns < RATE_NS:
            return
        # After a longer pause it begins anew.
        newest = self._rows / passed_ns
        self.rate = newest if passed_ns > 10 * RATE_NS else self.rate + FOLLOW * (newest - self.rate)
        self._rows, self._since_ns = 0, now_ns
