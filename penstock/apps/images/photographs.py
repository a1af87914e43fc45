"""The photographs that come with scikit-image, one thing a class, and how they are seen."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.core.spec import Array
from penstock.train.data import example_seeds
from penstock.train.examples import ArraySet
from penstock.train.pictures import Picture
from penstock.train.views import Distortion, Views, small_rgba

# H height, W width

SIDE = 96
# The files of each label: what is learned from, and where another photograph of it is held out, that one.
PHOTOGRAPHS: dict[str, tuple[str, ...]] = {
    "animal/cat": ("chelsea.png",),
    "machine/motorcycle": ("motorcycle_left.png", "motorcycle_right.png"),
    "machine/rocket": ("rocket.jpg",),
    "medicine/cell": ("cell.png",),
    "medicine/retina": ("retina.jpg",),
    "medicine/tissue": ("ihc.png",),
    "person/astronaut": ("astronaut.png",),
    "person/cameraman": ("camera.png",),
    "sky/galaxies": ("hubble_deep_field.jpg",),
    "sky/moon": ("moon.png",),
    "surface/brick": ("brick.png",),
    "surface/grass": ("grass.png",),
    "surface/gravel": ("gravel.png",),
    "table/coffee": ("coffee.png",),
    "table/coins": ("coins.png",),
    "writing/handwriting": ("text.png",),
    "writing/print": ("page.png",),
}
LABELS = tuple(PHOTOGRAPHS)
# The middle of a view that is learned from is never where those of the other sets are.
LEARNED = Distortion(least_area=0.25, turn_degrees=20, perspective=0.12, light=0.5, blur=2.0, noise=6, cells=(0, 1, 2))
CHOSEN_BY = replace(LEARNED, blur=1.5, cells=(3,))
# Nor was one of them smeared or stored as a JPEG.
TESTED_ON = replace(LEARNED, blur=1.5, cells=(4,), shake=True, jpeg=True)
# Views of each photograph: in an epoch, to choose the weights by, and to test them.
VIEWS, CHOOSING_VIEWS, TEST_VIEWS = 200, 30, 60
# The longer side of the first raw example in pixels, and how much longer that of each next one is.
LEAST_RAW, RAW_STEP = 64, 17


def learned() -> Views:
    """Views to learn from, others in every epoch."""
    return _views(0, LEARNED, VIEWS)


def chosen_by() -> ArraySet:
    """Views to choose the weights by, always the same."""
    return made(_views(0, CHOSEN_BY, CHOOSING_VIEWS))


def tested_on() -> ArraySet:
    """Views to test on, always the same."""
    return made(_views(-1, TESTED_ON, TEST_VIEWS))


def raw_examples() -> list[Array]:
    """The photographs themselves, small and of many sizes, as `decode` gives them: uint8 `[H, W, 4]`."""
    return [small_rgba(picture, most=LEAST_RAW + RAW_STEP * index) for index, picture in enumerate(pictures(0))]


def made(views: Views) -> ArraySet:
    """The views of the first epoch, in memory."""
    indices = np.arange(len(views))
    inputs = views.empty(len(views))
    targets = views.read(indices, example_seeds(0, np.zeros_like(indices), indices), inputs)
    return ArraySet(inputs=inputs, targets=targets)


def pictures(which: int) -> list[Picture]:
    """Of each label the first photograph (0), or the last (-1)."""
    from skimage import data

    folder = Path(data.__file__ or "").parent
    return [Picture(file=folder / files[which], name=files[which], label=label) for label, files in PHOTOGRAPHS.items()]


def _views(which: int, distortion: Distortion, repeats: int) -> Views:
    return Views(pictures(which), LABELS, SIDE, distortion=distortion, repeats=repeats, in_memory=True)
