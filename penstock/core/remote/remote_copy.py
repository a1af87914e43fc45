"""Bundles and packs at URLs: downloaded once into a cache, by their content, and uploaded.

    cache/bundles/HASH/   a bundle; HASH is of its manifest, which holds the hashes of all its files
    cache/packs/HASH/     a pack, of its pack.json and its signature

A folder gets its name when it is whole and verified, so that a download that was cut off is never read. Downloads that
were not used for longest are removed, see `remote_cache`.
"""

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from penstock.core.bundles.bundle import GOLDEN, LANGUAGE, MANIFEST, PREPARE, WEIGHTS, read_bundle
from penstock.core.errors import BundleCorrupt, BundleError, PackCorrupt, PackError, StorageError
from penstock.core.packs.pack import SIGNATURE, read_pack
from penstock.core.remote.cache_variables import expanded_cache
from penstock.core.remote.remote_cache import DEFAULT_CACHE, DEFAULT_LIMIT_BYTES, make_room, use
from penstock.core.storage.atomic_write import folder_beside, put_folder
from penstock.core.storage.remote_folder import HUB, RemoteFolder, is_inside, one_at_a_time, url_of
from penstock.core.storage.verified_folder import PACK_DESCRIPTION

# A bundle may be replaced while it is downloaded; it is then downloaded again.
_ATTEMPTS = 2

Notify = Callable[[str], object]
# The content of the description and of the optional files, by name.
_Described = dict[str, bytes]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class FolderKind:
    """A kind of folder whose description names all of its files.

    Args:
        name: Its name in messages.
        description: The file that names the others.
        optional: Files that the description does not name.
        known: All files that it may name; None for any, where `verify` reads all that it names.
        verify: Raises if a folder is damaged.
        corrupt: What it raises then.
        error: The error for a URL without one.
        hint: How such a folder is made.
    """

    name: str
    description: str
    optional: tuple[str, ...]
    known: tuple[str, ...] | None
    verify: Callable[[Path], object]
    corrupt: type[BundleError] | type[PackError]
    error: type[BundleError] | type[PackError]
    hint: str


BUNDLE = FolderKind(
    name="bundle",
    description=MANIFEST,
    optional=(),
    known=(WEIGHTS, GOLDEN, PREPARE, LANGUAGE),
    verify=read_bundle,
    corrupt=BundleCorrupt,
    error=BundleError,
    hint="'penstock train' writes one to RUN/bundle",
)
PACK = FolderKind(
    name="pack",
    description=PACK_DESCRIPTION,
    optional=(SIGNATURE,),
    known=None,
    verify=read_pack,
    corrupt=PackCorrupt,
    error=PackError,
    hint="'penstock export BUNDLE --out URL' writes one",
)


def local_bundle(
    place: str | Path,
    cache: Path | None = None,
    notify: Notify = lambda sentence: None,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
) -> Path:
    """Return the folder of a bundle; one at a URL is downloaded into the cache first.

    Args:
        place: A folder or a URL.
        cache: The cache; `~/.cache/penstock` by default.
        notify: Called with a sentence after a download.
        limit_bytes: Sum of the sizes of all downloads in the cache.

    Raises:
        BundleError: There is no bundle at the URL, or it is damaged.
        StorageError: The URL cannot be read.
    """
    return _local(BUNDLE, place, cache, notify, limit_bytes)


def local_pack(
    place: str | Path,
    cache: Path | None = None,
    notify: Notify = lambda sentence: None,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
) -> Path:
    """Return the folder of a pack, as `local_bundle` does.

    Raises:
        PackError: There is no pack at the URL, or it is damaged.
        StorageError: The URL cannot be read.
    """
    return _local(PACK, place, cache, notify, limit_bytes)


def kind_of(place: str | Path) -> FolderKind:
    """Tell whether a folder or a URL holds a bundle or a pack.

    Raises:
        StorageError: It is neither, or cannot be read.
    """
    url = url_of(place)
    remote = None if url is None else RemoteFolder(url)
    for kind in (BUNDLE, PACK):
        there = (Path(place) / kind.description).is_file() if remote is None else remote.read(kind.description)
        if there:
            return kind
    raise StorageError(
        f"{url or place} is neither a bundle (no {MANIFEST}) nor a pack (no {PACK_DESCRIPTION}); "
        "name the folder of one."
    )


def files_of(kind: FolderKind, folder: Path) -> list[str]:
    """Return the paths of the files of a verified bundle or pack, its description last.

    Args:
        kind: Which of the two.
        folder: Its folder.

    Raises:
        BundleError: It is no bundle, or damaged.
        PackError: It is no pack, or damaged.
    """
    kind.verify(folder)
    names = _named(kind, (folder / kind.description).read_bytes(), str(folder))
    return [*names, *(name for name in kind.optional if (folder / name).is_file()), kind.description]


def upload_folder(kind: FolderKind, folder: Path, remote: RemoteFolder) -> None:
    """Upload a bundle or a pack. Its description is written last, so that a reader finds it whole or not at all.

    Args:
        kind: Which of the two.
        folder: Its folder.
        remote: Where it goes; one of the same kind there is replaced.

    Raises:
        BundleError: It is no bundle, or damaged.
        PackError: It is no pack, or damaged.
        StorageError: The URL cannot be written, or holds something else.
    """
    _refuse(kind, remote)
    for name in files_of(kind, folder):
        remote.upload(folder / name, name)
    if kind.optional and not (folder / kind.optional[0]).is_file():
        # The signature of a pack that was there before.
        remote.delete(kind.optional[0])


