"""Several processes against one in float64: every placement, with dropout, uneven batches, clipping, accumulation."""

import pytest

from benchmarks.acceptance.train.parity import CASES, ROUNDED, ParityErrors, parity_errors

pytestmark = pytest.mark.timeout(600)
TOLERANCE = 1e-5
# Eight bits of each number, in sums of several.
ROUNDING = 0.2


# With four processes what two cannot show: ranks in the middle, shares that differ, features that are cut in four.
OF_FOUR = [case for case in CASES if "uneven" in case] + ["tensor-parallel, chunks", "model", "all together"]
ASKED = [(2, case) for case in CASES] + [(4, case) for case in OF_FOUR]


@pytest.fixture(scope="module")
def found() -> dict[tuple[int, str], ParityErrors]:
    two, four = parity_errors(2, [*CASES, *ROUNDED]), parity_errors(4, OF_FOUR)
    return {(agreement.processes, agreement.case): agreement for agreement in (*two, *four)}


@pytest.mark.parametrize(("processes", "case"), ASKED)
def test_the_loss_and_every_gradient_are_those_of_one_process(
    found: dict[tuple[int, str], ParityErrors], processes: int, case: str
) -> None:
    errors = found[processes, case].errors
    assert "loss" in errors
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize("case", ROUNDED)
def test_what_rounds_on_purpose_rounds_no_more_than_that(found: dict[tuple[int, str], ParityErrors], case: str) -> None:
    agreement = found[2, case]
    assert 1e-4 < agreement.worst < ROUNDING
