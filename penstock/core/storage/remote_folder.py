"""Folders at URLs, such as s3://bucket/runs/x, through fsspec. No other module imports fsspec."""

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, final

from penstock.core.errors import PenstockError, StorageError, one_line
from penstock.core.machine.extras import missing_package

# A Path made of a URL has one slash.
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/(/?)(?=[^/]|/[^/])")
_CHAINED = re.compile(r"[a-zA-Z0-9+.-]+::.*:/")
# A key or a user and its secret, which may have a slash; a port is none.
_SECRET = re.compile(r"[^/@]*:(?!\d*(/|$))")
_USER_IN_URL = re.compile(r"(\w+://)[^\s/@'\"]+@")
_QUERY_IN_URL = re.compile(r"(\w+://[^\s?'\"]+)\?[^\s'\"]*")
# Descriptions, records and cards are read into memory.
MAX_READ_BYTES = 32 * 2**20
HUB = "hf"
_LOG_IN = "log in with 'hf auth login', or set HF_TOKEN to a token that may do this"
_LOCAL = ("file", "local")
# Storages that copy by themselves; other file systems of fsspec download and upload.
_COPIES = (*_LOCAL, "s3", "s3a", "gs", "gcs", "abfs", "az", "memory")
# The packages of fsspec's file systems; fsspec itself has the others.
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "hf": "huggingface_hub"}
_OTHER_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "oci": "ocifs", "sftp": "paramiko"}
# A bucket that does not answer is an error after seconds, not minutes.
_CONNECTION = {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 2}}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": {"config_kwargs": _CONNECTION}, "s3a": {"config_kwargs": _CONNECTION}}


def url_of(place: object) -> str | None:
    """Return the URL that a place names, without a slash at its end; None for a local path.

    Raises:
        StorageError: It holds credentials or a query, which messages would print and run.json record, or is chained.
    """
    text = str(place)
    if _CHAINED.match(text):
        raise StorageError("a chained URL (KIND::URL) is not read; give the URL after '::' alone.")
    found = _URL.match(text)
    if found is None:
        return None
    scheme, rest = found[1].lower(), text[found.end() :]
    if scheme not in _LOCAL and (_SECRET.match(rest) or "?" in rest):
        part = "a query ('?')" if "?" in rest else "a key or a password"
        raise StorageError(
            f"the {scheme}:// URL holds {part}, and URLs are printed and recorded; leave it out, and set credentials "
            f"in the environment or in fsspec's configuration."
        )
    if not found[2] and scheme in _LOCAL:
        rest = f"/{rest}"
    return f"{scheme}://{rest}".rstrip("/")


def is_inside(name: str) -> bool:
    """Tell whether the name of a file stays in its folder; others may be given by whoever wrote the folder."""
    path = PurePosixPath(name)
    leads_out = path.is_absolute() or ".." in path.parts
    return bool(path.name) and not leads_out and "\\" not in name and name.isprintable()


