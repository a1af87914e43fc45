"""Files of a folder or a bucket: how they are listed, recognised again, read, and written whole."""

import fcntl
import os
import secrets
import tempfile
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from penstock.core.errors import ScoreError, StorageError
from penstock.core.storage.atomic_write import sync
from penstock.core.storage.remote_folder import RemoteFolder, url_of

# What a storage says of a file's content, the first that is there.
_TAGS = ("ETag", "etag", "blob_id", "md5Hash", "md5", "checksum")
# Else all of these. `created` of a local file is the time of its last change, which no program sets back.
_TIMES = ("mtime", "created", "LastModified", "last_modified", "updated", "modified", "last_commit")
_WRITING = ".writing"
# Questions to a bucket at the same time.
_AT_ONCE = 16


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """A file as it was listed.

    Args:
        name: Its path below the folder.
        size: Its bytes.
        stamp: Changes when the file does: its ETag, or its times.
    """

    name: str
    size: int
    stamp: str


def folder_at(place: str | Path) -> RemoteFolder:
    """Open a folder, local or at a URL."""
    return RemoteFolder(url_of(place) or f"file://{Path(place).expanduser().absolute()}")


@final
class InputFolder:
    """The files to score: one file, or all in and below a folder. Names that begin with `.` or `_` are left out.

    Args:
        place: A path or a URL.

    Raises:
        ScoreError: There is nothing.
        StorageError: It cannot be read.

    Attributes:
        folder: The folder, or that of the one file.
        files: The files by name.
        is_one_file: One file was named.
        real: Where it is, without links.
    """

    def __init__(self, place: str | Path) -> None:
        self._shown = str(url_of(place) or place)
        whole = folder_at(place)
        self.real = _real(whole)
        self.is_one_file = False
        parent, _, name = whole.url.rpartition("/")
        info = _info_of_file(whole)
        if info is not None:
            self.folder = RemoteFolder(parent)
            self.files = (_file(name, info, self.folder),)
            self.is_one_file = True
            return
        self.folder = whole
        self.files = _listed(whole)
        if not self.files and whole.is_local and not Path(whole.path_of("")).exists():
            raise ScoreError(f"there is no {self}; check the path.")
        if not self.files:
            raise ScoreError(f"{self} holds no files to score; check the path.")

    @classmethod
    def of_listed(cls, url: str, files: Sequence[InputFile], *, is_one_file: bool, shown: str) -> Self:
        """Make one of files that another process has listed.

        Args:
            url: Its `url`.
            files: Some of its files, or all.
            is_one_file: One file was named.
            shown: Its name in messages.
        """
        made = cls.__new__(cls)
        made.folder = RemoteFolder(url)
        made.files, made.is_one_file, made._shown = tuple(files), is_one_file, shown
        made.real = _real(made.folder)
        return made

    def __str__(self) -> str:
        return self._shown

    @property
    def url(self) -> str:
        """The folder's URL, the same from every working directory."""
        return self.folder.url

    def check_unchanged(self, files: Sequence[InputFile]) -> None:
        """Check that files are those that were listed.

        Raises:
            ScoreError: One has changed since.
        """
        self.folder.system.invalidate_cache()
        if self.folder.is_local or len(files) == 1:
            now = [self._now(file) for file in files]
        else:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                now = list(pool.map(self._now, files))
        differ = [file for file, found in zip(files, now, strict=True) if found != file]
        # Some storages say other things of one file than in a list.
        listed = set(_listed(self.folder)) if differ and not self.is_one_file else set[InputFile]()
        if changed := [file.name for file in differ if file not in listed]:
            raise ScoreError(f"{changed[0]} changed while {self} was scored; run the same command again.")

    def _now(self, file: InputFile) -> InputFile:
        with self.folder.translated("read", file.name):
            return _file(file.name, self.folder.system.info(self.folder.path_of(file.name)), self.folder)

    def source(self, file: InputFile) -> Any:
        """The argument of pyarrow for a file: a path where it is local, else an open file."""
        path = self.folder.path_of(file.name)
        return path if self.folder.is_local else self.open(file)

    def open(self, file: InputFile) -> Any:
        """Open a file for reading, at any place."""
        with self.folder.translated("read", file.name):
            return self.folder.system.open(self.folder.path_of(file.name), "rb")

    def read_all(self, files: Sequence[InputFile]) -> list[bytes]:
        """Read some files whole; from a bucket at the same time."""
        if self.folder.is_local:
            return [self._read(file) for file in files]
        paths = [self.folder.path_of(file.name) for file in files]
        with self.folder.translated("read", files[0].name):
            # The paths may come back with another slash in front, but in the order in which they were given.
            found: Mapping[str, bytes] | bytes = self.folder.system.cat(paths)
        return [found] if isinstance(found, bytes) else list(found.values())

    def _read(self, file: InputFile) -> bytes:
        with self.open(file) as opened:
            return opened.read()


def _real(folder: RemoteFolder) -> str:
    return f"file://{os.path.realpath(folder.path_of(''))}" if folder.is_local else folder.url


