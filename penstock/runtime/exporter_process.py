"""The process in which a network is exported to ONNX: how it is started, and how it reports failure.

A separate process, because the exporter takes seconds and hundreds of megabytes that the caller should not keep, and a
second export in one process was seen to freeze a dimension silently. This module does not import torch.
"""

import argparse
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from penstock.core.errors import PenstockError

EXPORT_TIMEOUT_S = 300
# Exit status where the network itself cannot be exported.
NOT_EXPORTABLE = 65

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFailure:
    """The reason why an exporter process wrote nothing.

    Args:
        reason: One sentence.
        not_exportable: The network itself cannot be exported; another attempt would fail in the same way.
    """

    reason: str
    not_exportable: bool = False


def run_exporter(module: str, source: str | Path, file: Path, options: list[str] | None = None) -> ExportFailure | None:
    """Run `python -m module source file *options`.

    Args:
        module: Its `main` calls `exporter_main`.
        source: The bundle's folder, or the application's reference.
        file: Where the graph goes.
        options: `--app` and `--accept-changed-app`.

    Returns:
        None if the graph was written.
    """
    command = [sys.executable, "-m", module, str(source), str(file), *(options or [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return ExportFailure(reason=f"the export took longer than {EXPORT_TIMEOUT_S} s")
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines() or [f"the exporter ended with status {done.returncode}"]
    return ExportFailure(reason=lines[-1], not_exportable=done.returncode == NOT_EXPORTABLE)


def exporter_main(
    description: str | None, read: Callable[[argparse.Namespace], T], write: Callable[[T, Path], object]
) -> None:
    """Export, or report the reason on standard error.

    Args:
        description: For `--help`.
        read: Loads what `source`, `app` and `accept_changed_app` name.
        write: Exports it to a file.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("source")
    parser.add_argument("file", type=Path)
    parser.add_argument("--app")
    parser.add_argument("--accept-changed-app", action="store_true")
    given = parser.parse_args()
    # The exporter's messages are about itself; what counts is whether the graph gives the bundle's answers.
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    try:
        loaded = read(given)
    except PenstockError as error:
        sys.exit(str(error))
    try:
        write(loaded, given.file)
    except PenstockError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"the graph {given.file} cannot be written ({error.strerror or error}); mend that and export again.")
    except Exception as error:  # noqa: BLE001 - the exporter raises anything; this is the top of the process
        print(first_cause(error), file=sys.stderr)
        sys.exit(NOT_EXPORTABLE)


def first_cause(error: BaseException) -> str:
    """The innermost cause of an exporter's error, in one line."""
    # The exporter wraps the cause in advice about itself.
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
