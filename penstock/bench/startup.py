"""How long it takes to import, to start serving, and to answer one request alone."""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from penstock.bench.target import golden_target
from penstock.core.errors import BenchError

IMPORTS = 15
STARTS = 5
ALONE = 3000
WIDE_BUDGET_MS = "5000"
_LOADED = "import penstock, sys; sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"


def import_ms() -> list[float]:
    """Milliseconds of `import penstock` above an empty interpreter, pair by pair."""
    if subprocess.run([sys.executable, "-c", _LOADED], check=False).returncode:
        raise BenchError("import penstock loads torch or NumPy.")
    pairs = [(_seconds("import penstock"), _seconds("pass")) for _ in range(IMPORTS + 2)]
    return [(ours - empty) * 1e3 for ours, empty in pairs[2:]]


def start_over_torch() -> list[float]:
    """Seconds from the start of `penstock serve` to its first answer, minus those of `import torch`, pair by pair."""
    with trained_digits() as bundle:
        return [_start_seconds(bundle) - _seconds("import torch") for _ in range(STARTS)]


def idle_overhead_ms() -> list[float]:
    """The p50 of one request alone on an idle server, minus the network's own time in that server."""
    with trained_digits() as bundle:
        return [_overhead_ms(bundle) for _ in range(3)]


@contextmanager
def trained_digits() -> Generator[Path]:
    """A bundle of the digits network, trained for an epoch: what is served does not matter to how fast."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "penstock", "train", "digits", "--epochs", "1", "--out", str(run)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        yield run / "bundle"


@contextmanager
def running_server(bundle: Path) -> Generator[str]:
    """`penstock serve` on a free port; gives its URL."""
    # A wide budget: what is measured is how long things take, and a refusal would be no measurement.
    command = [sys.executable, "-m", "penstock", "serve", str(bundle), "--port", "0", "--latency-ms", WIDE_BUDGET_MS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if "http://" not in said:
                raise BenchError("the server did not start; run 'penstock serve' to see why.")
            yield said.split()[-1].rstrip("/")
        finally:
            process.terminate()


def _start_seconds(bundle: Path) -> float:
    start = time.perf_counter()
    with running_server(bundle) as url:
        _ask_alone(url, bundle, 1)
        return time.perf_counter() - start


def _overhead_ms(bundle: Path) -> float:
    with running_server(bundle) as url:
        _ask_alone(url, bundle, ALONE // 10)
        before = _compute(url)
        whole_ms = _ask_alone(url, bundle, ALONE)
        after = _compute(url)
        return float(np.median(whole_ms)) - (after[1] - before[1]) / (after[0] - before[0]) / 1e6


def _compute(url: str) -> tuple[int, int]:
    import json
    from urllib.request import urlopen

    with urlopen(f"{url}/v2/models/digits/stats") as answer:
        stats = json.loads(answer.read())["model_stats"][0]["inference_stats"]["compute_infer"]
    return stats["count"], stats["ns"]


def _ask_alone(url: str, bundle: Path, count: int) -> list[float]:
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
            if np.abs(given - target.answers[which]).max() > target.tolerance:
                raise BenchError("a request alone was answered wrongly.")
    return times_ms


def _seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start
