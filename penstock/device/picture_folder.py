"""Pictures of a folder as a source."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import final

import numpy as np

from penstock.core.decode import decode_image
from penstock.core.errors import RequestError, SourceError
from penstock.core.spec import Array
from penstock.device.source import DecodeFailures, Frame, FrameSource

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
# The limit of a pack's graph, 4,096 x 4,096.
MAX_PIXELS = 1 << 24


def picture_files(folder: Path) -> list[Path]:
    """The pictures of a folder and its subfolders, sorted; hidden files are left out.

    Raises:
        SourceError: No such folder, or no picture in it.
    """
    if not folder.is_dir():
        raise SourceError(f"there is no folder {folder}.")
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in SUFFIXES
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not files:
        raise SourceError(f"{folder} has no picture in it; they end in {', '.join(SUFFIXES)}.")
    return files


def name_in(folder: Path, file: Path) -> str:
    """The path of a picture relative to its folder.

    Raises:
        SourceError: The name is not UTF-8.
    """
    name = file.relative_to(folder).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError:
        raise SourceError(f"the name of {str(file)!r} is not UTF-8; rename it.") from None
    return name


def read_picture(file: Path) -> Array:
    """Pixels as in a browser's canvas: uint8 RGBA `[H, W, 4]`, upright by the orientation tag.

    Raises:
        SourceError: The file cannot be read, or is no picture.
    """
    try:
        return decode_image(file.read_bytes(), mode="RGBA", max_pixels=MAX_PIXELS)
    except OSError as error:
        raise SourceError(f"{file} cannot be read ({error.strerror}).") from None
    except RequestError as error:
        raise unusable(file, error) from None


def unusable(file: Path, error: RequestError) -> SourceError:
    """The error for a picture that was refused."""
    return SourceError(f"{file} cannot be used: {str(error)[:1].lower()}{str(error)[1:]}")


@final
class PictureSource(FrameSource):
    """The pictures of a folder, or one picture.

    Args:
        path: The folder or file.

    Raises:
        SourceError: There is no picture.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.recorded = True
        self.independent = True
        self.rate = None
        self.failures = DecodeFailures()
        self._root = path if path.is_dir() else path.parent
        self._files = [path] if path.is_file() else picture_files(path)

    def items(self) -> Iterator[Frame]:
        """Each picture that can be decoded."""
        number = 0
        for file in self._files:
            try:
                name, pixels = name_in(self._root, file), read_picture(file)
            except SourceError as error:
                self.failures.add(str(error))
                continue
            yield Frame(number=number, time_s=float(number), read=partial(np.asarray, pixels), name=name)
            number += 1
        if number == 0:
            raise SourceError(f"none of the {len(self._files):,} pictures of {self.name} can be read.")

    def close(self) -> None:
        """Nothing is open."""
