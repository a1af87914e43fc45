"""A server of its own for a measurement of live streams, and what it used meanwhile."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final
from urllib.parse import urlsplit

from penstock.bench.processes import children
from penstock.core.errors import BenchError

ENDS_S = 20.0
ANSWERS_S = 10.0
SAMPLED_MS = 200
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """What a server used between two moments.

    Args:
        cores: Of each process by its role, how many processors it kept busy.
        gpu: The share of the time in which the GPU had work, as the driver says; None where there is none.
        queue_ms: Mean time from a chunk's arrival to the start of its batch.
        compute_ms: Mean time of a chunk's batch.
        batch_rows: Mean rows of a batch, weighted by batches.
    """

    cores: dict[str, float]
    gpu: float | None
    queue_ms: float
    compute_ms: float
    batch_rows: float

    @property
    def described(self) -> str:
        """One sentence."""
        cores = ", ".join(f"{role} {share:.2f}" for role, share in sorted(self.cores.items()))
        gpu = "" if self.gpu is None else f"GPU busy {self.gpu:.0%}; "
        return (
            f"{gpu}mean batch {self.batch_rows:.0f} rows, a chunk waits {self.queue_ms:.2f} ms for it and is "
            f"{self.compute_ms:.2f} ms in it; processors: {cores}"
        )


@final
class StreamServer:
    """A running server.

    Args:
        url: Its address.
        name: Of the model that it serves.
        process: Of its supervisor, None where it was started by somebody else.
        grpc: The address of its gRPC, where streams go there.

    Attributes:
        streams_at: Where streams go.
    """

    def __init__(self, url: str, name: str, process: int | None = None, grpc: str | None = None) -> None:
        self.url = url
        self.streams_at = grpc or url
        self._name = name
        self._process = process
        self._gpu: _Gpu | None = None
        self._began: tuple[float, dict[str, float], tuple[int, int, int, int]] | None = None

    def begin(self) -> None:
        """What it uses counts from now on."""
        self._gpu = _Gpu()
        self._began = time.monotonic(), self._processor_s(), self._stats()

    def used(self) -> Used:
        """What it used since `begin`."""
        assert self._began is not None
        began_s, processor_s, before = self._began
        seconds = time.monotonic() - began_s
        now, stats = self._processor_s(), self._stats()
        chunks, batches, queue_ns, compute_ns = (now_n - then_n for now_n, then_n in zip(stats, before, strict=True))
        return Used(
            cores={role: (used - processor_s.get(role, 0.0)) / seconds for role, used in now.items()},
            gpu=None if self._gpu is None else self._gpu.share(),
            queue_ms=queue_ns / max(1, chunks) / 1e6,
            compute_ms=compute_ns / max(1, chunks) / 1e6,
            batch_rows=chunks / max(1, batches),
        )

    def _stats(self) -> tuple[int, int, int, int]:
        """Chunks, batches, and the nanoseconds in the table and in batches, of all chunks together."""
        with urllib.request.urlopen(f"{self.url}/v2/models/{self._name}/stats", timeout=ANSWERS_S) as answer:
            said = json.load(answer)["model_stats"][0]
        spent = said["inference_stats"]
        return (
            said["inference_count"],
            said["execution_count"],
            spent["queue"]["ns"],
            spent["compute_infer"]["ns"],
        )

    def _processor_s(self) -> dict[str, float]:
        if self._process is None:
            return {}
        processes = {"server": self._process} | children(self._process)
        return {role: _processor_s(process) for role, process in processes.items()}


@contextmanager
def serving(
    bundle: Path, options: Sequence[str], cpus: frozenset[int] | None = None, *, grpc: bool = False
) -> Generator[StreamServer]:
    """Serve a bundle for as long as this lasts.

    Args:
        bundle: Its folder.
        options: Of `penstock serve`.
        cpus: The cores on which the server runs; None for any.
        grpc: Whether streams go to its gRPC.

    Raises:
        BenchError: It did not start.
    """
    command = [sys.executable, "-m", "penstock", "serve", str(bundle), "--port", "0", *options]
    if grpc:
        command += ["--grpc-port", "0"]
    if cpus is not None:
        command = ["taskset", "-c", ",".join(map(str, sorted(cpus))), *command]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            if "http://" not in said:
                log.seek(0)
                raise BenchError(f"the server did not start: {' '.join(log.read().split())[-300:]}")
            url, name = said.split()[-1].rstrip("/"), said.split()[1]
            address = f"{urlsplit(url).hostname}:{process.stdout.readline().split()[-1]}" if grpc else None
            yield StreamServer(url, name, process.pid, address)
        finally:
            process.terminate()
            try:
                process.wait(ENDS_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _processor_s(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND


@final
class _Gpu:
    """The driver's samples of how busy the GPUs are, until they are asked for."""

    def __init__(self) -> None:
        tool = shutil.which("nvidia-smi")
        query = "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"-lms={SAMPLED_MS}"
        self._tool = None if tool is None else subprocess.Popen([tool, *query], stdout=subprocess.PIPE, text=True)

    def share(self) -> float | None:
        """The mean share of the busiest, leaving out the samples in which nothing ran."""
        if self._tool is None:
            return None
        self._tool.terminate()
        said, _ = self._tool.communicate()
        busy = [int(share) / 100 for share in said.split() if share.isdigit() and share != "0"]
        return sum(busy) / len(busy) if busy else None