@contextmanager
def written_to(kind: FolderKind, place: str | Path) -> Generator[Path]:
    """A local path to write a bundle or a pack to; for a URL a temporary one, which is uploaded at the end.

    Raises:
        StorageError: The URL cannot be written.
    """
    url = url_of(place)
    if url is None:
        yield Path(place)
        return
    from tempfile import TemporaryDirectory

    remote = RemoteFolder(url)
    # What can be refused is refused before the work.
    _refuse(kind, remote)
    with TemporaryDirectory(prefix="penstock-") as folder:
        local = Path(folder) / (remote.name or kind.name)
        yield local
        upload_folder(kind, local, remote)


def download_folder(kind: FolderKind, remote: RemoteFolder, to: Path) -> Path:
    """Download a bundle or a pack to a folder of the user's.

    Raises:
        BundleError: There is none, or it is damaged.
        PackError: There is none, or it is damaged.
        StorageError: The URL cannot be read, or the folder cannot be written.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise StorageError(f"{to} exists already; choose another --out, or remove it.")

    def put(described: _Described) -> Path:
        with folder_beside(to.absolute()) as beside:
            _download(kind, remote, described, beside)
            put_folder(beside, to.absolute())
        return to

    try:
        return _newest(kind, remote, put)
    except OSError as error:
        raise StorageError(f"{to} cannot be written ({error.strerror or error}); choose another --out.") from None


def _refuse(kind: FolderKind, remote: RemoteFolder) -> None:
    if remote.scheme == HUB:
        raise StorageError(
            f"{remote} is a repository, which takes whole commits; write to a folder and then 'penstock push FOLDER "
            f"{remote}'."
        )
    held = remote.sizes()
    if held and kind.description not in held:
        raise StorageError(
            f"{remote} holds {min(held)!r} and no {kind.description}, so it is no {kind.name} to be replaced; choose "
            f"another place."
        )


def _local(kind: FolderKind, place: str | Path, cache: Path | None, notify: Notify, limit_bytes: int) -> Path:
    url = url_of(place)
    if url is None:
        return Path(place)
    remote = RemoteFolder(url)
    root = expanded_cache(cache or DEFAULT_CACHE)
    at = root / f"{kind.name}s"

    def put(described: _Described) -> Path:
        place, is_new = at / _key(described), False
        # The others wait and find what one has downloaded.
        with one_at_a_time(place):
            if not _is_whole(kind, place):
                with folder_beside(place) as beside:
                    size = _download(kind, remote, described, beside)
                    put_folder(beside, place)
                notify(f"Downloaded {url} ({size:,} bytes) to {place}")
                is_new = True
            use(place)
        if is_new:
            for sentence in make_room(root, limit_bytes):
                notify(sentence)
        return place

    try:
        return _newest(kind, remote, put)
    except OSError as error:
        raise StorageError(
            f"{url} cannot be kept in {at} ({error.strerror or error}); make room there, or name another folder in "
            f"PENSTOCK_CACHE."
        ) from None


def _newest(kind: FolderKind, remote: RemoteFolder, put: Callable[[_Described], Path]) -> Path:
    """Read the description and put the folder that it describes; again, if it was replaced meanwhile."""
    for attempt in range(1, _ATTEMPTS + 1):
        described = _described(kind, remote)
        try:
            return put(described)
        except kind.corrupt:
            if attempt == _ATTEMPTS:
                raise
    raise AssertionError(remote)


def _described(kind: FolderKind, remote: RemoteFolder) -> _Described:
    """Read the description and the optional files, by name."""
    description = remote.read(kind.description)
    if description is None:
        raise kind.error(f"{remote} holds no {kind.name} (no {kind.description}); {kind.hint}.")
    optional = {name: remote.read(name) for name in kind.optional}
    return {kind.description: description} | {name: data for name, data in optional.items() if data is not None}


def _key(described: _Described) -> str:
    return hashlib.sha256(b"".join(described.values())).hexdigest()[:32]


def _is_whole(kind: FolderKind, place: Path) -> bool:
    """Check that a folder of the cache is undamaged and has the content that it is named after."""
    if not place.exists():
        return False
    try:
        kind.verify(place)
        files = [place / name for name in (kind.description, *kind.optional)]
        if _key({file.name: file.read_bytes() for file in files if file.exists()}) == place.name:
            return True
    except kind.error:
        pass
    shutil.rmtree(place)
    return False


def _download(kind: FolderKind, remote: RemoteFolder, described: _Described, folder: Path) -> int:
    """Download what is described and verify it; return the number of bytes."""
    names = _named(kind, described[kind.description], remote.url)
    _check_room(remote, names, folder)
    for name in names:
        remote.download(name, folder / name)
    for name, data in described.items():
        (folder / name).write_bytes(data)
    try:
        kind.verify(folder)
    except kind.corrupt as error:
        # The hidden folder says nothing to a user.
        raise kind.corrupt(str(error).replace(str(folder), remote.url)) from None
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _check_room(remote: RemoteFolder, names: list[str], folder: Path) -> None:
    needed = 0
    for name in names:
        with remote.translated("read", name):
            needed += remote.size(name)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"it has {needed:,} bytes, and {free:,} are free")


def _named(kind: FolderKind, description: bytes, where: str) -> list[str]:
    """Return the paths that a description names. It is not verified yet: none may lead out of the folder."""
    try:
        given: Any = json.loads(description)
        names = [str(name) for name in given["files"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise kind.corrupt(f"{where}/{kind.description} is not readable; copy the {kind.name} again.") from None
    for name in names:
        # A file that is not verified could be anything, such as a program.
        if not is_inside(name) or (kind.known is not None and name not in kind.known):
            raise kind.corrupt(f"{where}/{kind.description} names the file {name!r}; copy the {kind.name} again.")
    return names
