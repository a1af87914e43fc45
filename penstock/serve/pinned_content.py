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
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, final

from penstock.core.bundles.bundle import GOLDEN, LANGUAGE, MANIFEST, PREPARE, WEIGHTS, read_manifest
from penstock.core.bundles.bundle_application import ComparedSources, compare_sources
from penstock.core.errors import ApplicationError, BundleCorrupt, ServeError, SourcesChanged
from penstock.core.source_files.find_application import names_file, reference_parts
from penstock.core.source_files.pinned_sources import pin_sources
from penstock.core.source_files.unrun_sources import SourceContents, UnrunSources
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

    def pin(self, bundle: Path, compared: ComparedSources | None = None) -> Path:
        """Copy a bundle and the sources of its application; returns the folder of the copies.

        Args:
            bundle: Its folder.
            compared: Sources that were compared before, which are the copies if the bundle is still the same one; by
                default, and for another bundle, those on disk.

        Raises:
            BundleError: There is no bundle, or a file of it is no regular file.
            ApplicationError: Its application is not there, or is a file of the bundle.
            ServeError: The copies cannot be written.
        """
        manifest = read_manifest(bundle)
        with self._folder(bundle) as folder:
            (folder / BUNDLE).mkdir()
            for name in (MANIFEST, WEIGHTS, GOLDEN, PREPARE, LANGUAGE):
                _copy(bundle / name, folder / BUNDLE / name)
            if compared is None or compared.manifest != manifest:
                compared = compare_sources(bundle, manifest, self._app)
            _pin_sources(compared.reference, compared.sources, folder)
        return folder

    def pin_chain(self, reference: str) -> Path:
        """Copy the sources of a chain, as those of an application; returns the folder of the copies.

        Args:
            reference: See `find_chain`.

        Raises:
            ServeError: The copies cannot be written.
        """
        with self._folder(reference) as folder:
            sources = None
            # Importing a chain that is not there says what is wrong.
            with suppress(ApplicationError):
                sources = UnrunSources.of(reference).read(())
            _pin_sources(reference, sources, folder, default="chain")
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


def _pin_sources(reference: str, sources: SourceContents | None, folder: Path, default: str = "app") -> None:
    about: dict[str, Any] = {"reference": "", "files": {}}
    path, attribute = reference_parts(reference)
    if sources is not None and names_file(path):
        about["reference"] = f"{sources.home}:{attribute or default}"
        for number, source in enumerate(sorted(set(sources.files.values()))):
            if _store(source, sources.contents[source], folder / SOURCES / str(number)):
                about["files"][str(source)] = str(number)
    elif sources is not None:
        # Found by name, among the modules of its package: others are refused later, see `pinned_reference`.
        about |= {"installed": reference, "hashes": sources.hashes()}
    (folder / SOURCES_JSON).write_text(json.dumps(about))


def _store(source: Path, content: bytes | None, target: Path) -> bool:
    """Write what was read of a file, or copy what was not read; returns whether there is a file."""
    if content is None:
        return _copy(source, target)
    target.write_bytes(content)
    return True


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
        hashes = about["hashes"]
        changed = UnrunSources.of(about["installed"]).read(hashes).changed(hashes)
        if changed:
            raise SourcesChanged(
                f"{', '.join(changed)} of application {about['installed']!r} changed since the server loaded it; load "
                f"the model again, or restart the server."
            )
    pin_sources({Path(file): (folder / SOURCES / name).read_bytes() for file, name in about["files"].items()})
    return about["reference"]
