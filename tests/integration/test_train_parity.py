"""Several processes against one in float64: every placement, with dropout, uneven batches, clipping, accumulation."""

import pytest

from penstock.bench.parity import CASES, Agreement, agreements

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest) -> dict[str, Agreement]:
    return {agreement.case: agreement for agreement in agreements(request.param)}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_and_every_gradient_are_those_of_one_process(found: dict[str, Agreement], case: str) -> None:
    errors = found[case].errors
    assert "loss" in errors
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}
