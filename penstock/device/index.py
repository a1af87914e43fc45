"""An index of a folder's pictures by what a pack's network makes of them.

    vectors.npy     float32 [N, D], of unit length
    items.json      of each its file, the SHA-256 of that and a thumbnail
    index.json      which network made them
    thumbs/         small pictures

An index that is interrupted goes on where it was: what is done stands in a folder beside it, whose name ends in -part.
"""

import fcntl
import hashlib
import io
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from PIL import Image

from penstock.core.decode import decode_image
from penstock.core.durable import put_folder, write_through
from penstock.core.errors import PackError, RequestError, SourceError
from penstock.core.pack import INDEX
from penstock.core.spec import Array
from penstock.device.engine import Engine
from penstock.device.frames import Broken
from penstock.device.pictures import MOST_PIXELS, name_in, picture_files
from penstock.device.search import (
    DESCRIPTION,
    FILES,
    ITEMS,
    SCHEMA_VERSION,
    VECTORS,
    Item,
    Vector,
    embedding_of,
    made_by,
    read_index,
    thumbnail_of,
)

# N pictures, D numbers of an embedding

THUMBNAIL = 160
# Read and decoded while the network looks at another.
READERS, AHEAD = 2, 4
# What is lost when it is interrupted.
KEPT_EVERY = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexed:
    """What came of indexing a folder.

    Args:
        folder: Of the index.
        count: Pictures in it.
        looked_at: Those of them that the network looked at now; of the others it was known.
        broken: Those that could not be used.
    """

    folder: Path
    count: int
    looked_at: int
    broken: Broken


@final
class _Part:
    """What is done of an index: rows of a journal and as many vectors, in a folder beside the index."""

    def __init__(self, folder: Path, made: dict[str, Any]) -> None:
        self.folder = folder
        self.vectors: dict[str, Vector] = {}
        self._size: int = made["dim"]
        mark, said = folder / "made-by", json.dumps(made)
        if mark.exists() and mark.read_text() != said:
            # Of another network.
            _empty(folder)
        (folder / "thumbs").mkdir(exist_ok=True)
        mark.write_text(said)
        self._names, self._numbers = folder / "part.txt", folder / "part.f32"
        self._new: list[tuple[str, Vector]] = []
        self._read()

    def _read(self) -> None:
        names = self._names.read_text().splitlines() if self._names.exists() else []
        numbers = np.fromfile(self._numbers, np.float32) if self._numbers.exists() else np.zeros(0, np.float32)
        # Numbers are written first: a last one that was cut has no name.
        whole = min(len(names), len(numbers) // self._size)
        rows = numbers[: whole * self._size].reshape(whole, self._size)
        self.vectors.update(zip(names, rows, strict=False))
        self._numbers.write_bytes(rows.tobytes())
        self._names.write_text("".join(f"{name}\n" for name in names[:whole]))

    def add(self, sha256: str, vector: Vector) -> None:
        self.vectors[sha256] = vector
        self._new.append((sha256, vector))
        if len(self._new) >= KEPT_EVERY:
            self.keep()

    def keep(self) -> None:
        with self._numbers.open("ab") as sink:
            sink.write(b"".join(vector.tobytes() for _, vector in self._new))
        with self._names.open("a") as sink:
            sink.write("".join(f"{sha256}\n" for sha256, _ in self._new))
        self._new.clear()


def index_folder(
    engine: Engine, pictures: Path, to: Path | None = None, said: Callable[[int, int], None] | None = None
) -> Indexed:
    """Make the index of a folder's pictures, or bring one up to date: what is in it already is not looked at again.

    Args:
        engine: A pack that has an embedding.
        pictures: The folder.
        to: The index's folder; `index` in the pack by default.
        said: Called with how many pictures are done, and how many there are.

    Raises:
        PackError: The pack has no embedding, something else is where the index would go, another one is at work there,
            or it cannot be written.
        SourceError: There is no picture that can be used, or no such folder.
    """
    made = made_by(engine)
    # A link to an index stays; what it points to is replaced.
    asked = to or engine.pack.folder / INDEX
    place = Path(os.path.realpath(asked))
    if place.exists() and not (place / DESCRIPTION).exists():
        raise PackError(f"{place} is there and is no index; name another folder with --to, or remove it.")
    beside = place.with_name(f"{place.name}-part")
    files = _files(pictures, place, beside)
    try:
        with _alone(beside):
            part = _Part(beside, made)
            _take_over(part, place, made)
            items, broken, looked_at = _looked_at(engine, pictures, files, part, said)
            part.keep()
            if not items:
                shutil.rmtree(beside)
                raise SourceError(f"none of the {len(files):,} pictures of {pictures} can be used; {broken.named[0]}")
            _finish(part, items, made, place)
    except OSError as error:
        raise PackError(
            f"the index {place} cannot be written ({error.strerror or error}); mend that and index again, or name "
            f"another folder with --to."
        ) from error
    return Indexed(folder=asked, count=len(items), looked_at=looked_at, broken=broken)


def _files(pictures: Path, place: Path, beside: Path) -> list[Path]:
    """The folder's own pictures: the small ones of an index in it are none."""
    real = Path(os.path.realpath(pictures))
    files = [
        file
        for file in picture_files(pictures)
        if not {place, beside} & set((real / file.relative_to(pictures)).parents)
    ]
    if not files:
        raise SourceError(f"{pictures} has no picture in it but those of the index {place}.")
    return files


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Keep others out of a folder, which is made where there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have put it in its place meanwhile.
            mine = folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())
        except BlockingIOError:
            mine = False
        if not mine:
            raise PackError(f"another 'penstock index' is at work in {folder}; wait until it is done.")
        yield
    finally:
        os.close(descriptor)