@final
class RemoteFolder:
    """A folder at a URL. It needs not exist: object stores have no folders, only names.

    Args:
        url: The URL: `"s3://bucket/runs/x"`.

    Attributes:
        url: The same, without a slash at its end.

    Raises:
        StorageError: The URL is of no known kind, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._system, self._root = _opened(self.url)

    def __str__(self) -> str:
        return self.url

    @property
    def system(self) -> Any:
        """The file system of fsspec."""
        return self._system

    @property
    def is_local(self) -> bool:
        """True for a folder of this machine, or one that is mounted."""
        return self.scheme in _LOCAL

    @property
    def scheme(self) -> str:
        """The kind of storage: `"s3"`."""
        return self.url.partition(":")[0]

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return the sizes in bytes of all files in or below the folder, by path in it; empty if there are none.

        Args:
            below: Only those below this folder in it.

        Raises:
            StorageError: It cannot be read.
        """
        with self.translated("read"):
            self._system.invalidate_cache()
            found = self._system.find(self.path_of(below), detail=True)
        # A file system may return names with or without the slash in front.
        root = self._root.strip("/")
        names = {str(name).strip("/").removeprefix(root).lstrip("/"): each for name, each in found.items()}
        return {name: int(each["size"] or 0) for name, each in names.items() if name}

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it is not there.

        Raises:
            StorageError: It cannot be read, or is larger than `MAX_READ_BYTES`.
        """
        with self.translated("read", name):
            self._system.invalidate_cache()
            try:
                if self.size(name) > MAX_READ_BYTES:
                    raise StorageError(
                        f"{self.url}/{name} has more than {MAX_READ_BYTES:,} bytes, so it is not what its name says; "
                        f"check the address."
                    )
                return self._system.cat_file(self.path_of(name))
            except FileNotFoundError:
                if self.scheme == HUB and not self._system.exists(
                    "/".join(self._root.split("/")[:2]).partition("@")[0]
                ):
                    raise StorageError(
                        f"{self.url} cannot be read (there is no such repository, or it is private); check the name, "
                        f"{_LOG_IN}."
                    ) from None
                return None

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; 0 where the storage does not state it.

        Raises:
            FileNotFoundError: It is not there.
            StorageError: It is a device or a pipe, which may have no end, or cannot be read.
        """
        try:
            found = self._system.info(self.path_of(name))
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._error("read", name, error) from error
        if found.get("type", "file") == "other":
            raise StorageError(f"{self.url}/{name} is no file; remove it.")
        return int(found.get("size") or 0)

    def download(self, name: str, file: Path) -> None:
        """Copy a file of the folder to a local one.

        Raises:
            StorageError: It is not there, cannot be read, or its name leads out of the folder.
        """
        if not is_inside(name):
            raise StorageError(f"{self.url} holds the file {name!r}, whose name leads out of the folder; remove it.")
        file.parent.mkdir(parents=True, exist_ok=True)
        with self.translated("read", name):
            if self.scheme in _LOCAL:
                self.size(name)
            self._system.get_file(self.path_of(name), str(file))

    def copy(self, name: str, to: str) -> bool:
        """Copy a file of the folder to another name, within the storage: its bytes are not sent.

        Returns:
            False if the storage cannot do this, or the file is not there; then nothing is written.

        Raises:
            StorageError: It cannot be written.
        """
        if self.scheme not in _COPIES:
            return False
        with self.translated("written", to):
            self._make_parent(to)
            try:
                if self.scheme in _LOCAL:
                    os.link(self.path_of(name), self.path_of(to))
                else:
                    self._system.cp_file(self.path_of(name), self.path_of(to))
            except (FileNotFoundError, NotImplementedError):
                return False
            except OSError:
                if self.scheme in _LOCAL:
                    # A file system without hard links, or the file is there already.
                    return False
                raise
        return True

    def upload(self, file: Path, name: str) -> None:
        """Copy a local file into the folder. It is visible when it is complete.

        Raises:
            StorageError: It cannot be written.
            FileNotFoundError: There is no such local file.
        """
        file.stat()
        with self.translated("written", name):
            self._make_parent(name)
            if self.scheme not in _LOCAL:
                self._system.put_file(str(file), self.path_of(name))
                return
            # Renamed: the file that is there may be a link to another one, and readers find all of it or none.
            beside = f"{self.path_of(name).rpartition('/')[0]}/.{secrets.token_hex(4)}.uploading"
            try:
                self._system.put_file(str(file), beside)
                os.replace(beside, self.path_of(name))
            except BaseException:
                Path(beside).unlink(missing_ok=True)
                raise

    def write(self, name: str, data: bytes) -> None:
        """Write a small file.

        Raises:
            StorageError: It cannot be written.
        """
        with self.translated("written", name):
            self._make_parent(name)
            self._system.pipe_file(self.path_of(name), data)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there.

        Raises:
            StorageError: It cannot be deleted.
        """
        with self.translated("written", name):
            try:
                self._system.rm_file(self.path_of(name))
            except FileNotFoundError:
                return

    def path_of(self, name: str) -> str:
        """Return the path of a file in the storage, as `system` takes it; of the folder for an empty name."""
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _make_parent(self, name: str) -> None:
        # On an object store this would look for, or even make, the bucket.
        if self.scheme in (*_LOCAL, "memory", "sftp", "smb", "ftp"):
            self._system.makedirs(self.path_of(name).rpartition("/")[0], exist_ok=True)

    @contextmanager
    def translated(self, what: str, name: str = "") -> Generator[None]:
        """Translate errors of the storage in the context.

        Args:
            what: What is done to it: `"read"`.
            name: The file.

        Raises:
            StorageError: An error happened in the context.
        """
        try:
            yield
        except PenstockError:
            raise
        except Exception as error:
            # File systems of fsspec raise anything: their own errors, those of their HTTP library, OSError.
            raise self._error(what, name, error) from error

    def _error(self, what: str, name: str, error: Exception) -> StorageError:
        where = f"{self.url}/{name}" if name else self.url
        reason, remedy = _reason(error), _remedy(error)
        if self.is_local and isinstance(error, OSError) and error.strerror:
            reason = error.strerror
            if error.errno not in (errno.ENOENT, errno.ENOSPC, errno.EDQUOT):
                # No network is between.
                remedy = "mend that or choose another place"
        return StorageError(f"{where} cannot be {what} ({reason}); {remedy}.")


def _reason(error: Exception) -> str:
    # Other libraries name addresses with keys and signatures in them.
    said = _QUERY_IN_URL.sub(r"\1", _USER_IN_URL.sub(r"\1", one_line(error, 1000)))[:200]
    return said if isinstance(error, OSError) and said else f"{type(error).__name__}: {said}".rstrip(": ")


def _remedy(error: Exception) -> str:
    # Errors of HTTP.
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return _LOG_IN
    if isinstance(error, PermissionError) or "redential" in type(error).__name__:
        return "check the credentials and their rights"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room on the disk"
    if isinstance(error, FileNotFoundError):
        return "check the address: the bucket or the file is not there"
    return "check the address and the network"


def _opened(url: str) -> tuple[Any, str]:
    scheme = url.partition(":")[0]
    try:
        from fsspec.config import conf
        from fsspec.core import url_to_fs
    except ModuleNotFoundError:
        raise StorageError(str(missing_package(url, "fsspec", "remote"))) from None
    # What a user has configured for fsspec stays.
    options = {name: value for name, value in _OPTIONS.get(scheme, {}).items() if name not in conf.get(scheme, {})}
    try:
        system, root = url_to_fs(url, **options)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        if package is not None:
            raise StorageError(str(missing_package(url, package, "remote"))) from None
        other = _OTHER_PACKAGES.get(scheme)
        fix = one_line(error) if other is None else f"pip install {other}"
        raise StorageError(f"{url} needs a package that is not installed; {fix}.") from None
    except Exception as error:  # noqa: BLE001 - each file system has its own errors
        known = "s3://, gs://, hf:// or file://"
        raise StorageError(f"{url} names no storage ({_reason(error)}); give a path, or a URL of {known}.") from None
    if scheme in _OPTIONS:
        # Of s3fs, in addition to those of its HTTP library.
        system.retries = 1
    return system, root


@contextmanager
def one_at_a_time(folder: Path, *, wait: bool = True) -> Generator[None]:
    """Let one process at a time change a local copy, which need not exist; the others wait.

    Raises:
        BlockingIOError: Another process changes it, and `wait` is false.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
