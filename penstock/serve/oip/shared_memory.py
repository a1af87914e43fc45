"""System shared memory of Triton's extension: regions of /dev/shm that local clients register by name.

FOLDER/HASH.json   a region, by the hash of its name; all front-ends read and write the same folder

Tensors are copied by read and write calls, never mapped: a client may truncate its file at any time, and a mapped page
that is gone would end the server with SIGBUS.
"""

import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from reprlib import repr as shown
from typing import Any, final

import numpy as np

from penstock.core.errors import Forbidden, InvalidInput, TooLarge, UnknownRoute
from penstock.core.json_record import read_record
from penstock.serve.exchange.local_client import Connected

PARAMETERS = ("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")
MAX_REGIONS = 256
MAX_NAME_CHARACTERS = 256
SYSTEM = Path("/dev/shm")
_LOCK = ".lock"
_DISABLED = "This server takes no shared memory; send tensors in the request, or start it with --shared-memory MIB."


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A registered region.

    Args:
        name: The name by which requests refer to it.
        key: Name of the file in /dev/shm.
        offset: Its first byte in the file.
        byte_size: Its size.
        owner: Name of the client's API key, or empty.
        device: Device of the file.
        inode: Inode of the file.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    owner: str
    device: int
    inode: int


@final
@dataclass(frozen=True, slots=True)
class SharedPart:
    """The part of a region that holds a tensor.

    Args:
        file: The region's file.
        region: The region.
        start: First byte of the tensor in the file.
        nbytes: Size of the tensor, or the room for it.
    """

    file: "OpenedFile"
    region: Region
    start: int
    nbytes: int

    def read(self) -> memoryview:
        """Copy the bytes of the tensor.

        Raises:
            InvalidInput: The file was made shorter.
        """
        raw = np.empty(self.nbytes, np.uint8).data
        if os.preadv(self.file.descriptor, [raw], self.start) != self.nbytes:
            raise self._truncated()
        return raw

    def write(self, raw: bytes) -> None:
        """Copy the bytes of an output into the region.

        Raises:
            InvalidInput: There is no room for them, or the file was made shorter or cannot be written.
        """
        if len(raw) > self.nbytes:
            raise InvalidInput(
                f"The output has {len(raw):,} bytes, and its part of shared memory region {self.region.name!r} "
                f"{self.nbytes:,}; give at least as many."
            )
        if os.fstat(self.file.descriptor).st_size < self.start + len(raw):
            raise self._truncated()
        try:
            written, reason = os.pwrite(self.file.descriptor, raw, self.start), os.strerror(errno.ENOSPC)
        except OSError as error:
            written, reason = 0, str(error.strerror)
        if written != len(raw):
            raise InvalidInput(
                f"Shared memory region {self.region.name!r} cannot be written ({reason}); make it writable for the "
                f"server, and see that /dev/shm has room."
            )

    def _truncated(self) -> InvalidInput:
        return InvalidInput(
            f"The file of shared memory region {self.region.name!r} is shorter than when it was registered; unregister "
            f"it, and register one that stays."
        )


@final
class OpenedFile:
    """A file of /dev/shm, open while a region or a request needs it.

    Args:
        key: Its name.

    Raises:
        InvalidInput: There is no such file, or it cannot be opened.
    """

    def __init__(self, key: str) -> None:
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            try:
                self.descriptor = os.open(SYSTEM / key, os.O_RDWR | flags)
            except PermissionError:
                # Then outputs cannot be written.
                self.descriptor = os.open(SYSTEM / key, os.O_RDONLY | flags)
        except OSError as error:
            raise InvalidInput(
                f"There is no readable shared memory {shown(key)} ({error.strerror}); create it before registering it, "
                f"readable for the server, which must see the same /dev/shm."
            ) from None

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


# Finds the part of a region that the parameters of a tensor name; None if they name none.
Lookup = Callable[[Mapping[str, Any]], SharedPart | None]


