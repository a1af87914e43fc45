"""When a pack keeps its 8-bit network: the loss that is allowed, and the examples that it is measured with."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.cli.export import _validation
from penstock.core.packs.pack import PackModel
from penstock.core.source_files.find_application import FoundApplication
from penstock.export.int8 import MAX_LOSS, _loss
from penstock.train.recipe import ArraySet, Data

NUMBERS, CLASSES = np.zeros((3, 2), np.float32), np.zeros(3, np.int64)


@pytest.mark.parametrize(("before", "after", "kept"), [(0.97, 0.96, True), (0.58, 0.57, True), (0.97, 0.9599, False)])
def test_a_loss_of_one_point_is_allowed_and_no_more(before: float, after: float, kept: bool) -> None:
    fp32, int8 = (PackModel(file="", ms=1.0, agreement=1.0, accuracy=accuracy) for accuracy in (before, after))
    assert (_loss(fp32, int8) <= MAX_LOSS) is kept


def test_a_recipe_without_a_validation_set_is_measured_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    data = Data(train=ArraySet(inputs=NUMBERS, targets=CLASSES), validation=cast(Any, None))
    made: Any = SimpleNamespace(data=lambda: data)
    application = SimpleNamespace(recipe=lambda: made, live=None, prepare=None)
    found: Any = SimpleNamespace(application=application, recipe=lambda: made)
    assert _validation(cast(FoundApplication, found)) is None
    # No sentence about a recipe that gives no data.
    assert not capsys.readouterr().out
