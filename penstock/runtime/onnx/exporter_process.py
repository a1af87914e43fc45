"""The process in which a network is exported to ONNX: how it is started, and how it reports failure.

A separate process, because the exporter takes seconds and hundreds of megabytes that the caller should not keep, and a
second export in one process was seen to freeze a dimension silently. This module does not import torch.
"""

import argparse
import logging
import os
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn, TypeVar, final

from penstock.core.errors import PenstockError
from penstock.core.machine.process_stat import cpu_seconds

# Large networks take many minutes. An export that is given up is lost, and the next start begins it anew.
EXPORT_TIMEOUT_S = 3600
# The log says that an export still runs after this time, and then whenever its duration has doubled.
FIRST_WORD_S = 10.0
# An exporter that uses less of a core than this computes nothing. A thread that reports metrics uses less, and a real
# export on a crowded machine more.
MIN_CPU_SHARE = 0.01

log = logging.getLogger(__name__)
# Of `nice`.
LOWEST_PRIORITY = 19
# Exit status where the network itself cannot be exported.
NOT_EXPORTABLE = 65
# A line of a traceback in the message of torch's exporter; the last one is of the operation that failed.
_TRACED = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+)')

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


@final
class BackgroundExports:
    """Runs exporters at the lowest priority on one thread each, until it is ended by another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.is_ended = False

    def adopt(self, process: subprocess.Popen[bytes]) -> None:
        """Lower the priority of an exporter, or end it if this was ended."""
        with self._lock:
            self._process = process
            if self.is_ended:
                process.kill()
                return
        # The process may be over.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST_PRIORITY)

    def end(self) -> None:
        """End the exporter that runs, and those that would be started."""
        with self._lock:
            self.is_ended = True
            if self._process is not None:
                self._process.kill()


def run_exporter(
    module: str,
    source: str | Path,
    file: Path,
    options: list[str] | None = None,
    background: BackgroundExports | None = None,
    stall_s: float | None = None,
    kept: bool = False,
) -> ExportFailure | None:
    """Run `python -m module source file *options`.

    Args:
        module: Its `main` calls `exporter_main`.
        source: The bundle's folder, or the application's reference.
        file: Where the graph goes.
        options: `--app` and `--accept-changed-app`.
        background: Runs it beside other work, without messages on its progress.
        stall_s: Give it up when it uses no processor time for so long; None waits up to `EXPORT_TIMEOUT_S`.
        kept: The graph goes into a cache, as messages on its progress say.

    Returns:
        None if the graph was written.
    """
    command = [sys.executable, "-m", module, str(source), str(file), "--end-with-input", *(options or [])]
    with TemporaryFile() as errors:
        try:
            # The exporter ends itself when its standard input ends: that of a parent that was killed ends too.
            exporter = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=None if background is None else {**os.environ, "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            return ExportFailure(reason=f"{sys.executable} cannot be run ({error.strerror})")
        with exporter as process:
            if background is not None:
                background.adopt(process)
            try:
                status = _wait(process, None if background else str(source), stall_s, kept=kept)
            except subprocess.TimeoutExpired:
                return ExportFailure(reason=f"the export took longer than {EXPORT_TIMEOUT_S} s")
            except _Stalled:
                return ExportFailure(
                    reason=f"the export used no processor time for {stall_s:g} s; mend the application, or raise "
                    f"--load-timeout-s"
                )
            finally:
                process.kill()
        if status == 0:
            return None
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    lines = said.strip().splitlines() or [f"the exporter ended with status {status}"]
    return ExportFailure(reason=lines[-1], not_exportable=status == NOT_EXPORTABLE)


class _Stalled(Exception):
    """An exporter computes nothing."""


def _wait(process: subprocess.Popen[bytes], source: str | None, stall_s: float | None, *, kept: bool) -> int:
    start_s = time.monotonic()
    word_s, passed_s = FIRST_WORD_S, 0.0
    # Seconds, and processor time used until then, when its progress was last seen.
    seen_s, seen_cpu_s = 0.0, 0.0
    while True:
        until_s = min(word_s, EXPORT_TIMEOUT_S, inf if stall_s is None else seen_s + stall_s)
        try:
            return process.wait(max(0.0, until_s - passed_s))
        except subprocess.TimeoutExpired:
            passed_s = time.monotonic() - start_s
            if passed_s >= EXPORT_TIMEOUT_S:
                raise
        if stall_s is not None and passed_s >= seen_s + stall_s:
            cpu_s = cpu_seconds(process.pid)
            if cpu_s - seen_cpu_s < MIN_CPU_SHARE * (passed_s - seen_s):
                raise _Stalled
            seen_s, seen_cpu_s = passed_s, cpu_s
        if passed_s >= word_s:
            if source is not None:
                once = "; this is done once, and kept" if kept else ""
                log.warning("still exporting %s to ONNX after %.0f s%s", source, passed_s, once)
            # The next word comes when the duration has doubled.
            word_s = 2 * passed_s


def exporter_main(
    description: str | None, read: Callable[[argparse.Namespace], T], write: Callable[[T, Path], object]
) -> NoReturn:
    """Export, or report the reason on standard error, and end the process: no thread may delay its end.

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
    parser.add_argument("--end-with-input", action="store_true")
    given = parser.parse_args()
    if given.end_with_input:
        threading.Thread(target=end_with_parent, daemon=True).start()
    # The exporter's messages are about itself; what counts is whether the graph gives the bundle's answers.
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    status = 1
    try:
        status = _export(given, read, write)
    except BaseException:  # noqa: BLE001 - an application may raise anything; this is the top of the process
        # The application may have closed standard error.
        with suppress(OSError, ValueError):
            traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        # The application may have started threads that never end.
        os._exit(status)


def _export(
    given: argparse.Namespace, read: Callable[[argparse.Namespace], T], write: Callable[[T, Path], object]
) -> int:
    """Export; returns the exit status, after the reason was printed if it is not 0."""
    try:
        loaded = read(given)
    except PenstockError as error:
        return _failed(str(error))
    try:
        write(loaded, given.file)
    except PenstockError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(
            f"the graph {given.file} cannot be written ({error.strerror or error}); mend that and export again."
        )
    except Exception as error:  # noqa: BLE001 - the exporter raises anything
        return _failed(first_cause(error), NOT_EXPORTABLE)
    return 0


def _failed(reason: str, status: int = 1) -> int:
    print(reason, file=sys.stderr)
    return status


def end_with_parent() -> None:
    """End this process when its standard input ends, as that of a parent that was killed does."""
    # Not sys.stdin, whose lock the interpreter cannot take at its end while a thread reads.
    while os.read(0, 1):
        pass
    os._exit(1)


def first_cause(error: BaseException) -> str:
    """The innermost cause of an exporter's error, in one line, with its place in the network if that is known."""
    # The exporter wraps the cause in advice about itself.
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    traced = [found for line in lines if (found := _TRACED.match(line))]
    where = f" at {traced[-1]['file']}:{traced[-1]['line']}" if traced else ""
    return f"{type(error).__name__}: {lines[0][:300]}{where}"
