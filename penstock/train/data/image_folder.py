"""Pictures in one folder for each class, decoded on reading."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np

from penstock.core.errors import BadExample, PenstockError, TrainError
from penstock.core.spec import Array, TensorSpec
from penstock.train.data.examples import Examples
from penstock.train.data.fingerprint import hash_of, hash_of_text, spread_indices
from penstock.train.data.picture_reader import CENTRE, PictureReader, is_of_the_machine
from penstock.train.data.sampler import Indices, Seeds

# B examples of a batch

SUFFIXES = {
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".bmp": "image/bmp",
}


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

    in_processes: ClassVar[bool] = True

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
        self.input_dtype, self.input_shape, self.varies = spec.numpy_dtype, spec.shape, random
        self._reader = PictureReader(spec, random=random, share=share, decode=decode, user="ImageFolder")
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
        draws = self._reader.draws(seeds_B)
        for row, index in enumerate(indices_B.tolist()):
            file = self.root / self.files[index]
            try:
                inputs_B[row] = self._reader.read(file, SUFFIXES[file.suffix.lower()], draws[row])
            except Exception as error:
                if is_of_the_machine(error):
                    raise TrainError(
                        f"{file} cannot be read ({_reason(error)}), which is an "
                        f"error of the machine, not of the picture; correct it and resume."
                    ) from error
                raise self._bad(index, error) from error
        return self.targets[indices_B]

    def fingerprint(self) -> dict[str, str]:
        """See `Examples`; the names of all files with their classes, and hashes of some files."""
        names = hash_of_text(f"{target} {file}" for target, file in zip(self.targets, self.files, strict=True))
        found = {"examples": f"{len(self):,}", "inputs": self.describe(), "names of the pictures": names}
        for index in spread_indices(len(self)):
            # A missing file is a bad example, which the reading names.
            with suppress(OSError):
                found[f"example {index:,}"] = hash_of((self.root / self.files[index]).read_bytes())
        return found

    def _bad(self, index: int, error: Exception) -> BadExample:
        # Each of Pillow's decoders has its own errors for damaged files: EOFError, struct.error, IndexError, ...
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({_reason(error)})"
        return BadExample(f"{self.root / self.files[index]} {why}.", index=index, name=self.files[index])


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
