"""Annotated slides of the MIDOG and TUPAC challenges, read as they are published."""

import csv
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import numpy as np
from PIL import Image, UnidentifiedImageError

from penstock.apps.mitosis.tiles import AnnotatedSlide, SlideTiles
from penstock.core.errors import TrainError
from penstock.core.spec import Array
from penstock.device.slides import Slide, open_slide
from penstock.train.recipe import Data

# n figures

# Pictures that are not tiled are decoded whole; so many stay in memory.
OPEN_SLIDES = 24
FIGURE, LOOK_ALIKE = 1, 2
# Of ten slides, in the order of their names: one for validation, one for the test.
FOLDS, VALIDATION_FOLD, TEST_FOLD = 10, 8, 9
TILES_OF_EACH = 40


def midog_slides(folder: str | Path, annotations: str = "MIDOG.json") -> list[AnnotatedSlide]:
    """Read the layout of MIDOG 2021, MIDOG 2022 and MIDOG++: pictures and one JSON file.

    Aubreville et al. 2023, "A comprehensive multi-domain dataset for mitotic figure detection". Boxes are given by two
    corners. Category 1 is a mitotic figure, 2 a look-alike. Pictures without any annotation are left out: some sets
    have unlabelled ones.

    Args:
        folder: Where the JSON file is; the pictures are in it or in its folder `images`.
        annotations: Name of the JSON file.

    Raises:
        TrainError: The file or a picture is missing, or the file is not of this layout.
    """
    folder = Path(folder)
    file = folder / annotations
    try:
        given = json.loads(file.read_text())
        pictures = {
            int(one["id"]): (str(one["file_name"]), int(one["width"]), int(one["height"])) for one in given["images"]
        }
        places: dict[int, dict[int, list[Array]]] = {}
        for one in given["annotations"]:
            kinds = places.setdefault(int(one["image_id"]), {FIGURE: [], LOOK_ALIKE: []})
            kinds[int(one["category_id"])].append(_box_centre(one["bbox"]))
    except OSError as error:
        raise TrainError(f"{file} cannot be read ({error.strerror}); name MIDOG's folder.") from None
    except (KeyError, TypeError, ValueError) as error:
        raise TrainError(f"{file} is not MIDOG's list of boxes ({type(error).__name__}: {error}).") from None
    slides: list[AnnotatedSlide] = []
    for number, kinds in sorted(places.items()):
        if number not in pictures:
            raise TrainError(f"{file} has boxes of the picture {number}, which it does not list.")
        name, width, height = pictures[number]
        slides.append(
            AnnotatedSlide(
                slide=_LazySlide(_existing(folder, name), width, height),
                figures=_points(kinds[FIGURE]),
                look_alikes=_points(kinds[LOOK_ALIKE]),
            )
        )
    return slides


def tupac_slides(images: str | Path, ground_truth: str | Path) -> list[AnnotatedSlide]:
    """Read the layout of the mitosis data of TUPAC16: `CASE/NAME.tif`, and `CASE/NAME.csv` of rows and columns.

    Veta et al. 2019, "Predicting breast tumor proliferation from whole-slide images: the TUPAC16 challenge". A picture
    without a CSV file has no figures.

    Args:
        images: Folder of the pictures, with all parts.
        ground_truth: Folder of the CSV files.

    Raises:
        TrainError: There are no pictures or no CSV files, or a file is not of this layout.
    """
    images, ground_truth = Path(images), Path(ground_truth)
    files = sorted(images.rglob("*.tif"))
    if not files:
        raise TrainError(f"{images} has no .tif below it; name the folder of TUPAC's pictures.")
    # Without any, every slide would count as one without figures.
    if not any(ground_truth.glob("*/*.csv")):
        raise TrainError(f"{ground_truth} has no CASE/NAME.csv below it; name the folder of TUPAC's ground truth.")
    slides: list[AnnotatedSlide] = []
    for file in files:
        try:
            with Image.open(file) as picture:
                width, height = picture.size
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise TrainError(f"{file} is no picture ({error}); copy it again.") from None
        figures = _rows_and_columns(ground_truth / file.parent.name / f"{file.stem}.csv")
        slides.append(AnnotatedSlide(slide=_LazySlide(file, width, height), figures=figures, look_alikes=_points([])))
    return slides


def slide_data(slides: Sequence[AnnotatedSlide], tiles_of_each: int = TILES_OF_EACH) -> Data:
    """Eight of ten slides to train on, one for validation, one for the test.

    Args:
        slides: In a fixed order; at least ten.
        tiles_of_each: Training tiles of each slide and epoch.

    Raises:
        TrainError: There are fewer than ten.
    """
    if len(slides) < FOLDS:
        raise TrainError(
            f"there are {len(slides)} slides; give {FOLDS} at least, or make the `Data` of your own split."
        )
    held_out = (VALIDATION_FOLD, TEST_FOLD)
    train = [one for index, one in enumerate(slides) if index % FOLDS not in held_out]
    validation, test = ([one for index, one in enumerate(slides) if index % FOLDS == fold] for fold in held_out)
    return Data(train=SlideTiles(train, tiles_of_each), validation=SlideTiles(validation), test=SlideTiles(test))


@final
class _LazySlide(Slide):
    """A slide that is opened when it is read; the latest ones stay open."""

    def __init__(self, file: Path, width: int, height: int) -> None:
        self.name, self.width, self.height = str(file), width, height

    def _read(self, left: int, top: int, width: int, height: int) -> Array:
        return _opened(self.name).read(left, top, width, height)


@lru_cache(OPEN_SLIDES)
def _opened(file: str) -> Slide:
    return open_slide(file)


def _existing(folder: Path, name: str) -> Path:
    for file in (folder / name, folder / "images" / name):
        if file.is_file():
            return file
    raise TrainError(f"{folder / name} is missing; put MIDOG's pictures beside its JSON file or into images/.")


def _box_centre(box: Any) -> Array:
    left, top, right, bottom = (float(side) for side in box)
    if not (left < right and top < bottom):
        raise ValueError(f"the box {box} is not left, top, right, bottom")
    return np.array([(left + right) / 2, (top + bottom) / 2], np.float32)


def _rows_and_columns(file: Path) -> Array:
    if not file.is_file():
        return _points([])
    try:
        with file.open(newline="") as lines:
            return _points([np.array([float(row[1]), float(row[0])]) for row in csv.reader(lines) if row])
    except (OSError, IndexError, ValueError) as error:
        raise TrainError(f"{file} is not a row and a column in each line ({error}); copy it again.") from None


def _points(points: list[Array]) -> Array:
    return np.array(points, np.float32).reshape(-1, 2)
