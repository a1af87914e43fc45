"""The model directory, which has a folder for each model: a bundle, or numbered versions, each a bundle.

It is a local folder or a URL.

models/digits/manifest.json ...        the model `digits`
models/speech/3/manifest.json ...      the model `speech` in version 3
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from penstock.core.application import MAX_NAME, is_url_safe
from penstock.core.bundles.bundle import MANIFEST, read_manifest
from penstock.core.errors import BundleError, ServeError, StorageError, UnknownRoute
from penstock.core.remote.remote_copy import local_bundle
from penstock.core.storage.remote_folder import RemoteFolder, url_of
from penstock.core.storage.verified_folder import PACK_DESCRIPTION
from penstock.serve.model_versions import VersionPolicy
from penstock.serve.settings import ModelSettings

log = logging.getLogger(__name__)

_PACK = (
    "a pack, which 'penstock export' wrote for devices and browsers; a server takes the bundle that it was exported "
    "from, such as RUN/bundle"
)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A version of a model on disk.

    Args:
        name: The name that requests use; empty takes the application's own.
        version: `"1"` where versions are not numbered.
        bundle: Its bundle folder.
        several: Whether more versions of the model may be served.
    """

    name: str
    version: str
    bundle: Path
    several: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Name and version."""
        return self.name, self.version

    def named(self) -> "ModelFolder":
        """Name a bundle that was given alone after its application; loading it reports what is wrong with it."""
        if self.name:
            return self
        try:
            return replace(self, name=read_manifest(self.bundle).name)
        except (BundleError, OSError):
            return replace(self, name=self.bundle.name)


class ModelDirectory(ABC):
    """The models of a directory and their versions.

    Args:
        policies: The versions to serve, see `parse_versions`.
    """

    def __init__(self, policies: Mapping[str, VersionPolicy]) -> None:
        self._policies = policies

    @abstractmethod
    def names(self) -> list[str]:
        """List the models.

        Raises:
            ServeError: It is no directory.
            StorageError: The URL cannot be read.
        """

    def find_versions(self, name: str) -> list[ModelFolder]:
        """Find the versions of a model that are to be served, the oldest first; those at a URL are downloaded.

        Raises:
            BundleError: A version at the URL is damaged.
            StorageError: The URL cannot be read, or the directory is gone.
            UnknownRoute: There is no such model, or not the version that its policy names.
        """
        there, numbers, several = self._chosen(name)
        return [ModelFolder(name, str(each), self._bundle(there[each]), several=several) for each in numbers]

    def list_versions(self, name: str) -> list[str]:
        """List the versions that `find_versions` would find, without a download.

        Raises:
            StorageError: See `find_versions`.
            UnknownRoute: See `find_versions`.
        """
        return [str(each) for each in self._chosen(name)[1]]

    def _chosen(self, name: str) -> tuple[dict[int, str], list[int], bool]:
        """Return the place of each version, the numbers to serve, and whether there may be several."""
        there = self._versions(name) if is_url_safe(name) else None
        if there is None:
            raise UnknownRoute(f"There is no folder {name[:MAX_NAME]!r} in the model directory.")
        if not there:
            raise UnknownRoute(f"The folder {name!r} of the model directory {self._instead_of_bundle(name)}.")
        policy = self._policies.get(name, self._policies.get("", VersionPolicy()))
        try:
            return there, policy.chosen(there), policy.several
        except ServeError as error:
            raise UnknownRoute(f"Of model {name!r}, {error}") from None

    @abstractmethod
    def _versions(self, name: str) -> dict[int, str] | None:
        """Return the place of each version of a model, 1 where they are not numbered; None without such a folder."""

    def _instead_of_bundle(self, name: str) -> str:
        if self._holds(f"{name}/{PACK_DESCRIPTION}"):
            return f"is {_PACK}"
        if self._holds(f"{name}/bundle/{MANIFEST}"):
            return "is a run; put its folder 'bundle' there instead"
        return "is no bundle and has no numbered versions"

    @abstractmethod
    def _holds(self, file: str) -> bool:
        """Tell whether the directory holds a file."""

    @abstractmethod
    def _bundle(self, place: str) -> Path:
        """Return the folder of a version."""


@final
class LocalModels(ModelDirectory):
    """A model directory on disk, see `ModelDirectory`."""

    def __init__(self, directory: Path, policies: Mapping[str, VersionPolicy]) -> None:
        super().__init__(policies)
        self._directory = directory

    def names(self) -> list[str]:
        """See `ModelDirectory`."""
        if not self._directory.is_dir():
            raise ServeError(
                f"--models {self._directory} is no directory; name the folder that holds the models' folders."
            )
        if (self._directory / MANIFEST).is_file():
            raise ServeError(
                f"--models {self._directory} is itself a bundle; serve it with 'penstock serve {self._directory}', or "
                f"name the folder around it."
            )
        if (self._directory / PACK_DESCRIPTION).is_file():
            raise ServeError(f"--models {self._directory} is itself {_PACK}.")
        return sorted(each.name for each in self._directory.iterdir() if each.is_dir() and is_url_safe(each.name))

    def _versions(self, name: str) -> dict[int, str] | None:
        folder = self._directory / name
        if not folder.is_dir():
            if not self._directory.is_dir():
                raise StorageError(f"the model directory {self._directory} is not there; mount or restore it.")
            return None
        if (folder / MANIFEST).is_file():
            return {1: str(folder)}
        return {int(each.name): str(each) for each in folder.iterdir() if is_number(each.name) and each.is_dir()}

    def _holds(self, file: str) -> bool:
        return (self._directory / file).is_file()

    def _bundle(self, place: str) -> Path:
        return Path(place)


@final
class RemoteModels(ModelDirectory):
    """A model directory at a URL: the versions that are served are downloaded into the cache.

    Args:
        url: The URL.
        policies: See `ModelDirectory`.
        cache: The cache.
        limit_bytes: Sum of the sizes of all downloads in it.

    Raises:
        StorageError: The URL is of no known kind, or its package is not installed.
    """

    def __init__(self, url: str, policies: Mapping[str, VersionPolicy], cache: Path, limit_bytes: int) -> None:
        super().__init__(policies)
        self._remote, self._cache, self._limit_bytes = RemoteFolder(url), cache, limit_bytes

    def names(self) -> list[str]:
        """See `ModelDirectory`."""
        folders = {name.partition("/")[0] for name in self._remote.sizes() if "/" in name}
        names = sorted(each for each in folders if is_url_safe(each))
        if not names:
            raise ServeError(f"{self._remote} holds no models; name the folder that holds the models' folders.")
        return names

    def _versions(self, name: str) -> dict[int, str] | None:
        files = self._remote.sizes(name)
        if not files:
            return None
        where = f"{self._remote}/{name}"
        if f"{name}/{MANIFEST}" in files:
            return {1: where}
        parts = (file.split("/") for file in files)
        return {int(part[1]): f"{where}/{part[1]}" for part in parts if part[2:] == [MANIFEST] and is_number(part[1])}

    def _holds(self, file: str) -> bool:
        return file in self._remote.sizes(file.partition("/")[0])

    def _bundle(self, place: str) -> Path:
        return local_bundle(place, self._cache, log.info, self._limit_bytes)


def model_directory(models: ModelSettings) -> ModelDirectory | None:
    """Return the model directory of the settings; None without one.

    Raises:
        StorageError: It is a URL of no known kind, or its package is not installed.
    """
    if models.directory is None:
        return None
    url = url_of(models.directory)
    if url is None:
        return LocalModels(models.directory, models.policies)
    return RemoteModels(url, models.policies, models.cache, models.cache_limit_bytes)


def is_number(name: str) -> bool:
    """Tell whether the name of a folder is that of a version."""
    return name.isascii() and name.isdecimal()
