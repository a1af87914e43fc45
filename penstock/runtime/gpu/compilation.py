"""Compilation of batches in processes beside a server: what those of one tensor and of records share."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Generic, NamedTuple, TypeVar

import torch

from penstock.runtime.execution import Execution
from penstock.runtime.gpu.precision import GpuWay
from penstock.runtime.load import Predictor
from penstock.runtime.onnx.exporter_process import NOT_EXPORTABLE

log = logging.getLogger(__name__)

# Processes that compile at the same time, and the cores and the GPU's memory for each of them.
MAX_COMPILERS, CORES_EACH, BYTES_EACH = 6, 4, 4 << 30

Process = TypeVar("Process", bound="CompilerProcess")


class CompiledBatch(NamedTuple):
    """A batch size that was compiled.

    Args:
        rows: The batch size.
        ms: Its time on the GPU; None where the network was not faster compiled.
        level: Where lengths vary, the place of the batch's length among them, from the longest down; None where its
            dimensions are not equally long.
    """

    rows: int
    ms: float | None
    level: int | None = 0


class Compilation(Generic[Process]):
    """Compiled batches of one bundle, of a cache and of processes that fill it.

    Args:
        predictor: The bundle.
        how: Device and application.
        way: The way in which the network runs.
        place: The folder of compiled batches.

    Attributes:
        reason: Why some batches are not compiled; empty where all are, or will be.
    """

    def __init__(self, predictor: Predictor, how: Execution, way: GpuWay, place: Path) -> None:
        self._predictor, self._how, self._way, self._place = predictor, how, way, place
        self._compilers: list[Process] = []
        self._closed = False
        self.reason = ""

    def close(self) -> None:
        """Stop compiling."""
        self._closed = True
        for compiler in self._compilers:
            compiler.end()

    def _command(self, options: Sequence[str]) -> list[str]:
        """Return the command line of a process that compiles."""
        how = self._how
        command = [sys.executable, "-m", "penstock.runtime.gpu.compile_process"]
        command += [str(self._predictor.files.folder), str(self._place), "--device", how.device]
        command += ["--way", json.dumps(self._way.to_json()), *options, *(["--app", how.app] if how.app else [])]
        return [*command, *(["--accept-changed-app"] * how.accept_changed)]

    def _used(self, file: Path, use: Callable[[], CompiledBatch]) -> CompiledBatch | None:
        """Use a compiled file; where that fails, give up and return None."""
        try:
            return use()
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            # The file may be good.
            self._give_up(" ".join(str(error).split())[:300])
        except Exception as error:  # noqa: BLE001 - compiled code raises anything where it does not fit
            self._give_up(" ".join(str(error).split())[:300] or type(error).__name__)
            self._forget(file)
        return None

    def _forget(self, file: Path) -> None:
        """Remove a compiled file: it is compiled again at the next start."""
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed (%s): remove it, so that it is compiled again", file, error.strerror)

    def _give_up(self, reason: str) -> None:
        if not self.reason:
            self.reason = reason.rstrip(".")
            log.warning("not compiled: %s", self.reason)


class CompilerProcess:
    """A process that compiles.

    Args:
        command: Its command line.
        environment: Its environment.
    """

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._errors = TemporaryFile()  # noqa: SIM115 - closed by `end`
        # It ends itself when its standard input ends: that of a parent that was killed ends too.
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    @property
    def reason(self) -> str:
        """Reason for the end of the process."""
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return (said or [f"the compiler's process ended with status {self._process.returncode}"])[-1]

    @property
    def not_compilable(self) -> bool:
        """True if another attempt would fail in the same way."""
        return self._process.returncode == NOT_EXPORTABLE

    def end(self) -> None:
        """Kill the process, if it still runs."""
        self._process.kill()
        self._process.wait()
        self._errors.close()


def compilers_at_once(how: Execution, wanted: int) -> int:
    """Return the number of processes that compile at once, by cores, by memory, and by what is wanted."""
    memory = torch.cuda.mem_get_info(how.device)[0] // BYTES_EACH if torch.device(how.device).type == "cuda" else wanted
    return max(1, min(MAX_COMPILERS, how.cores // CORES_EACH, memory, wanted))


def compiler_environment(how: Execution, compilers: int) -> dict[str, str]:
    """Return the environment of compilers that share the cores: each has as many threads, and processes for kernels."""
    threads = str(max(1, how.cores // max(1, compilers)))
    return os.environ | dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), threads)
