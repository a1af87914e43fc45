"""The application of a bundle: found, compared with what the bundle recorded, and only then imported."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from penstock.core.bundles.bundle import BundleFiles, Manifest
from penstock.core.errors import ApplicationError, SourcesChanged
from penstock.core.source_files.find_application import FoundApplication, find_application, refuse_downloaded
from penstock.core.source_files.unrun_sources import SourceContents, UnrunSources


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedSources:
    """The sources of a bundle's application, as they were when they were compared with the recorded ones.

    Args:
        manifest: Description of the bundle.
        reference: Finds the application.
        changed: The source files that were changed, added or removed.
        sources: What was read; None for an application without source files, of a bundle that recorded none.
    """

    manifest: Manifest
    reference: str
    changed: list[str]
    sources: SourceContents | None


def bundle_application(files: BundleFiles, app: str | None = None, *, accept_changed: bool = False) -> FoundApplication:
    """Import the application of a bundle: that of `app`, or of the reference in its manifest.

    A file that is not at its recorded place any more is looked for beside the bundle's folder, by its name. Nothing is
    imported before its sources are those that the bundle recorded.

    Args:
        files: The bundle.
        app: The application, if it moved.
        accept_changed: Accept other sources than the recorded ones.

    Raises:
        ApplicationError: It is not there, or the manifest has no reference, because it was made in a notebook, or the
            reference is of a file in the bundle, or of one that declares no application.
        SourcesChanged: A source file differs and `accept_changed` is false.
        BundleError: A spec differs.
    """
    found = find_application(checked_reference(files.folder, files.manifest, app, accept_changed=accept_changed))
    files.check_sources(found, accept_changed=accept_changed)
    return found


def checked_reference(folder: Path, manifest: Manifest, app: str | None = None, *, accept_changed: bool = False) -> str:
    """Find the application of a bundle, and check its sources without importing them.

    Args:
        folder: The bundle's folder.
        manifest: Its description.
        app: See `bundle_application`.
        accept_changed: See `bundle_application`.

    Returns:
        The application's reference.

    Raises:
        ApplicationError: See `bundle_application`.
        SourcesChanged: See `bundle_application`.
    """
    compared = compare_sources(folder, manifest, app)
    if compared.changed and not accept_changed:
        raise SourcesChanged(
            f"{', '.join(compared.changed)} of application {manifest.name!r} changed since the bundle was made; train "
            f"again, or pass --accept-changed-app (accept_changed=True) if the network is the same."
        )
    return compared.reference


def compare_sources(folder: Path, manifest: Manifest, app: str | None = None) -> ComparedSources:
    """Find the application of a bundle and compare its sources with the recorded ones; nothing is imported.

    Args:
        folder: The bundle's folder.
        manifest: Its description.
        app: See `bundle_application`.

    Raises:
        ApplicationError: See `bundle_application`.
    """
    reference = app or manifest.reference
    if not reference:
        raise ApplicationError("the bundle has no reference to its application; name it with --app (app=...).")
    if app:
        return _compare_named(manifest, app)
    refuse_downloaded(reference, folder)
    reference = _moved_beside(folder, reference) or reference
    try:
        unrun = UnrunSources.of(reference)
    except ApplicationError as error:
        raise ApplicationError(
            f"{error} If the application is elsewhere now, put its file beside the bundle's folder, or name it with "
            f"--app (app=...)."
        ) from error
    # By its place too: an import path may lead into a bundle that lies where Python looks for modules.
    refuse_downloaded(str(unrun.home), folder)
    sources = unrun.read(manifest.sources)
    if not sources.declares():
        raise ApplicationError(
            f"the bundle names {sources.home} as its application, which imports nothing of penstock, so that it "
            f"declares none; name the file that does with --app (app=...)."
        )
    changed = sources.changed(manifest.sources)
    return ComparedSources(manifest=manifest, reference=reference, changed=changed, sources=sources)


def _compare_named(manifest: Manifest, app: str) -> ComparedSources:
    try:
        sources = UnrunSources.of(app).read(manifest.sources)
    except ApplicationError:
        if manifest.reference:
            raise
        return ComparedSources(manifest=manifest, reference=app, changed=[], sources=None)
    # A bundle of a notebook recorded none.
    changed = sources.changed(manifest.sources) if manifest.reference else []
    return ComparedSources(manifest=manifest, reference=app, changed=changed, sources=sources)


def _moved_beside(folder: Path, reference: str) -> str | None:
    path, colon, name = reference.rpartition(":")
    if not colon or name.endswith(".py"):
        path, colon, name = reference, "", ""
    file = folder.absolute().parent / Path(path).name
    moved = path.endswith(".py") and not Path(path).is_file() and file.is_file()
    return f"{file}{colon}{name}" if moved else None
