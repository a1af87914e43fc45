"""Pictures in one folder for each class, decoded on reading."""

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np
from PIL import Image

from penstock.core.decode import FORMATS, plain_pixels
from penstock.core.errors import BadExample, PenstockError, TrainError
from penstock.core.spec import Array, TensorSpec
from penstock.train.data.examples import Examples
from penstock.train.data.sampler import Indices, Seeds, draws_of

# B examples of a batch, H height, W width

SUFFIXES = {
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".bmp": "image/bmp",
}
# Szegedy et al. 2015, "Going deeper with convolutions", section 6: the share of the picture, and its sides' ratio.
MIN_AREA, MAX_AREA = 0.08, 1.0
MIN_RATIO, MAX_RATIO = 3 / 4, 4 / 3
# Errors of the machine, not of the picture: a replacement would fail as well.
_OF_THE_MACHINE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO}
TRIES = 10
# One draw for the flip; for each try of a crop two for its size and two for its position.
DRAWS = 1 + 4 * TRIES
# The centre crop's share of the shorter side: 224 of 256 pixels.
CENTRE = 0.875

Box = tuple[float, float, float, float]


@final
class ImageFolder(Examples):
    """`ROOT/CLASS/*.jpg`: the classes are the folders in the order of their names, the targets their numbers.

    JPEG, PNG, WebP, GIF and BMP files are examples, whatever their depth below the class's folder; other files and
    hidden ones are not. Pictures are rotated by their orientation tag. JPEG files are decoded at a half, a quarter or
    an eighth of their size where that is enough.

    Args:
        root: The folder of the classes.
        spec: The application's raw input: uint8 `(H, W)` for grey, `(H, W, 3)` or `(3, H, W)` for colour.
        random: Random crops of 8% to 100% of the area and an aspect ratio of 3/4 to 4/3, mirrored half of the time,
            another one in every epoch. Otherwise the centre crop.
        share: The sides of the centre crop, as a share of the largest crop with the spec's ratio.
        classes: The classes in the order of their targets, such as the labels of an application's output; all folders
            must be among them.
        decode: The application's `decode`, to read pictures exactly as the server does.

    Raises:
        TrainError: The folder has no classes, a class has no pictures, or the spec is not a picture's.
    """

    def __init__(
        self,
        root: str | Path,
        spec: TensorSpec,
        *,
        random: bool = False,
        share: float = CENTRE,
        classes: tuple[str, ...] | None = None,
        decode: Callable[[bytes, str], Any] | None = None,
    ) -> None:
        self._spec, self._share, self._decode = spec, share, decode
        self.input_dtype, self.input_shape, self.varies = spec.numpy_dtype, spec.shape, random
        if decode is None:
            self._mode, self._height, self._width, self._channels_first = _layout(spec)
        elif random:
            raise TrainError("ImageFolder has random=True and a decode, which is not random; give one of them.")
        if not 0 < share <= 1:
            raise TrainError(f"ImageFolder has share {share}; it must be above 0, and 1 at most.")
        self.root = Path(root)
        found = _class_folders(self.root)
        self.classes = tuple(sorted(found)) if classes is None else classes
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            raise TrainError(
                f"{self.root} has a folder {unknown[0]!r}, which is not one of the {len(self.classes)} classes."
            )
        self.files: list[str] = []
        targets: list[int] = []
        for target, name in enumerate(self.classes):
            if name in found:
                self.files += [f"{name}/{file}" for file in found[name]]
                targets += [target] * len(found[name])
        self.targets = np.array(targets, np.int64)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Array:
        """See `Examples`."""
        draws_BD = draws_of(seeds_B, DRAWS) if self.varies else np.zeros((len(indices_B), 0))
        for row, index in enumerate(indices_B.tolist()):
            try:
                inputs_B[row] = self._picture(self.root / self.files[index], draws_BD[row].tolist())
            except Exception as error:
                if isinstance(error, MemoryError) or getattr(error, "errno", None) in _OF_THE_MACHINE:
                    raise TrainError(
                        f"{self.root / self.files[index]} cannot be read ({_reason(error)}), which is an "
                        f"error of the machine, not of the picture; correct it and resume."
                    ) from error
                raise self._bad(index, error) from error
        return self.targets[indices_B]

    def _bad(self, index: int, error: Exception) -> BadExample:
        # Each of Pillow's decoders has its own errors for damaged files: EOFError, struct.error, IndexError, ...
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({_reason(error)})"
        return BadExample(f"{self.root / self.files[index]} {why}.", index=index, name=self.files[index])

    def _picture(self, file: Path, draws: list[float]) -> Array:
        if self._decode is not None:
            return self._spec.check(self._decode(file.read_bytes(), SUFFIXES[file.suffix.lower()]))
        with Image.open(file, formats=FORMATS) as image:
            turned = image.getexif().get(0x0112, 1) >= 5
            width, height = (image.height, image.width) if turned else image.size
            if draws:
                box = random_box(width, height, self._width / self._height, draws[1:])
            else:
                box = centre_box(width, height, self._width / self._height, self._share)
            # The smallest size to decode that still has the crop at full resolution.
            smaller = min((box[2] - box[0]) / self._width, (box[3] - box[1]) / self._height)
            if smaller > 1:
                image.draft(None, (int(image.width / smaller), int(image.height / smaller)))
            whole = plain_pixels(image, self._mode)
            across, down = whole.width / width, whole.height / height
            part = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
            small = whole.resize((self._width, self._height), Image.Resampling.BILINEAR, part, reducing_gap=2.0)
            if draws and draws[0] < 0.5:
                small = small.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = np.asarray(small)
        return pixels.transpose(2, 0, 1) if self._channels_first else pixels


