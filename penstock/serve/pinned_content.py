"""Private copies of a bundle and of its application's sources, or of a chain's sources, made when they are loaded.

Engines and front-ends that are restarted read the copies, so that all processes run the same content even after the
files on disk were edited, replaced or removed.

    ROOT/lock                held by the server; a folder whose lock is free was left by one that was killed
    ROOT/0/bundle/...        the files of the bundle
    ROOT/0/sources.json      the reference of the application, and the places of its sources; of one in an installed
                             package, which is not copied, the hashes of its sources
    ROOT/0/sources/0, 1 ...  their content
"""

import fcntl
import itertools
import json
import shutil
import tempfile
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, final

from penstock.core.bundles.bundle import GOLDEN, LANGUAGE, MANIFEST, PREPARE, WEIGHTS, read_manifest
from penstock.core.bundles.bundle_application import compare_sources
from penstock.core.errors import ApplicationError, BundleCorrupt, ServeError, SourcesChanged
from penstock.core.source_files.app_sources import local_modules
from penstock.core.source_files.find_application import file_reference
from penstock.core.source_files.pinned_sources import pin_sources
from penstock.core.source_files.unrun_sources import UnrunSources
from penstock.core.storage.regular_file import NotRegular, open_regular

PREFIX = "penstock-models-"
BUNDLE, SOURCES, SOURCES_JSON = "bundle", "sources", "sources.json"


@final
class PinnedModels:
    """Copies of the models that a server has loaded.

    Args:
        root: An empty folder.
        app: Reference of the application, if it moved.
    """

    def __init__(self, root: Path, app: str | None) -> None:
        self._root, self._app = root, app
        self._numbers = itertools.count()

    def pin(self, bundle: Path) -> Path:
        """Copy a bundle and the sources of its application; returns the folder of the copies.

        Raises:
            BundleError: There is no bundle, or a file of it is no regular file.
            ApplicationError: The bundle names a file of its own as its application.
            ServeError: The copies cannot be written.
        """
        manifest = read_manifest(bundle)
        with self._folder(bundle) as folder:
            (folder / BUNDLE).mkdir()
            for name in (MANIFEST, WEIGHTS, GOLDEN, PREPARE, LANGUAGE):
                _copy(bundle / name, folder / BUNDLE / name)
            reference = self._app or (compare_sources(bundle, manifest)[0] if manifest.reference else "")
            place = None if not reference else file_reference(reference, None if self._app else bundle)
            _pin_sources(reference, place, manifest.sources, folder)
        return folder

    def pin_chain(self, reference: str) -> Path:
        """Copy the sources of a chain, as those of an application; returns the folder of the copies.

        Args:
            reference: See `find_chain`.

        Raises:
            ServeError: The copies cannot be written.
        """
        with self._folder(reference) as folder:
            _pin_sources(reference, file_reference(reference, default="chain"), (), folder)
        return folder

    @contextmanager
    def _folder(self, copied: Path | str) -> Generator[Path]:
        """Make a folder of copies, and remove it again if they cannot be made."""
        folder = self._root / str(next(self._numbers))
        try:
            (folder / SOURCES).mkdir(parents=True)
            yield folder
        except OSError as error:
            self.release(folder)
            raise ServeError(
                f"{copied} cannot be copied to {folder} ({error.strerror or error}); make room there, or set TMPDIR to "
                f"a folder with room."
            ) from None
        except BaseException:
            self.release(folder)
            raise

    def release(self, folder: Path) -> None:
        """Remove the copies of a model that is unloaded."""
        shutil.rmtree(folder, ignore_errors=True)


def _pin_sources(reference: str, place: tuple[Path, str] | None, further: Iterable[str], folder: Path) -> None:
    about: dict[str, Any] = {"reference": "", "files": {}}
    if place is not None:
        home, about["reference"] = place
        sources = {home, *local_modules(home, "", ()).values()}
        sources |= {(home.parent / name).resolve() for name in further}
        for number, source in enumerate(sorted(sources)):
            if source.is_relative_to(home.parent) and _copy(source, folder / SOURCES / str(number)):
                about["files"][str(source)] = str(number)
    elif reference:
        # Found by name, among the modules of its package: others are refused later, see `pinned_reference`.
        with suppress(ApplicationError):
            about |= {"installed": reference, "hashes": UnrunSources.of(reference).hashes(further)}
    (folder / SOURCES_JSON).write_text(json.dumps(about))


def _copy(source: Path, target: Path) -> bool:
    """Copy a regular file; returns whether there is one."""
    try:
        opened, _ = open_regular(source)
    except FileNotFoundError:
        return False
    except NotRegular as error:
        raise BundleCorrupt(f"{source.name} cannot be read ({error.strerror}); copy the bundle again.") from None
    with opened, target.open("wb") as copy:
        shutil.copyfileobj(opened, copy, 1 << 20)
    return True


@contextmanager
def pinned_models(app: str | None) -> Generator[PinnedModels]:
    """Make the folder of the copies for the life of a server, and remove what killed servers left.

    Args:
        app: Reference of the application, if it moved.
    """
    _remove_left(Path(tempfile.gettempdir()))
    with ExitStack() as held:
        root = Path(held.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)))
        fcntl.flock(held.enter_context((root / "lock").open("w")), fcntl.LOCK_EX)
        yield PinnedModels(root, app)


def _remove_left(parent: Path) -> None:
    for root in parent.glob(f"{PREFIX}*"):
        try:
            with (root / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root, ignore_errors=True)
        except OSError:
            # Of a server that runs or that starts at this moment, or of another user.
            continue


def pinned_bundle(pinned: str, bundle: str) -> Path:
    """Return the folder of the bundle that is read: the copy, where there is one."""
    return Path(pinned) / BUNDLE if pinned else Path(bundle)


def reference_of(pinned: str) -> str:
    """Return the application's reference of copies; empty without any.

    Raises:
        OSError: The copies were removed.
    """
    return json.loads((Path(pinned) / SOURCES_JSON).read_text())["reference"] if pinned else ""


def pinned_reference(pinned: str) -> str:
    """Import the copied sources in this process from now on; returns the application's reference, empty without any.

    Raises:
        SourcesChanged: An application of an installed package has other sources now.
        ServeError: The copies were removed, because the load was given up.
    """
    if not pinned:
        return ""
    folder = Path(pinned)
    try:
        about = json.loads((folder / SOURCES_JSON).read_text())
    except FileNotFoundError:
        raise ServeError("the load was given up, and its copies were removed.") from None
    if "installed" in about:
        changed = UnrunSources.of(about["installed"]).changed(about["hashes"])
        if changed:
            raise SourcesChanged(
                f"{', '.join(changed)} of application {about['installed']!r} changed since the server loaded it; load "
                f"the model again, or restart the server."
            )
    pin_sources({Path(file): (folder / SOURCES / name).read_bytes() for file, name in about["files"].items()})
    return about["reference"]
