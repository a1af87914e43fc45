"""Drills of SIGTERM under full load: every accepted request must reach its client."""

import re
import time
from pathlib import Path
from threading import Timer

from benchmarks.acceptance.train.training_run import trained
from penstock.bench.load.golden_target import golden_target
from penstock.bench.load.sender import SenderJob, run_sender
from penstock.bench.server_process import running_server
from penstock.core.errors import BenchError

DRILLS = 20
CONNECTIONS = 64
LOAD_S = 1.0
DRAIN_LIMIT_S = 30.0


def lost() -> list[float]:
    """Return the accepted requests that were lost in each of 20 drills, with one process and with front-ends in turn.

    Raises:
        BenchError: A drill had no load, an answer was wrong, or the server did not end.
    """
    with trained("digits", "--epochs", "1") as run:
        return [float(_drill(run.bundle, frontends=index % 2 * 2)) for index in range(DRILLS)]


def _drill(bundle: Path, *, frontends: int) -> int:
    with running_server(bundle, ["--verbose", "--latency-ms", "1000", "--frontends", str(frontends)]) as server:
        start_s = time.monotonic()
        job = SenderJob(
            target=golden_target(server.url, bundle),
            due_s=None,
            start_s=start_s,
            measured_from_s=start_s,
            # Beyond the signal: the clients send until the server closes their connections.
            end_s=start_s + 2 * LOAD_S,
            connections=CONNECTIONS,
            stragglers_s=DRAIN_LIMIT_S,
            cpus=None,
        )
        Timer(LOAD_S, server.process.terminate).start()
        clients = run_sender(job)
        if server.process.wait(DRAIN_LIMIT_S) != 0:
            raise BenchError(f"the server ended with status {server.process.returncode}.")
        drained = sum(map(int, re.findall(r"drained; (\d+) requests", server.log_text())))
    answered = len(clients.latency_s)
    if answered < CONNECTIONS or clients.wrong:
        raise BenchError(f"the drill had no load: {answered} answers, {clients.wrong} of them wrong.")
    return drained - answered