def no_regions(parameters: Mapping[str, Any]) -> SharedPart | None:
    """Refuse shared memory, see `Lookup`.

    Raises:
        InvalidInput: The parameters name a region.
    """
    if any(key in parameters for key in PARAMETERS):
        raise InvalidInput(_DISABLED)
    return None


@final
class Regions:
    """The regions of a server.

    Args:
        folder: The folder of the regions, empty at the start; None refuses shared memory.
        max_bytes: Sum of the sizes of all regions.
    """

    def __init__(self, folder: Path | None, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        # By name: the record's own version, the region, and its file.
        self._opened: dict[str, tuple[tuple[int, int], Region, OpenedFile]] = {}

    @property
    def enabled(self) -> bool:
        """True if the server takes shared memory."""
        return self._folder is not None

    def lookup(self, client: Connected | None, owner: str) -> Lookup:
        """Return the lookup of a client's requests.

        Args:
            client: The client's connection.
            owner: Name of its API key.
        """
        if self._folder is None:
            return no_regions

        def find(parameters: Mapping[str, Any]) -> SharedPart | None:
            if not any(key in parameters for key in PARAMETERS):
                return None
            _check_local(client)
            return self._part(parameters, owner)

        return find

    def register(self, name: Any, key: Any, offset: Any, byte_size: Any, client: Connected | None, owner: str) -> None:
        """Register a region.

        Raises:
            Forbidden: The client is not local, or the file belongs to another user.
            InvalidInput: A value is malformed, the name is taken, or there is no such file.
            TooLarge: The regions would be more, or have more bytes, than the server takes.
        """
        folder = self._checked(client)
        assert client is not None, name
        key = _check_key(key)
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
            raise InvalidInput(
                f"The region's name is {shown(name)}; give one of 1 to {MAX_NAME_CHARACTERS} characters."
            )
        offset, byte_size = _number("offset", offset), _number("byte_size", byte_size)
        file = OpenedFile(key)
        found = os.fstat(file.descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidInput(f"/dev/shm/{key} is no shared memory; register what shm_open made.")
        user = client.user()
        # Otherwise a user could read and change what belongs to the server's.
        if user != found.st_uid:
            raise Forbidden(
                f"/dev/shm/{key} belongs to another user than this client's process; register shared memory that the "
                f"client has made."
            )
        if byte_size < 1 or offset + byte_size > found.st_size:
            raise InvalidInput(
                f"The region is {byte_size:,} bytes from {offset:,}, and /dev/shm/{key} has {found.st_size:,}; "
                f"register a part of it."
            )
        region = Region(
            name=name,
            key=key,
            offset=offset,
            byte_size=byte_size,
            owner=owner,
            device=found.st_dev,
            inode=found.st_ino,
        )
        with _locked(folder):
            regions = self._all(folder)
            if any(each.name == name for each in regions):
                raise InvalidInput(f"Shared memory region {name!r} is registered already; unregister it first.")
            if len(regions) >= MAX_REGIONS:
                raise TooLarge(f"{MAX_REGIONS} regions are registered; unregister what is not used.")
            left = self._max_bytes - sum(each.byte_size for each in regions)
            if byte_size > left:
                raise TooLarge(
                    f"The region has {byte_size:,} bytes, and {max(left, 0):,} of {self._max_bytes:,} are left; "
                    f"unregister others, or start the server with a larger --shared-memory."
                )
            place = _place(folder, name)
            beside = place.with_suffix(".new")
            beside.write_text(json.dumps(asdict(region)))
            beside.rename(place)
            # The file stays open here, so that the client may unlink it.
            self._opened[name] = _version(place), region, file

    def unregister(self, name: str, client: Connected | None, owner: str) -> None:
        """Unregister the region of a name, if there is one; with an empty name all regions of the owner.

        Raises:
            Forbidden: The client is not local.
            InvalidInput: Shared memory is not taken.
        """
        folder = self._checked(client)
        with _locked(folder):
            for region in self._all(folder):
                if region.owner == owner and name in ("", region.name):
                    _place(folder, region.name).unlink(missing_ok=True)
                    self._opened.pop(region.name, None)

    def status(self, name: str, client: Connected | None, owner: str) -> list[dict[str, Any]]:
        """Describe the region of a name, or with an empty name all regions of the owner.

        Raises:
            Forbidden: The client is not local.
            InvalidInput: Shared memory is not taken.
            UnknownRoute: There is no region of this name.
        """
        folder = self._checked(client)
        found = [each for each in self._all(folder) if each.owner == owner and name in ("", each.name)]
        if name and not found:
            raise _unknown(name)
        return [
            {"name": each.name, "key": each.key, "offset": each.offset, "byte_size": each.byte_size} for each in found
        ]

    def _checked(self, client: Connected | None) -> Path:
        if self._folder is None:
            raise InvalidInput(_DISABLED)
        _check_local(client)
        return self._folder

    def _all(self, folder: Path) -> list[Region]:
        return [read_record(Region, json.loads(place.read_text())) for place in sorted(folder.glob("*.json"))]

    def _part(self, parameters: Mapping[str, Any], owner: str) -> SharedPart:
        name = parameters.get(PARAMETERS[0])
        if not isinstance(name, str):
            raise InvalidInput(f"shared_memory_region is {shown(name)}; it must be the name of a region.")
        region, file = self._open(name)
        if region.owner != owner:
            raise _unknown(name)
        offset = _number(PARAMETERS[1], parameters.get(PARAMETERS[1], 0))
        nbytes = _number(PARAMETERS[2], parameters.get(PARAMETERS[2]))
        if offset + nbytes > region.byte_size:
            raise InvalidInput(
                f"{nbytes:,} bytes from {offset:,} do not lie in shared memory region {name!r}, which has "
                f"{region.byte_size:,}; give a part of it."
            )
        return SharedPart(file, region, region.offset + offset, nbytes)

    def _open(self, name: str) -> tuple[Region, OpenedFile]:
        assert self._folder is not None, name
        place = _place(self._folder, name)
        try:
            version = _version(place)
            opened = self._opened.get(name)
            if opened is not None and opened[0] == version:
                return opened[1], opened[2]
            # Another front-end has registered it.
            region = read_record(Region, json.loads(place.read_text()))
        except FileNotFoundError:
            self._opened.pop(name, None)
            raise _unknown(name) from None
        self._opened = {each: opened for each, opened in self._opened.items() if _place(self._folder, each).exists()}
        file = OpenedFile(region.key)
        found = os.fstat(file.descriptor)
        if (found.st_dev, found.st_ino) != (region.device, region.inode):
            raise InvalidInput(
                f"/dev/shm/{region.key} has been made anew since shared memory region {name!r} was registered; "
                f"unregister it, and register it again."
            )
        self._opened[name] = version, region, file
        return region, file


def extensions(known: list[str], regions: Regions) -> list[str]:
    """Return the protocol's extensions that a server has, in its metadata."""
    return known + ["system_shared_memory"] * regions.enabled


def _check_local(client: Connected | None) -> None:
    if client is None or not client.is_local:
        raise Forbidden(
            "Shared memory is for clients on the server's machine that connect to a loopback address, without a proxy; "
            "send the tensors in the request."
        )


def _check_key(key: Any) -> str:
    name = key.removeprefix("/") if isinstance(key, str) else ""
    if not name or name in (".", "..") or "/" in name or not name.isprintable() or len(name.encode()) > 255:
        raise InvalidInput(f"The key is {shown(key)}; give the name of a file in /dev/shm, as of shm_open.")
    return name


def _number(what: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise InvalidInput(f"{what} is {shown(value)}; it must be a whole number of bytes from 0.")
    return value


def _unknown(name: str) -> UnknownRoute:
    return UnknownRoute(f"There is no shared memory region {shown(name)}; register it first.")


def _place(folder: Path, name: str) -> Path:
    return folder / f"{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}.json"


def _version(place: Path) -> tuple[int, int]:
    found = place.stat()
    return found.st_ino, found.st_mtime_ns


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
