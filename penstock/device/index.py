"""Index a folder's pictures by their embeddings.

    vectors.npy     float32 [N, D], of unit length
    items.json      for each picture its file, its SHA-256 and its thumbnail
    index.json      the network that made them
    thumbs/         thumbnails

An interrupted run resumes: finished pictures are kept in a folder beside the index, whose name ends in -part.
"""

import fcntl
import hashlib
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
from penstock.core.errors import PackError, RequestError, SourceError
from penstock.core.packs.pack import INDEX
from penstock.core.pictures.picture_index import (
    DESCRIPTION,
    FILES,
    ITEMS,
    SCHEMA_VERSION,
    VECTORS,
    IndexItem,
    Vector,
    read_index,
    thumbnail_of,
)
from penstock.core.spec import Array
from penstock.core.storage.atomic_write import put_folder, write_through
from penstock.device.pack_engine import PackEngine
from penstock.device.picture_folder import MAX_PIXELS, name_in, picture_files, unusable
from penstock.device.search import embedding_of, model_of
from penstock.device.source import DecodeFailures

# N pictures, D numbers of an embedding

THUMBNAIL = 160
# Pictures are read and decoded while the network runs on another.
READERS, READ_AHEAD = 2, 4
# Finished vectors: PARTS/SHA-256 of the network/SHA-256 of the picture.
PARTS = "parts"


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexReport:
    """Result of indexing a folder.

    Args:
        folder: The index.
        count: Pictures in it.
        computed: Pictures that the network processed in this run; the others were known.
        failures: Pictures that could not be used.
    """

    folder: Path
    count: int
    computed: int
    failures: DecodeFailures


@final
class _Journal:
    """Finished pictures, in a folder beside the index: a file for each vector, and the thumbnails."""

    def __init__(self, folder: Path, model: dict[str, Any]) -> None:
        self.folder = folder
        self._parts = folder / PARTS / model["model"]
        for made in (self._parts, folder / "thumbs"):
            made.mkdir(parents=True, exist_ok=True)
        found = {file.name: np.fromfile(file, np.float32) for file in self._parts.iterdir()}
        # Without those that an interruption cut short.
        self.vectors: dict[str, Vector] = {
            name: part_D for name, part_D in found.items() if len(part_D) == model["dim"]
        }

    def add(self, sha256: str, vector: Vector) -> None:
        vector.tofile(self._parts / sha256)
        self.vectors[sha256] = vector


def index_folder(
    engine: PackEngine, pictures: Path, to: Path | None = None, on_progress: Callable[[int, int], None] | None = None
) -> IndexReport:
    """Make the index of a folder's pictures, or update one: the network runs only on pictures that are new.

    Args:
        engine: A pack that has an embedding.
        pictures: The folder.
        to: The index's folder; `index` in the pack by default.
        on_progress: Called with the number of finished pictures and their total.

    Raises:
        PackError: The pack has no embedding; the place is taken, in use by another run, or cannot be written.
        SourceError: There is no usable picture, or no such folder.
    """
    model = model_of(engine)
    # A link to an index stays; its target is replaced.
    folder = to or engine.pack.folder / INDEX
    place = Path(os.path.realpath(folder))
    if place.exists() and not (place / DESCRIPTION).exists():
        raise PackError(f"{place} is there and is no index; name another folder with --out, or remove it.")
    beside = place.with_name(f"{place.name}-part")
    files = _files_outside(pictures, place, beside)
    try:
        with _locked(beside):
            journal = _Journal(beside, model)
            _reuse(journal, place, model)
            items, failures, computed = _embed(engine, pictures, files, journal, on_progress)
            if not items:
                shutil.rmtree(beside)
                raise SourceError(
                    f"none of the {len(files):,} pictures of {pictures} can be used; {failures.sentences[0]}"
                )
            _publish(journal, items, model | {"weights": engine.pack.made.get("weights", "")}, place)
    except OSError as error:
        raise PackError(
            f"the index {place} cannot be written ({error.strerror or error}); mend that and index again, or name "
            f"another folder with --out."
        ) from error
    return IndexReport(folder=folder, count=len(items), computed=computed, failures=failures)


