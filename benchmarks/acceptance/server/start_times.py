"""Time to import, to start serving, and to answer one request alone."""

import subprocess
import sys
import time
from pathlib import Path
from timeit import timeit

import numpy as np

from benchmarks.acceptance.train.training_run import trained
from penstock.bench.load.generator import Load, measure
from penstock.bench.load.golden_target import golden_target
from penstock.bench.server_process import model_stats, running_server
from penstock.client.client import Client
from penstock.core.bundles.bundle import read_bundle
from penstock.core.errors import BenchError

IMPORTS = 15
STARTS = 5
LOAD_S = 2.0
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
    golden = read_bundle(bundle).golden
    start = time.perf_counter()
    with running_server(bundle, OPTIONS) as server, Client(server.url) as client:
        answer = client.predict("digits", golden.inputs[0])
        seconds = time.perf_counter() - start
    if not np.abs(answer - golden.outputs[0]).max() <= golden.tolerance:
        raise BenchError("the first request was answered wrongly.")
    return seconds


def _overhead_ms(bundle: Path) -> float:
    with running_server(bundle, OPTIONS) as server:
        before = _compute(server.url)
        alone = measure(golden_target(server.url, bundle), Load(rate=None, connections=1, seconds=LOAD_S))
        after = _compute(server.url)
        return alone.percentile_ms(50) - (after[1] - before[1]) / (after[0] - before[0]) / 1e6


def _compute(url: str) -> tuple[int, int]:
    compute = model_stats(url, "digits")["inference_stats"]["compute_infer"]
    return compute["count"], compute["ns"]


def _seconds(code: str) -> float:
    return timeit(lambda: subprocess.run([sys.executable, "-c", code], check=True), number=1)
