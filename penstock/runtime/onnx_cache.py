"""The cache of exported graphs, which ONNX Runtime runs on a CPU.

A graph is exported once and cached under the bundle's content hash. It is used only if it reproduces the golden
examples, in batches of several sizes; otherwise the reason is logged once and torch runs the network.
"""

import logging
import os
import secrets
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from penstock.core.bundle import BundleFiles
from penstock.core.errors import ServeError
from penstock.core.record import chunk_spec
from penstock.core.spec import Array
from penstock.runtime.exporter_process import run_exporter
from penstock.runtime.onnx_executor import OnnxExecutor, steady_graph

log = logging.getLogger(__name__)

NEEDED = ("onnxruntime", "onnx", "onnxscript")


def cached_graph(files: BundleFiles, cache: Path, options: list[str]) -> Path:
    """Return the graph of a bundle, exported now if it is not cached.

    Args:
        files: The bundle.
        cache: The folder of cached graphs.
        options: Options of the exporter: `--app` and `--accept-changed-app`.

    Raises:
        ServeError: There is none, for this reason.
    """
    try:
        made_by = "-".join(version(package) for package in ("torch", *NEEDED))
    except PackageNotFoundError as error:
        raise ServeError(f"the package {error.name} is not installed") from None
    file = cache / f"{files.manifest.content_hash[:32]}-{made_by}.onnx"
    refused = file.with_suffix(".refused")
    try:
        if file.is_file():
            return file
        if refused.is_file():
            raise ServeError(refused.read_text())
        cache.mkdir(parents=True, exist_ok=True)
        log.warning("exporting the network once, to %s", file)
        _export(files, file, refused, options)
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
        graph.with_suffix(".refused").write_text(reason)
    except OSError as error:
        log.warning("%s cannot be marked as unusable (%s)", graph, error.strerror)


def _in_batches(predict: Callable[[Array], Array], chunk_B: Array, size: int) -> Array:
    parts = [predict(chunk_B[start : start + size]) for start in range(0, len(chunk_B), size)]
    return np.concatenate(parts)


def _export(files: BundleFiles, file: Path, refused: Path, options: list[str]) -> None:
    beside = file.with_name(f".{file.stem}-{secrets.token_hex(4)}.onnx")
    try:
        failure = run_exporter("penstock.runtime.onnx_export", files.folder, beside, options)
        if failure is None:
            steady_graph(file).unlink(missing_ok=True)
            if steady_graph(beside).is_file():
                os.replace(steady_graph(beside), steady_graph(file))
            # Last: its presence shows that the others are complete.
            os.replace(beside, file)
            return
    finally:
        beside.unlink(missing_ok=True)
        steady_graph(beside).unlink(missing_ok=True)
    # Otherwise the cause may be temporary, such as a lack of memory: the next start tries again.
    if failure.not_exportable:
        refused.write_text(failure.reason)
    raise ServeError(failure.reason)