def _files_outside(pictures: Path, *excluded: Path) -> list[Path]:
    """The folder's pictures, without the thumbnails of an index in it."""
    real = Path(os.path.realpath(pictures))
    files = [
        file for file in picture_files(pictures) if not set(excluded) & set((real / file.relative_to(pictures)).parents)
    ]
    if not files:
        raise SourceError(f"{pictures} has no picture in it but those of the index {excluded[0]}.")
    return files


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Create a folder and lock it against other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that held the lock may have renamed the folder.
            owned = folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())
        except BlockingIOError:
            owned = False
        if not owned:
            raise PackError(f"another 'penstock index' is at work in {folder}; wait until it is done.")
        yield
    finally:
        os.close(descriptor)


def _embed(
    engine: PackEngine,
    pictures: Path,
    files: list[Path],
    journal: _Journal,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[list[IndexItem], DecodeFailures, int]:
    items, failures, computed = list[IndexItem](), DecodeFailures(), 0
    for number, (file, read) in enumerate(_read_ahead(files, journal.vectors)):
        try:
            sha256, pixels = read.result()
            item = IndexItem(file=name_in(pictures, file), sha256=sha256, thumbnail=thumbnail_of(sha256))
            # The same picture may occur twice.
            vector = None if pixels is None or sha256 in journal.vectors else embedding_of(engine, pixels)
        except OSError as error:
            failures.add(f"{file} cannot be read ({error.strerror}).")
        except SourceError as error:
            failures.add(str(error))
        except RequestError as error:
            failures.add(str(unusable(file, error)))
        else:
            if pixels is not None and vector is not None:
                _write_thumbnail(pixels, journal.folder / item.thumbnail)
                journal.add(sha256, vector)
                computed += 1
            items.append(item)
        if on_progress is not None:
            on_progress(number + 1, len(files))
    return items, failures, computed


def _reuse(journal: _Journal, place: Path, model: dict[str, Any]) -> None:
    """Copy the vectors of an existing index of the same network."""
    if not (place / DESCRIPTION).exists():
        return
    old = read_index(place)
    if old.model != model:
        return
    for item, vector in zip(old.items, old.vectors_ND, strict=True):
        thumbnail = place / thumbnail_of(item.sha256)
        if item.sha256 not in journal.vectors and thumbnail.exists():
            shutil.copyfile(thumbnail, journal.folder / thumbnail_of(item.sha256))
            journal.vectors[item.sha256] = vector


def _read_ahead(
    files: list[Path], known: Mapping[str, Vector]
) -> Iterator[tuple[Path, "Future[tuple[str, Array | None]]"]]:
    """Each file with its SHA-256 and, unless that is known, its pixels."""

    def read(file: Path) -> tuple[str, Array | None]:
        data = file.read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        return sha256, None if sha256 in known else decode_image(data, mode="RGBA", max_pixels=MAX_PIXELS)

    with ThreadPoolExecutor(READERS) as pool:
        waiting: deque[tuple[Path, Future[tuple[str, Array | None]]]] = deque()
        for file in files:
            waiting.append((file, pool.submit(read, file)))
            if len(waiting) > READ_AHEAD:
                yield waiting.popleft()
        yield from waiting


def _write_thumbnail(pixels: Array, file: Path) -> None:
    picture = Image.fromarray(np.ascontiguousarray(pixels[:, :, :3]))
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.save(file, "JPEG", quality=80)


def _publish(journal: _Journal, items: list[IndexItem], model: dict[str, Any], place: Path) -> None:
    folder = journal.folder
    np.save(folder / VECTORS, np.stack([journal.vectors[item.sha256] for item in items]))
    listed = json.dumps([asdict(item) for item in items], ensure_ascii=False, indent=1)
    (folder / ITEMS).write_text(listed, encoding="utf-8")
    used = {item.thumbnail for item in items}
    for file in (folder / "thumbs").iterdir():
        if f"thumbs/{file.name}" not in used:
            file.unlink()
    shutil.rmtree(folder / PARTS)
    sha256 = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
    described = {"schema_version": SCHEMA_VERSION, **model, "sha256": sha256}
    write_through(folder / DESCRIPTION, json.dumps(described, indent=1, sort_keys=True).encode())
    put_folder(folder, place)
    shutil.rmtree(folder, ignore_errors=True)
