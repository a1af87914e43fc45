"""Goodput of texts of many lengths on one core, beside the same server with every text padded to 512 tokens."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.models import text
from penstock import Bundle
from penstock.bench.load.generator import Load, LoadResult, measure
from penstock.bench.load.golden_target import golden_target
from penstock.bench.server_process import running_server
from penstock.core.application import Application
from penstock.core.errors import BenchError
from penstock.core.find_application import find_application
from penstock.core.spec import Array

BUDGET_MS = 50
# No deadline counts for padded texts: one of them may take longer than the budget.
PADDED_MS = 5000
EXAMPLES = 64
SECONDS = 8.0
# Offered load over the rate of the closed loop; the best goodput counts. The closed loop itself does not: it sends
# another text for each that is rejected, so that the short ones that are answered are many more than in a load.
LOADS = (0.6, 0.9, 1.3)
CONNECTIONS = 64


def vs_padded() -> list[float]:
    """Return the goodput at 50 ms over the rate of the same server with padded texts, which has all the time it wants.

    Raises:
        BenchError: The machine has one core only, or an answer was wrong.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchError("this machine has one core; the server needs one, and the load generator another.")
    server, sender = frozenset(cores[:1]), frozenset(cores[1:])
    with tempfile.TemporaryDirectory() as folder:
        ours = _measured(text.app, text.texts, Path(folder) / "text", BUDGET_MS, server, sender)
        goodput = max(result.goodput(BUDGET_MS) for result in ours)
        padded = _measured(text.padded, text.padded_texts, Path(folder) / "padded", PADDED_MS, server, sender)
        return [float(goodput / max(result.answered_a_second for result in padded))]


def _measured(
    application: Application,
    texts: Callable[[int], list[dict[str, Array]]],
    folder: Path,
    latency_ms: int,
    server: frozenset[int],
    sender: frozenset[int],
) -> list[LoadResult]:
    found = find_application(f"{text.__file__}:{'app' if application is text.app else application.name}")
    torch.manual_seed(0)
    Bundle.write(found, found.model(), texts(EXAMPLES), to=folder)
    options = ("--frontends", "0", "--latency-ms", str(latency_ms))
    with running_server(folder, options, cpus=server) as running:
        target = golden_target(running.url, folder)
        load = Load(rate=None, connections=8, seconds=SECONDS, cpus=sender)
        closed = measure(target, load)
        rates = [closed.answered_a_second * share for share in LOADS]
        return [measure(target, replace(load, rate=rate, connections=CONNECTIONS)) for rate in rates]
