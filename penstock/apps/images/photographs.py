"""scikit-image's photographs as data sets of distorted views, one photograph per class."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.apps.images.app import LABELS, PHOTOGRAPHS, SIDE
from penstock.core.spec import Array
from penstock.train.data.camera_views import Distortion, Views, small_rgba
from penstock.train.data.examples import ArraySet
from penstock.train.data.picture_layouts import Picture
from penstock.train.data.sampler import example_seeds

# H height, W width

# The centres of training views lie in other cells of the photograph than those of validation and test views.
TRAINING = Distortion(least_area=0.25, turn_degrees=20, perspective=0.12, light=0.5, blur=2.0, noise=6, cells=(0, 1, 2))
VALIDATION = replace(TRAINING, blur=1.5, cells=(3,))
# Only test views are motion-blurred and JPEG-compressed.
TEST = replace(TRAINING, blur=1.5, cells=(4,), shake=True, jpeg=True)
# Views of each photograph: per epoch, for validation, for test.
VIEWS, VALIDATION_VIEWS, TEST_VIEWS = 200, 30, 60
# Longer side of the first raw example in pixels, and its increment from one to the next.
MIN_RAW, RAW_STEP = 64, 17


def training_views() -> Views:
    """Training views, different in every epoch."""
    return _views(0, TRAINING, VIEWS)


def validation_views() -> ArraySet:
    """Validation views, always the same."""
    return materialize(_views(0, VALIDATION, VALIDATION_VIEWS))


def test_views() -> ArraySet:
    """Test views, always the same."""
    return materialize(_views(-1, TEST, TEST_VIEWS))


def raw_examples() -> list[Array]:
    """The photographs in many small sizes, as `decode` returns them: uint8 `[H, W, 4]`."""
    return [small_rgba(picture, most=MIN_RAW + RAW_STEP * index) for index, picture in enumerate(pictures(0))]


def materialize(views: Views) -> ArraySet:
    """The views of the first epoch, in memory."""
    indices = np.arange(len(views))
    inputs = views.empty(len(views))
    targets = views.read(indices, example_seeds(0, np.zeros_like(indices), indices), inputs)
    return ArraySet(inputs=inputs, targets=targets)


def pictures(which: int) -> list[Picture]:
    """The first (0) or last (-1) photograph of each label."""
    from skimage import data

    folder = Path(data.__file__ or "").parent
    return [Picture(file=folder / files[which], name=files[which], label=label) for label, files in PHOTOGRAPHS.items()]


def _views(which: int, distortion: Distortion, repeats: int) -> Views:
    return Views(pictures(which), LABELS, SIDE, distortion=distortion, repeats=repeats, in_memory=True)
