"""Pictures with boxes in the layouts of COCO and KITTI, scaled into the network's frame."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from PIL import Image, ImageOps

from penstock.apps.detect.app import HEIGHT, LABELS, WIDTH
from penstock.apps.detect.drawn import NO_OBJECT
from penstock.core.errors import BadExample, TrainError
from penstock.core.spec import Array
from penstock.nn.letterbox import Letterbox
from penstock.train.data.examples import Examples
from penstock.train.data.sampler import Indices, Seeds
from penstock.train.data.trees import Tree

# n objects of a picture, M objects of a picture at most

# Names of COCO's categories and KITTI's types that are the application's classes; others are left out.
COCO_NAMES = {
    "car": "car",
    "truck": "car",
    "bus": "car",
    "person": "person",
    "stop sign": "sign",
    "traffic light": "light",
}
KITTI_NAMES = {"Car": "car", "Van": "car", "Truck": "car", "Pedestrian": "person", "Person_sitting": "person"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxedPicture:
    """A file and the objects in it.

    Args:
        file: The picture.
        boxes: float32 `[n, 4]`: left, top, right, bottom in its pixels.
        classes: int64 `[n]`.
    """

    file: Path
    boxes: Array
    classes: Array


def coco_labels(annotations: str | Path) -> tuple[str, ...]:
    """The names of the categories of a COCO file that have boxes, in the order of the file.

    Raises:
        TrainError: It is no such file, or no category has a box.
    """
    try:
        given = json.loads(Path(annotations).read_bytes())
        used = {each["category_id"] for each in given["annotations"]}
        labels = tuple(str(each["name"]) for each in given["categories"] if each["id"] in used)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_coco(annotations, error) from None
    if not labels:
        raise TrainError(f"{annotations} has no boxes; give a file with annotations.")
    return labels


def coco_pictures(
    annotations: str | Path,
    pictures: str | Path,
    names: Mapping[str, str] = COCO_NAMES,
    labels: Sequence[str] = LABELS,
) -> list[BoxedPicture]:
    """Read a COCO file of instances, `instances_val2017.json`.

    Args:
        annotations: The JSON file.
        pictures: The folder of its pictures.
        names: The application's label of each category that counts. Crowds are left out.
        labels: The application's labels, in the order of its classes.

    Raises:
        TrainError: It is no such file, a box is not four finite numbers with a size, or `names` gives a category a name
            that is no label.
    """
    try:
        given = json.loads(Path(annotations).read_bytes())
        kinds = {
            each["id"]: _class_of(each["name"], names, labels) for each in given["categories"] if each["name"] in names
        }
        rows: dict[Any, list[tuple[list[float], int]]] = {each["id"]: [] for each in given["images"]}
        for each in given["annotations"]:
            if each["category_id"] in kinds and not each.get("iscrowd", 0):
                left, top, wide, high = map(float, each["bbox"])
                if not _is_box(left, top, left + wide, top + high):
                    raise TrainError(
                        f"annotation {each.get('id', 'without id')} of {annotations} has the bbox {each['bbox']}; it "
                        f"must be left, top, width and height, finite and the last two not negative."
                    )
                rows[each["image_id"]].append(([left, top, left + wide, top + high], kinds[each["category_id"]]))
        files = {each["id"]: Path(pictures) / each["file_name"] for each in given["images"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _no_coco(annotations, error) from None
    return [_boxed(files[each], found) for each, found in rows.items()]


def _no_coco(annotations: str | Path, error: Exception) -> TrainError:
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return TrainError(
        f"{annotations} is not a COCO file of instances ({reason}); give one such as instances_val2017.json."
    )


def kitti_pictures(
    root: str | Path, names: Mapping[str, str] = KITTI_NAMES, labels: Sequence[str] = LABELS
) -> list[BoxedPicture]:
    """Read KITTI's layout of the object benchmark, `ROOT/image_2/*.png` with `ROOT/label_2/*.txt`.

    Args:
        root: The folder of both.
        names: The application's label of each type that counts.
        labels: The application's labels, in the order of its classes.

    Raises:
        TrainError: There are no label files, a picture is missing, a line is not a type and its numbers, a box is not
            finite or has a negative size, or `names` gives a type a name that is no label.
    """
    files, made = sorted((Path(root) / "label_2").glob("*.txt")), list[BoxedPicture]()
    if not files:
        raise TrainError(f"{root} has no label_2/*.txt; give a folder in the layout of KITTI's object benchmark.")
    for file in files:
        found: list[tuple[list[float], int]] = []
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            kind, *numbers = line.split() or [""]
            if kind in names:
                found.append((_kitti_box(file, number, line, numbers), _class_of(kind, names, labels)))
        pictures = [Path(root) / "image_2" / f"{file.stem}{suffix}" for suffix in (".png", ".jpg")]
        present = [picture for picture in pictures if picture.is_file()]
        if not present:
            raise TrainError(f"{file} has no picture {pictures[0]}; copy it there.")
        made.append(_boxed(present[0], found))
    return made


def _kitti_box(file: Path, number: int, line: str, numbers: list[str]) -> list[float]:
    try:
        left, top, right, bottom = map(float, numbers[3:7])
    except ValueError:
        raise TrainError(
            f"line {number} of {file} is {line!r:.60}; it must be a type and at least seven numbers, the "
            f"box as the fourth to the seventh."
        ) from None
    if not _is_box(left, top, right, bottom):
        raise TrainError(
            f"line {number} of {file} has the box {' '.join(numbers[3:7])}; it must be left, top, right and bottom, "
            f"finite, the right not before the left and the bottom not above the top."
        )
    return [left, top, right, bottom]


def _is_box(left: float, top: float, right: float, bottom: float) -> bool:
    return all(map(isfinite, (left, top, right, bottom))) and left <= right and top <= bottom


def _class_of(kind: str, names: Mapping[str, str], labels: Sequence[str]) -> int:
    label = names[kind]
    if label not in labels:
        raise TrainError(
            f"names gives {kind!r} the label {label!r}, which is none of the labels {', '.join(labels)}; add it to "
            f"labels, or give {kind!r} one of them."
        )
    return labels.index(label)


def _boxed(file: Path, found: list[tuple[list[float], int]]) -> BoxedPicture:
    boxes = np.array([box for box, _ in found], np.float32).reshape(-1, 4)
    return BoxedPicture(file=file, boxes=boxes, classes=np.array([kind for _, kind in found], np.int64))


@final
class BoxedPictures(Examples):
    """Pictures with boxes as examples of the network: scaled into its frame as `prepare` does.

    Args:
        pictures: See `coco_pictures` and `kitti_pictures`.
        frame: Height and width of the frame, in pixels.

    Raises:
        TrainError: There are none.
    """

    def __init__(self, pictures: Sequence[BoxedPicture], frame: tuple[int, int] = (HEIGHT, WIDTH)) -> None:
        if not pictures:
            raise TrainError("there are no pictures; give at least one.")
        self._pictures = pictures
        self._room = max(1, *(len(picture.boxes) for picture in pictures))
        self._frame = Letterbox(*frame)
        self.input_dtype, self.input_shape = np.dtype(np.uint8), (3, *frame)

    def __len__(self) -> int:
        """Count the pictures."""
        return len(self._pictures)

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Tree:
        """See `Examples`."""
        boxes = np.zeros((len(indices_B), self._room, 4), np.float32)
        classes = np.full((len(indices_B), self._room), NO_OBJECT, np.int64)
        for row, index in enumerate(indices_B.tolist()):
            picture = self._pictures[index]
            pixels = raw_picture(picture.file, index)
            with torch.inference_mode():
                inputs_B[row] = self._frame(torch.from_numpy(pixels)).round().numpy()
            _, height, width = self.input_shape
            count, share = len(picture.boxes), max(pixels.shape[0] / height, pixels.shape[1] / width)
            boxes[row, :count], classes[row, :count] = picture.boxes / share, picture.classes
        return {"boxes": boxes, "classes": classes}


def raw_picture(file: Path, index: int = 0) -> Array:
    """Read a picture as `decode` does, uint8 `[H, W, 4]`.

    Args:
        file: The picture.
        index: Its index in its set, for errors.

    Raises:
        BadExample: It cannot be read.
    """
    try:
        with Image.open(file) as opened:
            return np.asarray(ImageOps.exif_transpose(opened).convert("RGBA")).copy()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadExample(f"{file} cannot be read ({error}); replace it.", index=index, name=str(file)) from None