def _listed(folder: RemoteFolder) -> tuple[InputFile, ...]:
    with folder.translated("read"):
        folder.system.invalidate_cache()
        found: Mapping[str, Any] = folder.system.find(folder.path_of(""), detail=True)
    root = folder.path_of("").strip("/")
    named = {str(path).strip("/").removeprefix(root).lstrip("/"): info for path, info in found.items()}
    hidden = {each for each in named if any(part[:1] in ("", ".", "_") for part in each.split("/"))}
    return tuple(_file(each, _followed(each, named[each], folder), folder) for each in sorted(named.keys() - hidden))


def _followed(name: str, info: Mapping[str, Any], folder: RemoteFolder) -> Mapping[str, Any]:
    """The info of a local file; of a link, that of its target, whose times are not those of the link."""
    if not folder.is_local:
        return info
    if info.get("islink"):
        with folder.translated("read", name):
            info = folder.system.info(folder.path_of(name))
    kind = info.get("type", "file")
    if kind == "directory":
        raise ScoreError(f"{name} is a link to a folder, which is not followed; score that folder by itself.")
    if kind != "file":
        raise ScoreError(f"{name} is no file, but a pipe, a socket or a device; remove it.")
    return info


def _info_of_file(whole: RemoteFolder) -> Mapping[str, Any] | None:
    with whole.translated("read"):
        whole.system.invalidate_cache()
        try:
            info = whole.system.info(whole.path_of(""))
        except FileNotFoundError:
            return None
    return info if info.get("type") == "file" else None


def _file(name: str, info: Mapping[str, Any], folder: RemoteFolder) -> InputFile:
    if not _is_unicode(name):
        raise ScoreError(f"the name {name!a} is not UTF-8, which Parquet needs for paths; rename the file.")
    tag = next((str(info[key]) for key in _TAGS if info.get(key)), None)
    times = [f"{key} {info[key]}" for key in _TIMES if info.get(key)]
    if tag is None and not times:
        raise StorageError(
            f"{folder.url}/{name} has neither an ETag nor a time of change, so that a changed file would not be "
            f"noticed; copy it to a folder or a bucket that has."
        )
    return InputFile(name=name, size=int(info.get("size") or 0), stamp=tag or ", ".join(times))


def _is_unicode(name: str) -> bool:
    # Python reads other bytes as surrogates.
    return name.isascii() or not any("\ud800" <= each <= "\udfff" for each in name)


@final
class OutputFolder:
    """A folder whose files appear whole.

    Args:
        place: A path or a URL.

    Attributes:
        folder: The folder.
        real: Where it is, without links.

    Raises:
        StorageError: The URL is of no known kind.
    """

    def __init__(self, place: str | Path) -> None:
        self._shown = str(url_of(place) or place)
        self.folder = folder_at(place)
        self.real = _real(self.folder)

    def __str__(self) -> str:
        return self._shown

    def names(self) -> set[str]:
        """The files in it, without those that are being written."""
        return {name for name in self.folder.sizes() if not name.startswith(".")}

    def has(self, name: str) -> bool:
        """True if a file is there now."""
        with self.folder.translated("read", name):
            self.folder.system.invalidate_cache()
            return bool(self.folder.system.exists(self.folder.path_of(name)))

    def source(self, name: str) -> Any:
        """The argument of pyarrow for a file."""
        path = self.folder.path_of(name)
        if self.folder.is_local:
            return path
        with self.folder.translated("read", name):
            return self.folder.system.open(path, "rb")

    @contextmanager
    def written(self, name: str) -> Generator[Path]:
        """A path to write a file to; the file gets its name at the end of the context, and none after an error.

        Raises:
            StorageError: It cannot be written.
        """
        if not self.folder.is_local:
            with tempfile.TemporaryDirectory(prefix="penstock-") as beside:
                yield Path(beside) / "part"
                self.folder.upload(Path(beside) / "part", name)
            return
        place = Path(self.folder.path_of(name))
        with self.folder.translated("written", name):
            place.parent.mkdir(parents=True, exist_ok=True)
            beside, lock = _locked_beside(place)
        try:
            yield beside
            with self.folder.translated("written", name):
                sync(beside)
                beside.replace(place)
                sync(place.parent)
        finally:
            beside.unlink(missing_ok=True)
            os.close(lock)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file whole."""
        with self.written(name) as file:
            file.write_bytes(data)

    def remove_leftovers(self) -> None:
        """Remove what killed processes were writing."""
        if not self.folder.is_local:
            return
        for left in Path(self.folder.path_of("")).glob(f".*{_WRITING}"):
            with suppress(OSError):
                lock = os.open(left, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    left.unlink(missing_ok=True)
                finally:
                    os.close(lock)


def _locked_beside(place: Path) -> tuple[Path, int]:
    """Make a hidden file beside a place, locked while its process lives; return it with the descriptor of the lock."""
    while True:
        beside = place.with_name(f".{place.name}.{secrets.token_hex(4)}{_WRITING}")
        lock = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        # On a file system without locks, leftovers stay.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return beside, lock
        # Another process took it for a leftover before it was locked.
        os.close(lock)