def random_box(width: int, height: int, ratio: float, draws: list[float]) -> Box:
    """Choose a random crop: left, top, right, bottom in pixels.

    Args:
        width: Of the picture.
        height: Of the picture.
        ratio: Width over height of the output; that of the crop is 3/4 to 4/3 of it.
        draws: Four numbers from 0 to 1 for each try; a crop that does not fit is drawn again.
    """
    for attempt in range(TRIES):
        area, shape, x, y = draws[4 * attempt : 4 * attempt + 4]
        pixels = width * height * (MIN_AREA + (MAX_AREA - MIN_AREA) * area)
        own = ratio * math.exp(math.log(MIN_RATIO) + (math.log(MAX_RATIO) - math.log(MIN_RATIO)) * shape)
        wide, high = math.sqrt(pixels * own), math.sqrt(pixels / own)
        if wide <= width and high <= height:
            left, top = x * (width - wide), y * (height - high)
            return left, top, left + wide, top + high
    return centre_box(width, height, ratio, 1.0)


def centre_box(width: int, height: int, ratio: float, share: float) -> Box:
    """Compute the centre crop: left, top, right, bottom in pixels.

    Args:
        width: Of the picture.
        height: Of the picture.
        ratio: Width over height of the crop.
        share: The crop's sides, as a share of the largest crop with that ratio.
    """
    wide, high = share * min(width, height * ratio), share * min(height, width / ratio)
    left, top = (width - wide) / 2, (height - high) / 2
    return left, top, left + wide, top + high


def _layout(spec: TensorSpec) -> tuple[Any, int, int, bool]:
    match spec.shape:
        case (height, width) if spec.dtype == "uint8":
            return "L", height, width, False
        case (height, width, 3) if spec.dtype == "uint8":
            return "RGB", height, width, False
        case (3, height, width) if spec.dtype == "uint8":
            return "RGB", height, width, True
        case _:
            raise TrainError(
                f"pictures are read as {spec.describe()}; give a spec of uint8 with shape (H, W), (H, W, 3) or "
                f"(3, H, W)."
            )


def _class_folders(root: Path) -> dict[str, list[str]]:
    """List the pictures of each class, sorted, by their paths below its folder."""
    folders = folders_in(root)
    if not folders:
        raise TrainError(f"{root} has no folders; put the pictures of each class into one of its own.")
    return {folder.name: pictures_below(folder) for folder in folders}


def folders_in(root: Path) -> list[Path]:
    """List the folders in a folder, sorted, without hidden ones."""
    if not root.is_dir():
        raise TrainError(f"there is no folder {root}; give one that holds a folder of pictures for each class.")
    return sorted(folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def is_picture(name: str) -> bool:
    """Return True for the name of a picture file that is not hidden."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


def pictures_below(folder: Path, *, may_be_empty: bool = False) -> list[str]:
    """List the pictures at any depth below a folder, sorted, by their paths in it."""
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = Path(place).relative_to(folder)
        found += [(below / name).as_posix() for name in filter(is_picture, files)]
    if not found and not may_be_empty:
        raise TrainError(f"{folder} holds no picture ({', '.join(SUFFIXES)}); remove it or fill it.")
    return sorted(found)


def _reason(error: Exception) -> str:
    # Our own errors end with a full stop.
    return str(error).rstrip(".") if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
