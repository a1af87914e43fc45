"""The comparison of answers whose rows are a set."""

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from penstock.core.agreement import Agreement, RowSets, check_threshold, scales_of
from penstock.core.bundles.golden import Golden
from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError
from penstock.core.record import RecordSpec
from penstock.core.spec import TensorSpec

ROOM, THRESHOLD = 4, 0.3
objects = Dim("objects", max=ROOM, min=0)
OUTPUT = RecordSpec(
    (
        TensorSpec(name="boxes", dtype="float32", shape=(objects, 2), meaning="corners"),
        TensorSpec(name="scores", dtype="float32", shape=(objects,), meaning="scores"),
        TensorSpec(name="weather", dtype="float32", shape=(2,), meaning="of the whole picture"),
    )
)
SETS = RowSets(dims=("objects",), score="scores", threshold=THRESHOLD)


def answer(*rows: tuple[float, float, float]) -> dict[str, np.ndarray]:
    table = np.array(rows, np.float32).reshape(-1, 3)
    return {"boxes": table[:, :2], "scores": table[:, 2], "weather": np.array([0.25, 0.75], np.float32)}


RIGHT = answer((100, 50, 0.9), (20, 30, 0.5), (80, 10, 0.5))


def rule(expected: dict[str, np.ndarray] = RIGHT, **changes: Any) -> Agreement:
    records = OUTPUT.of_many([expected])
    made = Agreement(output=OUTPUT, sets=SETS, tolerance=0.1, scales=scales_of(records))
    return replace(made, **changes)


@pytest.mark.parametrize(
    "found",
    [
        RIGHT,
        answer((100, 50, 0.9), (80, 10, 0.5), (20, 30, 0.5)),
        answer((100.05, 50, 0.9), (20, 29.95, 0.5), (80, 10, 0.5)),
        answer((100, 50, 0.9), (20, 30, 0.5), (80, 10, 0.5), (7, 7, 0.3005)),
    ],
    ids=["the same", "equal scores swapped", "rounded", "one more at the cut-off"],
)
def test_these_agree(found: dict[str, np.ndarray]) -> None:
    assert rule().agree(found, RIGHT)
    assert rule().agree(RIGHT, found)


@pytest.mark.parametrize(
    ("found", "tensor", "difference"),
    [
        (answer((100, 50, 0.9), (20, 33, 0.5), (80, 10, 0.5)), "boxes", 3),
        (answer((100, 50, 0.9), (20, 30, 0.5), (80, 10, 0.4)), "scores", 0.1),
        (answer((100, 50, 0.9), (20, 30, 0.5)), "scores", inf),
        (answer((100, 50, 0.9), (20, 30, 0.5), (80, 10, 0.5), (7, 7, 0.32)), "scores", inf),
        (answer((100, 50, 0.9), (20, 30, 0.5), (20, 30, 0.5)), "boxes", 60),
        (answer((100, 50, np.nan), (20, 30, 0.5), (80, 10, 0.5)), "scores", inf),
    ],
    ids=["moved", "another score", "one missing", "one more above the cut-off", "one twice", "NaN"],
)
def test_a_real_difference_has_its_tensor_and_size(found: Any, tensor: str, difference: float) -> None:
    both = rule().differences(found, RIGHT)
    assert both[tensor] == pytest.approx(difference, rel=1e-5)
    assert not rule().agree(found, RIGHT)
    assert not rule().agree(RIGHT, found)


def test_tensors_without_rows_are_compared_in_order() -> None:
    assert not rule().agree(RIGHT | {"weather": RIGHT["weather"][::-1]}, RIGHT)


def test_the_last_row_of_a_full_list_may_be_another() -> None:
    full = answer((100, 50, 0.9), (20, 30, 0.5), (80, 10, 0.5), (60, 60, 0.45))
    other = answer((100, 50, 0.9), (20, 30, 0.5), (80, 10, 0.5), (10, 90, 0.4505))
    assert rule().agree(other, full)
    assert not rule().agree(answer((100, 50, 0.9), (20, 30, 0.5), (10, 90, 0.5), (60, 60, 0.45)), full)


def test_without_a_score_all_rows_must_be_there() -> None:
    near = answer((100, 50, 0.9), (20, 30, 0.5), (80, 10, 0.5), (7, 7, 0.3005))
    assert not rule(sets=RowSets(dims=("objects",))).agree(near, RIGHT)


def test_rows_nearer_than_the_tolerance_find_their_partners() -> None:
    # The nearest pair is of the first two; both rows have a partner only if they take others.
    expected = answer((100, 50, 0.9), (100.09, 50, 0.9))
    assert rule(expected).agree(answer((100.01, 50, 0.9), (99.92, 50, 0.9)), expected)


def test_no_rows_agree_with_no_rows() -> None:
    assert rule().agree(answer(), answer())
    assert not rule().agree(answer(), RIGHT)


def test_the_worst_of_several_answers_is_named() -> None:
    expected = OUTPUT.of_many([answer(), RIGHT, RIGHT])
    moved = answer((100, 50, 0.9), (80, 12, 0.5), (20, 30, 0.5))
    worst = rule().worst(OUTPUT.of_many([answer(), RIGHT, moved]), expected)
    assert (worst.example, worst.tensor, worst.difference) == (2, "boxes", pytest.approx(2))
    assert (worst.place(), worst.beyond(1)) == ("in 'boxes' of example 2", "by 2 where 1 is allowed")
    missing = rule().worst(OUTPUT.of_many([answer(), answer(), RIGHT]), expected)
    assert (missing.example, missing.beyond(1)) == (1, "by a row that only one of them has")


def test_a_threshold_that_is_not_used_is_refused() -> None:
    check_threshold(OUTPUT, SETS, OUTPUT.of_many([RIGHT]), 1e-3)
    with pytest.raises(ApplicationError, match=r"keeps a row with 'scores' 0.1, but declares the threshold 0.3"):
        check_threshold(OUTPUT, SETS, OUTPUT.of_many([answer((1, 1, 0.1))]), 1e-3)


def test_messages_have_the_numbers_of_the_tensor_that_differs() -> None:
    expected = np.zeros(1, [("n", np.int64), ("a", np.float32, (2,))])
    expected["n"] = 40
    found = expected.copy()
    found["a"][0, 1] = 0.5
    rule = Agreement(output=None, sets=None, tolerance=0.004, scales=scales_of(expected))
    worst = rule.worst(found, expected)
    assert worst.difference > rule.tolerance
    assert worst.beyond(rule.tolerance) == "by 0.5 where 0.0001 is allowed"
    assert worst.numbers() == ", element [1]: 0.5 instead of 0"


def test_differences_are_shown_in_those_of_the_largest_output_though_a_length_is_larger() -> None:
    inputs = np.zeros(1, np.float32)
    golden = Golden(inputs=inputs, outputs=OUTPUT.of_many([answer((2, 1, 0.9))]), tolerance=0.1, output=OUTPUT)
    assert golden.shown == 1
    many = OUTPUT.of_many([answer(*[(0.5, 1, 0.9)] * ROOM)])
    assert replace(golden, outputs=many).shown == 1 / ROOM
    assert replace(golden, outputs=many, output=None).shown == 1
    assert replace(golden, outputs=np.full((1, 2), 7.0), output=None).shown == 1