def _looked_at(
    engine: Engine, pictures: Path, files: list[Path], part: _Part, said: Callable[[int, int], None] | None
) -> tuple[list[Item], Broken, int]:
    items, broken, looked_at = list[Item](), Broken(), 0
    for number, (file, read) in enumerate(_ahead(files, part.vectors)):
        try:
            sha256, pixels = read.result()
            item = Item(file=name_in(pictures, file), sha256=sha256, thumbnail=thumbnail_of(sha256))
            # The same picture may lie there twice.
            vector = None if pixels is None or sha256 in part.vectors else embedding_of(engine, pixels)
        except OSError as error:
            broken.add(f"{file} cannot be read ({error.strerror}).")
        except SourceError as error:
            broken.add(str(error))
        except RequestError as error:
            broken.add(f"{file} cannot be used: {str(error)[:1].lower()}{str(error)[1:]}")
        else:
            if pixels is not None and vector is not None:
                _thumbnail(pixels, part.folder / item.thumbnail)
                part.add(sha256, vector)
                looked_at += 1
            items.append(item)
        if said is not None:
            said(number + 1, len(files))
    return items, broken, looked_at


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _take_over(part: _Part, place: Path, made: dict[str, Any]) -> None:
    """What an index that is there knows already."""
    if not (place / DESCRIPTION).exists():
        return
    old = read_index(place)
    if old.made_by != made:
        return
    for item, vector in zip(old.items, old.vectors_ND, strict=True):
        thumbnail = place / thumbnail_of(item.sha256)
        if item.sha256 not in part.vectors and thumbnail.exists():
            shutil.copyfile(thumbnail, part.folder / thumbnail_of(item.sha256))
            part.add(item.sha256, np.array(vector))


def _ahead(files: list[Path], known: Mapping[str, Vector]) -> Iterator[tuple[Path, "Future[tuple[str, Array | None]]"]]:
    """Each file with its SHA-256 and, unless that is known, its pixels; the next ones are read meanwhile."""

    def read(file: Path) -> tuple[str, Array | None]:
        data = file.read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        return sha256, None if sha256 in known else decode_image(data, mode="RGBA", max_pixels=MOST_PIXELS)

    with ThreadPoolExecutor(READERS) as pool:
        waiting: deque[tuple[Path, Future[tuple[str, Array | None]]]] = deque()
        try:
            for file in files:
                waiting.append((file, pool.submit(read, file)))
                if len(waiting) > AHEAD:
                    yield waiting.popleft()
            while waiting:
                yield waiting.popleft()
        finally:
            for _, future in waiting:
                future.cancel()


def _thumbnail(pixels: Array, file: Path) -> None:
    picture = Image.fromarray(np.ascontiguousarray(pixels[:, :, :3]))
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=80)
    file.write_bytes(data.getvalue())


def _finish(part: _Part, items: list[Item], made: dict[str, Any], place: Path) -> None:
    folder = part.folder
    vectors_ND = np.stack([part.vectors[item.sha256] for item in items])
    np.save(folder / VECTORS, vectors_ND)
    listed = json.dumps([asdict(item) for item in items], ensure_ascii=False, indent=1)
    (folder / ITEMS).write_text(listed, encoding="utf-8")
    used = {item.thumbnail for item in items}
    for file in (folder / "thumbs").iterdir():
        if f"thumbs/{file.name}" not in used:
            file.unlink()
    for name in ("part.txt", "part.f32", "made-by"):
        (folder / name).unlink()
    sha256 = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
    described = {"schema_version": SCHEMA_VERSION, **made, "sha256": sha256}
    write_through(folder / DESCRIPTION, json.dumps(described, indent=1, sort_keys=True).encode())
    put_folder(folder, place)
    shutil.rmtree(folder, ignore_errors=True)
