"""When batches of live streams wait for more rows, in numbers."""

import pytest

from penstock.serve.engine.batch_hold import RATE_NS, RowRate, hold_ns
from penstock.serve.table.costs import Costs

MS = 1_000_000
BUDGET_NS = 20 * MS
# Half a millisecond a batch, and 10 us a row.
COSTS = Costs([1, 256], [510_000.0, 3_060_000.0])
BUSY = 20 / MS


@pytest.mark.parametrize(
    ("what", "rows", "slack_ms", "rate", "expected_ms"),
    [
        ("a busy core", 10, 20, BUSY, 8),
        ("an idle core", 1, 20, 0.5 / MS, 0),
        ("no rate is known yet", 10, 20, 0.0, 0),
        ("a chunk that has waited already", 10, 18, BUSY, 6),
        ("a chunk that has waited for long", 10, 12.5, BUSY, 0),
        ("a late stream", 10, -40, BUSY, 0),
        ("a chunk with a budget of its own", 10, 5000, BUSY, 8),
        ("a batch that is almost full", 226, 20, BUSY, 0),
        ("a full batch", 256, 20, BUSY, 0),
        ("more rows than a batch", 300, 20, BUSY, 0),
    ],
)
def test_waits(what: str, rows: int, slack_ms: float, rate: float, expected_ms: float) -> None:
    assert hold_ns(rows, int(slack_ms * MS), rate, BUDGET_NS, COSTS) == pytest.approx(expected_ms * MS, abs=1), what


def test_a_core_for_which_others_wait_is_busy_at_any_rate() -> None:
    rate = 0.5 / MS
    assert hold_ns(1, BUDGET_NS, rate, BUDGET_NS, COSTS) == 0
    assert hold_ns(1, BUDGET_NS, rate, BUDGET_NS, COSTS, contended=True) == pytest.approx(8 * MS, abs=1)
    # Nothing more comes.
    assert hold_ns(1, BUDGET_NS, 0.0, BUDGET_NS, COSTS, contended=True) == 0


def test_what_gains_nothing_by_larger_batches_runs_at_once() -> None:
    straight = Costs([1, 256], [50_000.0, 12_800_000.0])
    assert hold_ns(10, BUDGET_NS, BUSY, BUDGET_NS, straight) == 0


def test_the_wait_ends_when_the_largest_batch_is_full() -> None:
    assert hold_ns(56, BUDGET_NS, 100 / MS, BUDGET_NS, COSTS) == pytest.approx(2 * MS, abs=1)


def test_the_rate_follows_what_runs_and_forgets_a_pause() -> None:
    rate, now_ns = RowRate(), 10**12
    assert rate.rate == 0
    for _ in range(2000):
        now_ns += MS
        rate.add(20, now_ns)
    assert rate.rate == pytest.approx(20 / MS, rel=0.02)
    now_ns += 100 * RATE_NS
    rate.add(1, now_ns)
    assert rate.rate < 0.5 / MS
