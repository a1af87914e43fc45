"""A server process for a measurement, and the processors, GPU and batches that it used meanwhile."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final
from urllib.parse import urlsplit

from penstock.bench.process_usage import worker_pids
from penstock.core.errors import BenchError
from penstock.core.machine.process_stat import cpu_seconds

STOP_TIMEOUT_S = 20.0
STATS_TIMEOUT_S = 10.0
GPU_SAMPLE_MS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerUsage:
    """Resources that a server used between two moments.

    Args:
        cores: Busy processors by process role.
        gpu: Share of the time in which the GPUs that were used had work, from the driver; None where there is none.
        queue_ms: Mean time from a chunk's arrival to the start of its batch.
        compute_ms: Mean time of a chunk's batch.
        batch_rows: Mean rows a batch.
    """

    cores: dict[str, float]
    gpu: float | None
    queue_ms: float
    compute_ms: float
    batch_rows: float

    @property
    def description(self) -> str:
        """One sentence."""
        cores = ", ".join(f"{role} {share:.2f}" for role, share in sorted(self.cores.items()))
        gpu = "" if self.gpu is None else f"GPU busy {self.gpu:.0%}; "
        return (
            f"{gpu}mean batch {self.batch_rows:.0f} rows, a chunk waits {self.queue_ms:.2f} ms for it and is "
            f"{self.compute_ms:.2f} ms in it; processors: {cores}"
        )


@final
class ServerProcess:
    """A running server.

    Args:
        url: Its address.
        name: Name of the model that it serves.
        process: Its supervisor; None if it was not started here.
        grpc: The address of its gRPC service, where streams use that.
        log: Its standard error, where it was started here.

    Attributes:
        stream_address: The address for streams.
    """

    def __init__(
        self,
        url: str,
        name: str,
        process: subprocess.Popen[str] | None = None,
        grpc: str | None = None,
        log: Any = None,
    ) -> None:
        self.url = url
        self.stream_address = grpc or url
        self._name = name
        self._process = process
        self._log = log
        self._gpu: _GpuSampler | None = None
        self._start: tuple[float, dict[str, float], tuple[int, int, int, int]] | None = None

    @property
    def process(self) -> subprocess.Popen[str]:
        """The process that was started here."""
        assert self._process is not None, self.url
        return self._process

    def log_text(self) -> str:
        """Return what the server has logged so far."""
        self._log.seek(0)
        return self._log.read()

    def start_sampling(self) -> None:
        """Begin an interval for `usage`."""
        self._gpu = _GpuSampler()
        self._start = time.monotonic(), self._cpu_s(), self._stats()

    def usage(self) -> ServerUsage:
        """Return the resources used since `start_sampling`."""
        assert self._start is not None
        start_s, cpu_before_s, before = self._start
        seconds = time.monotonic() - start_s
        cpu_s, stats = self._cpu_s(), self._stats()
        chunks, batches, queue_ns, compute_ns = (after - earlier for after, earlier in zip(stats, before, strict=True))
        return ServerUsage(
            cores={role: (used - cpu_before_s.get(role, 0.0)) / seconds for role, used in cpu_s.items()},
            gpu=None if self._gpu is None else self._gpu.busy_share(),
            queue_ms=queue_ns / max(1, chunks) / 1e6,
            compute_ms=compute_ns / max(1, chunks) / 1e6,
            batch_rows=chunks / max(1, batches),
        )

    def _stats(self) -> tuple[int, int, int, int]:
        """Chunks, batches, and the nanoseconds in the queue and in batches, summed over chunks."""
        stats = model_stats(self.url, self._name)
        spent = stats["inference_stats"]
        return stats["inference_count"], stats["execution_count"], spent["queue"]["ns"], spent["compute_infer"]["ns"]

    def _cpu_s(self) -> dict[str, float]:
        if self._process is None:
            return {}
        pids = {"server": self._process.pid} | worker_pids(self._process.pid)
        return {role: cpu_seconds(pid) for role, pid in pids.items()}


@contextmanager
def running_server(
    bundle: Path | None,
    options: Sequence[str] = (),
    *,
    cpus: frozenset[int] | None = None,
    grpc: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Generator[ServerProcess]:
    """Run `penstock serve` on a free port until the block ends; end every process of it then.

    Args:
        bundle: The bundle's folder; None where the options name the models.
        options: More options of `penstock serve`.
        cpus: The cores on which the server runs; None for any.
        grpc: Serve gRPC too, and use it for streams.
        environment: Variables that are set or replaced.

    Raises:
        BenchError: It did not start.
    """
    bundles = [] if bundle is None else [str(bundle)]
    command = [sys.executable, "-m", "penstock", "serve", *bundles, "--port", "0", *options]
    if grpc:
        command += ["--grpc-port", "0"]
    with (
        ended_by_sigterm(),
        tempfile.TemporaryFile("w+") as log,
        _start(command, log, cpus, environment or {}) as process,
    ):
        try:
            yield _announced(process, log, grpc=grpc)
        finally:
            _stop(process)


@contextmanager
def ended_by_sigterm() -> Generator[None]:
    """Let SIGTERM, as `timeout` sends it, end the block as Ctrl-C does, so that what it started ends too.

    In the main thread, where nobody else handles the signal.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def model_stats(url: str, name: str) -> dict[str, Any]:
    """Return a model's statistics of the Open Inference Protocol."""
    with urllib.request.urlopen(f"{url}/v2/models/{name}/stats", timeout=STATS_TIMEOUT_S) as answer:
        return json.load(answer)["model_stats"][0]


def _start(
    command: list[str], log: Any, cpus: frozenset[int] | None, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    own_cpus = os.sched_getaffinity(0)
    # A child inherits the affinity.
    os.sched_setaffinity(0, cpus or own_cpus)
    try:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    finally:
        os.sched_setaffinity(0, own_cpus)


def _announced(process: subprocess.Popen[str], log: Any, *, grpc: bool) -> ServerProcess:
    """Wait for the lines in which the server announces its addresses."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if "http://" not in line:
        log.seek(0)
        raise BenchError(f"the server did not start: {' '.join(log.read().split())[-300:]}")
    url, name = line.split()[-1].rstrip("/"), line.split()[1]
    address = f"{urlsplit(url).hostname}:{process.stdout.readline().split()[-1]}" if grpc else None
    return ServerProcess(url, name, process, address, log)


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    finally:
        # A worker that hangs outlives the supervisor, which leads the group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@final
class _GpuSampler:
    """The driver's samples of GPU utilization until `busy_share`."""

    def __init__(self) -> None:
        tool = shutil.which("nvidia-smi")
        query = "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits", f"-lms={GPU_SAMPLE_MS}"
        self._tool = None if tool is None else subprocess.Popen([tool, *query], stdout=subprocess.PIPE, text=True)

    def busy_share(self) -> float | None:
        """Return the mean utilization of the GPUs that had work at any time; 0 if none had."""
        if self._tool is None:
            return None
        self._tool.terminate()
        output, _ = self._tool.communicate()
        samples: dict[str, list[float]] = defaultdict(list)
        for line in output.splitlines():
            gpu, _, percent = line.partition(", ")
            if percent.isdigit():
                samples[gpu].append(int(percent) / 100)
        used = [share for shares in samples.values() if any(shares) for share in shares]
        if not samples:
            return None
        return sum(used) / len(used) if used else 0.0
