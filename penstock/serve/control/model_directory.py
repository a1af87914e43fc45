"""The model directory, which has a folder for each model: a bundle, or numbered versions, each a bundle.

models/digits/manifest.json ...        the model `digits`
models/speech/3/manifest.json ...      the model `speech` in version 3
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.core.application import is_url_safe
from penstock.core.bundle import MANIFEST, read_manifest
from penstock.core.errors import BundleError, ServeError, UnknownRoute
from penstock.serve.model_versions import VersionPolicy


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


def find_versions(directory: Path, name: str, policies: Mapping[str, VersionPolicy]) -> list[ModelFolder]:
    """Find the versions of a model that are to be served, the oldest first.

    Raises:
        UnknownRoute: There is no such model, or not the version that its policy names.
    """
    folder = directory / name
    if not is_url_safe(name) or not folder.is_dir():
        raise UnknownRoute(f"There is no folder {name!r} in the model directory.")
    policy = policies.get(name, policies.get("", VersionPolicy()))
    there = {1: folder} if (folder / MANIFEST).is_file() else _numbered(folder)
    if not there:
        raise UnknownRoute(f"The folder {name!r} of the model directory is no bundle and has no numbered versions.")
    try:
        numbers = policy.chosen(there)
    except ServeError as error:
        raise UnknownRoute(f"Of model {name!r}, {error}") from None
    return [ModelFolder(name, str(number), there[number], several=policy.several) for number in numbers]


def model_names(directory: Path) -> list[str]:
    """List the models of a model directory.

    Raises:
        ServeError: It is no directory.
    """
    if not directory.is_dir():
        raise ServeError(f"{directory} is not a directory; name the folder that holds the models' folders.")
    return sorted(each.name for each in directory.iterdir() if each.is_dir() and is_url_safe(each.name))


def _numbered(folder: Path) -> dict[int, Path]:
    names = (each for each in folder.iterdir() if each.name.isascii() and each.name.isdecimal() and each.is_dir())
    return {int(each.name): each for each in names}
