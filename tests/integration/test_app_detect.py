"""The detector is trained on a few scenes, and its bundle finds them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.apps.detect.drawn import draw_scenes
from penstock.apps.detect.recipe import detect_recipe
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import Array
from penstock.train.recipe import ArraySet, Data, EMASettings
from penstock.train.run import train

SCENES, STEPS = 4, 60


def few_scenes() -> Data:
    made = draw_scenes("default", 40, SCENES)
    one = ArraySet(inputs=made.pixels, targets={"boxes": made.boxes, "classes": made.classes})
    return Data(train=one, validation=one, test=one)


def raws() -> list[Array]:
    pixels = draw_scenes("default", 40, 2).pixels.transpose(0, 2, 3, 1)
    opaque = np.full((*pixels.shape[:3], 1), 255, np.uint8)
    return list(np.concatenate([pixels, opaque], 3))


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_few_scenes_are_learned_and_found_by_the_bundle(tmp_path: Path) -> None:
    recipe = detect_recipe(few_scenes, raws, steps=STEPS, batch_size=2)
    recipe = replace(recipe, precision="fp32", augment=None, ema=EMASettings(decay=0.9, warm_up=True))
    result = train(find_application("detect"), tmp_path / "run", recipe, overrides={}, quiet=True)
    assert result.metrics["loss"] < 2.5
    assert result.metrics["map50"] > 0.2
    found = penstock.load(tmp_path / "run/bundle").predict(raws()[0])
    assert found["boxes"].shape == (len(found["scores"]), 4)
    assert (np.diff(found["scores"]) <= 0).all()
