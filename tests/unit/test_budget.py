"""Latency budgets are decimal numbers, not all that Python takes for one."""

import pytest

from penstock.core.errors import InvalidInput
from penstock.serve.exchange.budget import budget_ns_of


@pytest.mark.parametrize(
    ("text", "ms"), [("1", 1.0), ("0.5", 0.5), (".5", 0.5), ("2.", 2.0), ("+3", 3.0), ("1e2", 100.0)]
)
def test_numbers(text: str, ms: float) -> None:
    assert budget_ns_of(text) == ms * 1e6


@pytest.mark.parametrize("text", ["1_0", "inf", "nan", "0x10", "", " 1", "1 ", "²", "١", "1e", "-1", "0", "600001"])
def test_what_only_looks_like_a_number_is_rejected(text: str) -> None:
    with pytest.raises(InvalidInput, match="must be a number above 0, and 600,000 at most"):
        budget_ns_of(text)
