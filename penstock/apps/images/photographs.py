"""The photographs that come with scikit-image, one thing a class, and how they are seen."""

from pathlib import Path

from penstock.train.pictures import Picture
from penstock.train.recipe import ArraySet, Data
from penstock.train.views import Distortion, Views

# B examples of a batch

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
LEARNED = Distortion(least_area=0.25, turn_degrees=20, perspective=0.12, light=0.5, blur=1.5, noise=6, cells=(0, 1, 2))
CHOSEN_BY = Distortion(least_area=0.25, turn_degrees=20, perspective=0.12, light=0.5, blur=1.5, noise=6, cells=(3,))
# Nor was one smeared or stored as a JPEG.
TESTED_ON = Distortion(
    least_area=0.25, turn_degrees=20, perspective=0.12, light=0.5, blur=1.5, noise=6, shake=True, jpeg=True, cells=(4,)
)
# Views of each photograph: in an epoch, to choose the weights by, and to test them.
VIEWS, CHOOSING_VIEWS, TEST_VIEWS = 200, 30, 60


def photographs() -> Data:
    """Views of the photographs, others in every epoch; for choosing and testing always the same, made once."""
    learned = Views(_pictures(0), LABELS, SIDE, distortion=LEARNED, repeats=VIEWS, in_memory=True)
    validation = Views(_pictures(0), LABELS, SIDE, distortion=CHOSEN_BY, repeats=CHOOSING_VIEWS, in_memory=True)
    test = Views(_pictures(-1), LABELS, SIDE, distortion=TESTED_ON, repeats=TEST_VIEWS, in_memory=True)
    return Data(train=learned, validation=made(validation), test=made(test))


def made(views: Views) -> ArraySet:
    """The views of the first epoch, in memory."""
    import numpy as np

    from penstock.train.data import example_seeds

    indices = np.arange(len(views))
    inputs = views.empty(len(views))
    targets = views.read(indices, example_seeds(0, np.zeros_like(indices), indices), inputs)
    return ArraySet(inputs=inputs, targets=targets)


def _pictures(which: int) -> list[Picture]:
    from skimage import data

    folder = Path(data.__file__ or "").parent
    return [
        Picture(file=folder / files[which], name=files[which], label=label) for label, files in PHOTOGRAPHS.items()
    ]
