"""Sets of drawn scenes: `python -m penstock.apps.detect.drawn WORLD SEED COUNT FILE`, one process for each core."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from penstock.apps.detect import other_things, things
from penstock.apps.detect.app import HEIGHT, WIDTH
from penstock.apps.detect.scene import draw_scene
from penstock.core.errors import TrainError
from penstock.core.machine.cores import available_cores
from penstock.core.spec import Array

# n scenes, M objects of a scene at most

WORLDS = {"default": things.STYLE, "other": other_things.STYLE}
MAX_OBJECTS = 16
# The first seed of each set; sets have fewer scenes than lie between.
SEEDS = {"train": 0, "validation": 1_000_000, "test": 2_000_000}
# What marks a row of padding in `classes`.
NO_OBJECT = -1
MODULE = "penstock.apps.detect.drawn"


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledPictures:
    """Pictures and the objects in them.

    Args:
        pixels: uint8 `[n, 3, H, W]`.
        boxes: float32 `[n, M, 4]`: left, top, right, bottom in pixels; zeros beyond the objects of a picture.
        classes: int64 `[n, M]`; -1 beyond the objects of a picture.
    """

    pixels: Array
    boxes: Array
    classes: Array


def draw_scenes(world: str, seed: int, count: int) -> LabelledPictures:
    """Draw scenes in this process; scene i is that of `seed + i`."""
    pixels = np.zeros((count, 3, HEIGHT, WIDTH), np.uint8)
    boxes, classes = np.zeros((count, MAX_OBJECTS, 4), np.float32), np.full((count, MAX_OBJECTS), NO_OBJECT, np.int64)
    for place in range(count):
        scene = draw_scene(seed + place, WORLDS[world], HEIGHT, WIDTH)
        pixels[place] = scene.pixels
        found = min(len(scene.boxes), MAX_OBJECTS)
        boxes[place, :found], classes[place, :found] = scene.boxes[:found], scene.classes[:found]
    return LabelledPictures(pixels=pixels, boxes=boxes, classes=classes)


def drawn_set(part: str, count: int, world: str = "default") -> LabelledPictures:
    """Draw a set of scenes on all cores.

    Args:
        part: `"train"`, `"validation"` or `"test"`.
        count: Number of scenes.
        world: `"default"`, or `"other"` for things of other shapes and colours.

    Raises:
        TrainError: A process that draws failed.
    """
    cores = min(available_cores(), max(1, count // 8))
    ends = [count * core // cores for core in range(cores + 1)]
    with TemporaryDirectory(prefix="penstock-") as folder:
        files = [Path(folder) / f"{core}.npz" for core in range(cores)]
        running = [
            subprocess.Popen(
                [sys.executable, "-m", MODULE, world, str(SEEDS[part] + start), str(end - start), str(file)]
            )
            for start, end, file in zip(ends, ends[1:], files, strict=False)
        ]
        statuses = [process.wait() for process in running]
        if any(statuses):
            raise TrainError("the scenes could not be drawn; the reason is above.")
        parts = [np.load(file, allow_pickle=False) for file in files]
        fields = {name: np.concatenate([part[name] for part in parts]) for name in ("pixels", "boxes", "classes")}
    return LabelledPictures(**fields)


def main(world: str, seed: str, count: str, file: str) -> None:
    """Draw scenes and write them to a file."""
    made = draw_scenes(world, int(seed), int(count))
    np.savez(file, pixels=made.pixels, boxes=made.boxes, classes=made.classes)


if __name__ == "__main__":
    main(*sys.argv[1:])
