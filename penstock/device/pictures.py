"""Pictures of a folder, one after the other."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import final

from penstock.core.decode import decode_image
from penstock.core.errors import RequestError, SourceError
from penstock.core.spec import Array
from penstock.device.frames import Broken, Frame, Source

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
# What a pack's graph takes at most, 4,096 x 4,096.
MOST_PIXELS = 1 << 24


def picture_files(folder: Path) -> list[Path]:
    """The pictures of a folder and of those in it, by name; hidden ones are left out.

    Raises:
        SourceError: There is none, or no such folder.
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
    """What a picture of a folder is called in lists.

    Raises:
        SourceError: Its name is no text, so that no list could hold it.
    """
    name = file.relative_to(folder).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError:
        raise SourceError(f"the name of {str(file)!r} is not UTF-8; rename it.") from None
    return name


def read_picture(file: Path) -> Array:
    """Its pixels as a browser's canvas gives them, uint8 RGBA `[H, W, 4]`, turned as its orientation tag says.

    Raises:
        SourceError: It cannot be read, or is no picture.
    """
    try:
        return decode_image(file.read_bytes(), mode="RGBA", max_pixels=MOST_PIXELS)
    except OSError as error:
        raise SourceError(f"{file} cannot be read ({error.strerror}).") from None
    except RequestError as error:
        raise SourceError(f"{file} cannot be used: {str(error)[:1].lower()}{str(error)[1:]}") from None


@final
class Pictures(Source):
    """A folder of pictures, or one picture.

    Args:
        path: Of it.

    Raises:
        SourceError: There is none.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.recorded = True
        self.apart = True
        self.rate = None
        self.broken = Broken()
        self._root = path if path.is_dir() else path.parent
        self._files = [path] if path.is_file() else picture_files(path)

    def frames(self) -> Iterator[Frame]:
        """Each picture; those that cannot be decoded are named in `broken` instead."""
        number = 0
        for file in self._files:
            try:
                name, pixels = name_in(self._root, file), read_picture(file)
            except SourceError as error:
                self.broken.add(str(error))
                continue
            yield Frame(number=number, time_s=float(number), read=partial(_given, pixels), name=name)
            number += 1
        if number == 0:
            raise SourceError(f"none of the {len(self._files):,} pictures of {self.name} can be read.")

    def close(self) -> None:
        """Nothing is held."""


def _given(pixels: Array) -> Array:
    return pixels
