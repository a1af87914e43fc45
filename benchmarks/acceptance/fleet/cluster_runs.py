"""The same training on our launcher, torchrun, Slurm, Spark and Ray: its hash, its pace, and kills."""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.acceptance.fleet.clusters import CLUSTERS, Cluster, cluster, ranks_of
from benchmarks.acceptance.report.results import ROOT
from penstock.core.errors import BenchError

RANKS = 2
LIMIT_S = 600.0
KILLS = 10
RATE_RUNS, RATE_STEPS = 3, 400
# What is killed: a training process, the engine's process that holds it, a node with all that runs there.
RANK, EXECUTOR, HOST = "rank", "executor", "host"
TARGETS = (RANK, EXECUTOR, HOST)
COMMON = ("--set=execution.threads=1", "--timeout-s=120")
APPLICATION = '''"""A small network, slow enough to be killed."""

import time

import numpy as np
import torch
from torch import nn

from penstock import Application, Recipe, TensorSpec
from penstock.train.recipe import ArraySet, CheckpointPolicy, Data


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 8)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
    return Data(train=ArraySet(inputs=x[:120], targets=y[:120]), validation=ArraySet(inputs=x[120:], targets=y[120:]))


def slowed(x, y, generator):
    time.sleep(0.05)
    return x + 0.1 * torch.randn(x.shape, generator=generator), y


app = Application(
    name="on-a-cluster",
    input=TensorSpec(dtype="float32", shape=(8,), meaning="eight numbers"),
    output=TensorSpec(dtype="float32", shape=(2,), meaning="two logits", name="logits"),
    model=lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2)),
    recipe=Recipe(
        data=data,
        loss=nn.functional.cross_entropy,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9),
        augment=slowed,
        batch_size=30,
        steps=120,
        checkpoints=CheckpointPolicy(every_steps=10),
    ),
)
'''


def same_hash() -> list[float]:
    """Return the share of engines whose run ends with the parameter hash of our own launcher.

    Raises:
        BenchError: An engine is not installed, or a run failed.
    """
    with TemporaryDirectory(prefix="penstock-runs-") as at:
        folder = Path(at)
        application = write_application(folder)
        wanted = hash_of(by_launcher(application, folder / "launcher"))
        found = [hash_of(by_torchrun(application, folder / "torchrun"))]
        for name in CLUSTERS:
            with cluster(name) as running:
                found.append(hash_of(on_cluster(running, application, folder / name)))
    return [statistics.mean(each == wanted for each in [wanted, *found])]


def step_rate() -> list[float]:
    """Return the steps a second under Spark over those of our own launcher, for each pair of runs.

    Raises:
        BenchError: Spark is not installed, or a run failed.
    """
    rates: list[float] = []
    steps = f"--set=steps={RATE_STEPS}"
    with TemporaryDirectory(prefix="penstock-runs-") as at, cluster("spark") as running:
        for number in range(RATE_RUNS):
            ours = by_launcher("digits", Path(at) / f"launcher-{number}", steps)
            under = on_cluster(running, "digits", Path(at) / f"spark-{number}", steps)
            if hash_of(ours) != hash_of(under):
                raise BenchError("the runs under Spark and our launcher end with other weights.")
            rates.append(read_run(under)["samples_per_s"] / read_run(ours)["samples_per_s"])
    return rates


def kills_same_hash(kills: int = KILLS) -> list[float]:
    """Return the share of killed runs that end with the hash of an undisturbed one, by engine and target in turn.

    Raises:
        BenchError: An engine is not installed, or a run could not be disturbed.
    """
    drills = [(name, target) for target in TARGETS for name in CLUSTERS]
    with TemporaryDirectory(prefix="penstock-runs-") as at:
        folder = Path(at)
        application = write_application(folder)
        wanted = hash_of(by_launcher(application, folder / "undisturbed"))
        same: list[bool] = []
        for name in CLUSTERS:
            with cluster(name) as running:
                for number in range(kills):
                    of, target = drills[number % len(drills)]
                    if of == name:
                        run = killed_run(running, application, folder / f"{name}-{number}", target)
                        same.append(hash_of(run) == wanted)
    return [statistics.mean(same)]


def write_application(folder: Path) -> str:
    """Write the application of these runs; return its reference."""
    file = folder / "app.py"
    file.write_text(APPLICATION)
    return str(file)


def by_launcher(application: str, run: Path, *options: str) -> Path:
    """Train by our own launcher; return the run."""
    finished([sys.executable, "-m", "penstock", *arguments(application, run, *options), f"--processes={RANKS}"], {})
    return run


def by_torchrun(application: str, run: Path) -> Path:
    """Train by torchrun; return the run."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone"]
    finished([*torchrun, "-m", "penstock", *arguments(application, run), "--device=cpu"], {})
    return run


def on_cluster(running: Cluster, application: str, run: Path, *options: str) -> Path:
    """Train on a cluster; return the run."""
    finished(cluster_command(running, application, run, *options), running.environment)
    return run


def killed_run(running: Cluster, application: str, run: Path, target: str) -> Path:
    """Train on a cluster, and kill something after the first checkpoint; return the run.

    Args:
        running: The cluster.
        application: The application.
        run: The folder of the run.
        target: What is killed: `RANK`, `EXECUTOR` or `HOST`.

    Raises:
        BenchError: The run ended before it could be disturbed, did not begin again, or failed.
    """
    process = started(cluster_command(running, application, run), running.environment)
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while not list(run.glob("checkpoints/step-*")):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise BenchError(f"the run ended before it was killed: {process.communicate()[1][-500:]}")
            time.sleep(0.05)
        time.sleep(random.uniform(0, 1))
        kill(running, run, target)
        out, said = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    if process.returncode != 0 or len(list((run / ".attempts").glob("0*"))) < 2:
        raise BenchError(f"after the kill of a {target} the run did not begin again and end: {out[-300:]}{said[-300:]}")
    return run


def kill(running: Cluster, run: Path, target: str) -> None:
    """Kill a part of a run with SIGKILL.

    Raises:
        BenchError: There is no such part.
    """
    if target == HOST:
        running.kill_node(1)
        return
    found = ranks_of(run) if target == RANK else running.executors()
    if not found:
        raise BenchError(f"there is no {target} to kill.")
    with suppress(ProcessLookupError):
        os.kill(random.choice(found), signal.SIGKILL)


def cluster_command(running: Cluster, application: str, run: Path, *options: str, ranks: int = RANKS) -> Sequence[str]:
    """Return the command that trains on a cluster."""
    given = arguments(application, run, *options)
    return [str(running.python), "-m", "penstock", *given, f"--processes={ranks}", "--on", running.on]


def arguments(application: str, run: Path, *options: str) -> Sequence[str]:
    """Return the arguments that all ways have in common."""
    return ["train", application, "--out", str(run), *COMMON, *options]


def started(command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    """Start a command."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a command to its end; return what it printed.

    Raises:
        BenchError: It failed.
    """
    with started(command, environment) as process:
        try:
            out, said = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    if process.returncode:
        raise BenchError(f"a run failed: {said[-500:]}")
    return out


def read_run(run: Path) -> dict[str, Any]:
    """Return the run.json of a run."""
    return json.loads((run / "run.json").read_text())


def hash_of(run: Path) -> str:
    """Return the hash of the last weights of a run."""
    return read_run(run)["parameter_hash"]
