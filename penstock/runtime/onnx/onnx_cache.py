"""The cache of exported graphs, which ONNX Runtime runs on a CPU.

A graph is exported once and cached under the bundle's content hash. It is used only if it reproduces the golden
examples, in batches of several sizes; otherwise the reason is logged once and torch runs the network.
"""

import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np

from penstock.core.bundles.bundle import BundleFiles, Manifest
from penstock.core.errors import ServeError
from penstock.core.machine.version import __version__
from penstock.core.machine.versions import installed_version
from penstock.core.record import chunk_spec
from penstock.core.spec import Array
from penstock.runtime.loading_steps import AWAITING_EXPORT, EXPORTING, LoadingSteps
from penstock.runtime.onnx.exporter_process import run_exporter
from penstock.runtime.onnx.onnx_executor import OnnxExecutor, steady_graph

log = logging.getLogger(__name__)

NEEDED = ("onnxruntime", "onnx", "onnxscript")


def is_cached(files: BundleFiles, cache: Path) -> bool:
    """True if the graph of a bundle need not be exported.

    Raises:
        ServeError: A package for the export is missing.
    """
    return _place(files.manifest, cache).is_file()


def refusal(files: BundleFiles, cache: Path) -> str:
    """Return why the bundle's network cannot be exported, as remembered; empty where that is not known.

    Raises:
        ServeError: A package for the export is missing.
    """
    return _refusal(_place(files.manifest, cache))


def exporter_options(app: str | None, *, accept_changed: bool) -> list[str]:
    """Return the options of the exporter for an application that moved, or whose sources changed."""
    return [*(["--app", app] if app else []), *(["--accept-changed-app"] if accept_changed else [])]


def needs_export(manifest: Manifest, cache: Path) -> bool:
    """Tell whether the network of a bundle was not exported yet, and is not known to be one that cannot be.

    Raises:
        ServeError: A package for the export is missing.
    """
    file = _place(manifest, cache)
    return not file.is_file() and not _refusal(file)


def is_refused(manifest: Manifest, cache: Path) -> bool:
    """Tell whether the network of a bundle is known to be one that cannot be exported.

    Raises:
        ServeError: A package for the export is missing.
    """
    return bool(_refusal(_place(manifest, cache)))


def cached_graph(
    files: BundleFiles,
    cache: Path,
    options: list[str],
    progress: LoadingSteps | None = None,
    *,
    stall_s: float | None = None,
    unexported: str = "",
) -> Path:
    """Return the graph of a bundle, exported now if it is not cached; of several processes, one exports it.

    Args:
        files: The bundle.
        cache: The folder of cached graphs.
        options: Options of the exporter: `--app` and `--accept-changed-app`.
        progress: Reports an export.
        stall_s: See `run_exporter`.
        unexported: Why it is not exported now if it is not cached; empty to export it.

    Raises:
        ServeError: There is none, for this reason.
    """
    file = _place(files.manifest, cache)
    try:
        if file.is_file():
            return file
        # Before the lock, which a read-only cache cannot have.
        _raise_refused(file)
        if unexported:
            raise ServeError(unexported)
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(file, files.manifest.name, progress or LoadingSteps()):
            if not file.is_file():
                _raise_refused(file)
                _export(files, file, options, progress or LoadingSteps(), stall_s)
        return file
    except OSError as error:
        raise ServeError(
            f"the cache {cache} cannot be used ({error.strerror}); name another one with --cache"
        ) from None


def onnx_executor(files: BundleFiles, graph: Path, threads: int) -> OnnxExecutor:
    """Open a graph and check it by the golden examples.

    Raises:
        BundleError: It is not the graph of this network.
        Exception: One of `onnx_errors()`: ONNX Runtime does not run it.
    """
    manifest, golden = files.manifest, files.golden
    network = chunk_spec(manifest.network) if manifest.network else None
    executor = OnnxExecutor(graph, manifest.input, manifest.output, threads=threads, network=network)
    for size in {1, 3, len(golden.inputs)}:
        golden.check(lambda chunk_B, size=size: _in_batches(executor.predict, chunk_B, size))
        golden.check_network(lambda chunk_B, size=size: _in_batches(executor.predict_network, chunk_B, size))
    return executor


def mark_unusable(graph: Path, reason: str) -> None:
    """Mark a graph as unusable, so that it is not exported again at every start."""
    try:
        graph.unlink(missing_ok=True)
        steady_graph(graph).unlink(missing_ok=True)
        _refused(graph).write_text(reason)
    except OSError as error:
        log.warning("%s cannot be marked as unusable (%s)", graph, error.strerror)


def _in_batches(predict: Callable[[Array], Array], chunk_B: Array, size: int) -> Array:
    parts = [predict(chunk_B[start : start + size]) for start in range(0, len(chunk_B), size)]
    return np.concatenate(parts)


def _place(manifest: Manifest, cache: Path) -> Path:
    try:
        made_by = "-".join(installed_version(package) for package in ("torch", *NEEDED))
    except PackageNotFoundError as error:
        raise ServeError(f"the package {error.name} is not installed; pip install 'penstock-nn[cpu]'") from None
    return cache / f"{manifest.content_hash[:32]}-{made_by}.onnx"


@contextmanager
def _alone(file: Path, name: str, progress: LoadingSteps) -> Generator[None]:
    """Hold the lock of a graph: the engines of a server, and several servers, start at the same time."""
    with file.with_suffix(".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.report(AWAITING_EXPORT)
            log.warning("waiting for another process, which exports %r to ONNX", name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            log.info("%s is on a file system without locks: %s", file, error.strerror)
        yield


def _raise_refused(file: Path) -> None:
    if reason := _refusal(file):
        raise ServeError(reason)


def _refused(graph: Path) -> Path:
    """File of the reason why a graph cannot be made; another version of Penstock may export it otherwise."""
    return graph.with_name(f"{graph.stem}-{__version__}.refused")


def _refusal(file: Path) -> str:
    refused = _refused(file)
    return refused.read_text() if refused.is_file() else ""


def _export(files: BundleFiles, file: Path, options: list[str], progress: LoadingSteps, stall_s: float | None) -> None:
    name = files.manifest.name
    # What lasts is reported by `run_exporter`.
    log.info("exporting %r to ONNX once, to %s%s", name, file, progress.last_time(EXPORTING, name))
    # An export that was killed leaves its part, and this process holds the lock.
    for left in file.parent.glob(f".{file.stem}-*"):
        left.unlink(missing_ok=True)
    beside = file.with_name(f".{file.stem}-{secrets.token_hex(4)}.onnx")
    try:
        with progress.step(EXPORTING, name):
            failure = run_exporter(
                "penstock.runtime.onnx.onnx_export", files.folder, beside, options, stall_s=stall_s, kept=True
            )
            if failure is not None:
                # Otherwise the cause may be temporary, such as a lack of memory: the next start tries again.
                if failure.not_exportable:
                    _refused(file).write_text(failure.reason)
                raise ServeError(failure.reason)
        steady_graph(file).unlink(missing_ok=True)
        if steady_graph(beside).is_file():
            os.replace(steady_graph(beside), steady_graph(file))
        # Last: its presence shows that the others are complete.
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)
        steady_graph(beside).unlink(missing_ok=True)
