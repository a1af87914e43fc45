"""The exported graph of a bundle, made once and kept: what ONNX Runtime serves on a CPU.

Kept in a cache folder under the bundle's content hash. A graph is used only if it gives the bundle's golden answers, in
batches of several sizes; whatever stands against it is said once, and torch runs the network instead.
"""

import logging
import os
import secrets
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from penstock.core.bundle import BundleFiles
from penstock.core.errors import PenstockError
from penstock.core.spec import Array
from penstock.runtime.onnx_executor import OnnxExecutor, steady_graph

log = logging.getLogger(__name__)

EXPORT_S = 300
# With what the exporter ends where the network itself stands against it.
NOT_EXPORTABLE = 65
NEEDED = ("onnxruntime", "onnx", "onnxscript")


def cached_graph(files: BundleFiles, cache: Path, options: list[str]) -> Path | str:
    """The graph of a bundle, exported now if it never was.

    Args:
        files: The bundle.
        cache: The folder where graphs are kept.
        options: Of the export: where the application is now, if it moved.

    Returns:
        The file; or why there is none.
    """
    try:
        made_by = "-".join(version(package) for package in ("torch", *NEEDED))
    except PackageNotFoundError as error:
        return f"the package {error.name} is not installed"
    file = cache / f"{files.manifest.content_hash[:32]}-{made_by}.onnx"
    refused = file.with_suffix(".refused")
    try:
        if file.is_file():
            return file
        if refused.is_file():
            return refused.read_text()
        cache.mkdir(parents=True, exist_ok=True)
        log.warning("exporting the network once, to %s", file)
        return _exported(files, file, refused, options)
    except OSError as error:
        return f"the cache {cache} cannot be used ({error.strerror}); name another one with --cache"


def onnx_executor(files: BundleFiles, graph: Path, threads: int) -> OnnxExecutor | str:
    """What runs a graph, shown to give the golden answers; or why not."""
    manifest = files.manifest
    try:
        executor = OnnxExecutor(graph, manifest.input, manifest.output, threads=threads)
        for size in {1, 3, len(files.golden.inputs)}:
            files.golden.check(lambda chunk_B, size=size: _in_batches(executor, chunk_B, size))
    except PenstockError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's own errors share no class but this
        return f"{type(error).__name__}: {error}"
    return executor


def refuse_graph(graph: Path, reason: str) -> None:
    """Remember that a graph is not to be used, so that it is not exported again at every start."""
    try:
        graph.unlink(missing_ok=True)
        steady_graph(graph).unlink(missing_ok=True)
        graph.with_suffix(".refused").write_text(reason)
    except OSError as error:
        log.warning("%s cannot be put aside (%s)", graph, error.strerror)


def _in_batches(executor: OnnxExecutor, chunk_B: Array, size: int) -> Array:
    parts = [executor.predict(chunk_B[start : start + size]) for start in range(0, len(chunk_B), size)]
    return np.concatenate(parts)


def _exported(files: BundleFiles, file: Path, refused: Path, options: list[str]) -> Path | str:
    beside = file.with_name(f".{file.stem}-{secrets.token_hex(4)}.onnx")
    command = [sys.executable, "-m", "penstock.runtime.export_graph", str(files.folder), str(beside), *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_S, check=False)
        if done.returncode == 0:
            steady_graph(file).unlink(missing_ok=True)
            if steady_graph(beside).is_file():
                os.replace(steady_graph(beside), steady_graph(file))
            # Last: that it is there says that all is.
            os.replace(beside, file)
            return file
        reason = (done.stderr.strip().splitlines() or [f"the exporter ended with status {done.returncode}"])[-1]
        if done.returncode != NOT_EXPORTABLE:
            # Killed, out of memory, an application that another version of it mends: the next start tries again.
            return reason
    except subprocess.TimeoutExpired:
        return f"the export took longer than {EXPORT_S} s"
    finally:
        beside.unlink(missing_ok=True)
        steady_graph(beside).unlink(missing_ok=True)
    refused.write_text(reason)
    return reason
