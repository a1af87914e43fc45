"""Golden examples: the same answers, within a tolerance, or a refusal that says how far they are apart."""

from typing import Any

import numpy as np
import pytest

from penstock.core.bundles.golden import Golden
from penstock.core.errors import GoldenMismatch, WholeNumberMismatch
from penstock.core.spec import Array

INPUTS = np.arange(8, dtype=np.float32).reshape(2, 4)


def golden(outputs: Any, tolerance: float = 1e-4) -> Golden:
    return Golden(inputs=INPUTS.copy(), outputs=np.asarray(outputs), tolerance=tolerance)


def test_the_largest_difference_is_given() -> None:
    recorded = np.zeros((2, 3), np.float32)
    recorded[1, 2] = 5e-5
    assert golden(recorded).check(lambda _: np.zeros((2, 3), np.float32)) == pytest.approx(5e-5)


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        (np.full((2, 3), 2e-4, np.float32), "differ from the recorded ones by 0.0002 where 0.0001 is allowed"),
        (np.zeros((2, 4), np.float32), r"shape \[2, 4\] where \[2, 3\] was recorded"),
        (np.zeros((3, 3), np.float32), r"shape \[3, 3\]"),
        (np.full((2, 3), np.nan, np.float32), "NaN or infinity"),
        (np.full((2, 3), np.inf, np.float32), "NaN or infinity"),
    ],
)
def test_another_answer_is_refused(answers: Array, sentence: str) -> None:
    with pytest.raises(GoldenMismatch, match=sentence):
        golden(np.zeros((2, 3), np.float32)).check(lambda _: answers)


def test_wide_whole_numbers_are_compared_exactly() -> None:
    recorded = np.array([[2**62 + 1]])
    assert golden(recorded).check(lambda _: recorded.copy()) == 0
    with pytest.raises(GoldenMismatch, match=r"differ .* by 1 "):
        golden(recorded).check(lambda _: recorded - 1)


def test_whole_numbers_that_differ_by_one_are_told_apart_from_rows_that_depend_on_others() -> None:
    recorded = np.full((2, 3), 200, np.uint8)
    answers = recorded.copy()
    answers[1, 2] += 1
    with pytest.raises(
        WholeNumberMismatch, match=r"by 1 in whole numbers, most in example 1, element \[2\]: 201 .* fra"
    ):
        golden(recorded).check(lambda _: answers)
    answers[1, 2] += 1
    with pytest.raises(GoldenMismatch, match=r"differ from the recorded ones by 2 where 0.0001 is allowed"):
        golden(recorded).check(lambda _: answers)
    # Within the tolerance.
    assert golden(recorded, 2.5).check(lambda _: answers) == 2


def test_a_tolerance_that_is_not_a_number_allows_nothing() -> None:
    with pytest.raises(GoldenMismatch):
        golden([[1.0]], float("nan")).check(lambda _: np.array([[1.0]]))


def test_a_network_that_works_in_place_does_not_change_the_examples() -> None:
    examples = golden(INPUTS + 1)

    def in_place(inputs: Array) -> Array:
        inputs += 1
        return inputs

    assert examples.check(in_place) == 0
    assert examples.check(in_place) == 0
    assert (examples.inputs == INPUTS).all()
