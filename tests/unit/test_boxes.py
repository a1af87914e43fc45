"""The declaration of boxes: what it needs, and boxes in the pixels of a picture."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.apps.detect.app import app
from penstock.core.application import describe
from penstock.core.boxes import Boxes
from penstock.core.errors import ApplicationError

BOXES = Boxes(labels=("car", "person"), frame=(8, 16))


@pytest.mark.parametrize(("size", "share"), [((8, 16), 1), ((16, 16), 2), ((4, 40), 2.5), ((4, 8), 0.5)])
def test_boxes_are_in_the_pixels_of_the_picture(size: tuple[int, int], share: float) -> None:
    named = {"boxes": np.array([[1, 2, 3, 4]], np.float32), "scores": np.ones(1, np.float32)}
    made = BOXES.in_picture(named, *size)
    assert made["boxes"].tolist() == [[share, 2 * share, 3 * share, 4 * share]]
    assert made["boxes"].dtype == np.float32
    assert made["scores"] is named["scores"]
    assert named["boxes"].tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("labels", (), r"labels=\(\); it must be a tuple of names"),
        ("frame", (8, 0), r"frame=\(8, 0\); it must be a height and a width"),
        ("least", 2, "least=2; it must be 0 to 1"),
    ],
)
def test_a_wrong_field_is_refused(field: str, value: Any, sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        replace(BOXES, **{field: value})


def test_an_application_has_the_outputs_and_a_prepare() -> None:
    assert app.shows is not None
    assert describe(app)["shows"]["frame"] == [256, 448]
    assert Boxes.from_json(app.shows.to_json()) == app.shows
    with pytest.raises(ApplicationError, match="'places' is no output"):
        replace(app, shows=replace(app.shows, boxes="places"))
    with pytest.raises(ApplicationError, match="and 'scores' is "):
        replace(app, shows=replace(app.shows, boxes="scores"))
    with pytest.raises(ApplicationError, match="has shows, which needs a prepare"):
        replace(app, reply=lambda found: found)
    wrong: Any = "boxes"
    with pytest.raises(ApplicationError, match="has shows='boxes'; it must be a Boxes"):
        replace(app, shows=wrong)
