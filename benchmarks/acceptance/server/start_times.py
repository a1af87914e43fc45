"""Time to import, to start serving, and to answer one request alone."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.acceptance.train.training_run import trained
from penstock.bench.load.golden_target import golden_target
from penstock.bench.server_process import model_stats, running_server
from penstock.core.errors import BenchError

IMPORTS = 15
STARTS = 5
REQUESTS = 3000
# A wide budget, because a rejected request gives no time.
OPTIONS = ("--latency-ms", "5000")
# The time does not depend on how well the network was trained.
SHORT = ("--epochs", "1")
_LOADED = "import penstock, sys; sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"


def import_ms() -> list[float]:
    """Return the milliseconds of `import penstock` above an empty interpreter, pair by pair."""
    if subprocess.run([sys.executable, "-c", _LOADED], check=False).returncode:
        raise BenchError("import penstock loads torch or NumPy.")
    pairs = [(_seconds("import penstock"), _seconds("pass")) for _ in range(IMPORTS + 2)]
    return [(ours - empty) * 1e3 for ours, empty in pairs[2:]]


def start_over_torch() -> list[float]:
    """Return the seconds from starting `penstock serve` to its first answer, minus `import torch`, pair by pair."""
    with trained("digits", *SHORT) as run:
        return [_start_seconds(run.bundle) - _seconds("import torch") for _ in range(STARTS)]


def idle_overhead_ms() -> list[float]:
    """Return the p50 of one request alone on an idle server, minus the network's own time in that server."""
    with trained("digits", *SHORT) as run:
        return [_overhead_ms(run.bundle) for _ in range(3)]


def _start_seconds(bundle: Path) -> float:
    start = time.perf_counter()
    with running_server(bundle, OPTIONS) as server:
        _request_times_ms(server.url, bundle, 1)
        return time.perf_counter() - start


def _overhead_ms(bundle: Path) -> float:
    with running_server(bundle, OPTIONS) as server:
        _request_times_ms(server.url, bundle, REQUESTS // 10)
        before = _compute(server.url)
        times_ms = _request_times_ms(server.url, bundle, REQUESTS)
        after = _compute(server.url)
        return float(np.median(times_ms)) - (after[1] - before[1]) / (after[0] - before[0]) / 1e6


def _compute(url: str) -> tuple[int, int]:
    compute = model_stats(url, "digits")["inference_stats"]["compute_infer"]
    return compute["count"], compute["ns"]


def _request_times_ms(url: str, bundle: Path, count: int) -> list[float]:
    target = golden_target(url, bundle)
    assert target.answers is not None
    times_ms: list[float] = []
    with socket.create_connection((target.host, target.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(count):
            which = number % len(target.requests)
            start = time.perf_counter()
            connection.sendall(target.requests[which])
            answer = connection.recv(65536)
            times_ms.append((time.perf_counter() - start) * 1e3)
            if not answer.startswith(b"HTTP/1.1 200 "):
                raise BenchError(f"a request alone was answered {answer[:60]!r}.")
            given = np.frombuffer(answer.partition(b"\r\n\r\n")[2], target.answers.dtype)
            if not np.abs(given - target.answers[which]).max() <= target.tolerance:
                raise BenchError("a request alone was answered wrongly.")
    return times_ms


def _seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start
