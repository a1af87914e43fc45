"""Folders of small pictures that are drawn by the tests."""

from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.spec import Array, TensorSpec

COLOUR = TensorSpec(dtype="uint8", shape=(16, 20, 3), meaning="a picture")


def smooth(seed: int, height: int, width: int) -> Array:
    """A picture of slow waves, which JPEG keeps nearly as they are, `[H, W, 3]`."""
    y, x = np.mgrid[:height, :width]
    random = np.random.default_rng(seed)
    waves = [
        np.sin(x / width * random.uniform(1, 6) + y / height * random.uniform(1, 6) + random.uniform(0, 6))
        for _ in range(3)
    ]
    return np.round(127.5 + 110 * np.stack(waves, 2)).astype(np.uint8)


def picture_folder(root: Path, per_class: int = 4, classes: tuple[str, ...] = ("cats", "dogs", "eels")) -> Path:
    """Write ROOT/CLASS/N.jpg of several sizes; the last of each class is a PNG."""
    for target, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            seed = 100 * target + number
            last = number == per_class - 1
            save(smooth(seed, 40 + 7 * number, 60 - 5 * target), root / name / f"{number}.{'png' if last else 'jpg'}")
    return root


def save(pixels: Array, file: Path, **options: Any) -> None:
    """Write one picture, in the format of the file's suffix."""
    from PIL import Image

    if file.suffix == ".jpg":
        options["quality"] = 95
    Image.fromarray(pixels).save(file, **options)
