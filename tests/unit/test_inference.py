"""Names and shapes in inference requests that are no names and no small shapes."""

from typing import Any

import numpy as np
import pytest

from penstock.core.errors import InvalidInput
from penstock.serve.oip.inference import GivenTensor, check_output, check_output_count, records_of
from tests.support.varying import SUMS, WORDS


def tensor(name: Any, shape: tuple[int, ...] = (1, 2)) -> GivenTensor:
    return GivenTensor(name, "FP32", shape, lambda spec, n: np.zeros((n, *shape), np.float32))


@pytest.mark.parametrize("name", [[], {}, None, 3])
def test_a_name_that_is_no_text_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInput, match="There is no output"):
        check_output(name, {}, {"sum": "FP32"})
    with pytest.raises(InvalidInput, match="is no name"):
        records_of([tensor(name)], WORDS, 4)


def test_more_outputs_than_there_are_are_refused_unread() -> None:
    check_output_count(1, {"sum": "FP32"})
    with pytest.raises(InvalidInput, match=r"wants 3,000 outputs; this model has 'sum'\."):
        check_output_count(3_000, {"sum": "FP32"})


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'words' is given twice"):
        records_of([tensor("words"), tensor("words")], WORDS, 4)


def test_a_message_has_the_beginning_of_a_long_shape() -> None:
    with pytest.raises(InvalidInput) as raised:
        records_of([tensor("words", (1,) * 10_000)], WORDS, 4)
    assert len(str(raised.value)) < 200
    with pytest.raises(InvalidInput, match=r"must be float32\[2\] for one row, \[rows, 2\] for several") as raised:
        records_of([tensor("sum", (1,) * 10_000), tensor("first", (1, 1))], SUMS, 4)
    assert len(str(raised.value)) < 300


def test_a_dimension_too_many_is_said_before_the_rows_are_compared() -> None:
    with pytest.raises(InvalidInput, match=r"first has shape \[3, 1, 1\]; .* \[rows, tokens"):
        records_of([tensor("sum", (3, 2)), tensor("first", (3, 1, 1))], SUMS, 4)
    with pytest.raises(InvalidInput, match="different numbers of rows"):
        records_of([tensor("sum", (3, 2)), tensor("first", (2, 1))], SUMS, 4)
