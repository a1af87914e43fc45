"""Each row once, though the process that scores is killed: on one machine, and executors and driver on Spark."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow.parquet as pq

from benchmarks.acceptance.fleet.cluster_runs import finished, started
from benchmarks.acceptance.fleet.clusters import Cluster, cluster
from benchmarks.acceptance.score.null_network import rows, write_bundle, write_rows
from penstock.core.errors import BenchError

KILLS, UNITS, ROWS = 20, 400, 500
# A kill comes after so many more parts at most, so that the runs together do not end too early.
PARTS = 8
# On Spark units are smaller, and there are more of them: one executor goes on while another one is started again.
SPARK_UNITS, SPARK_ROWS, PROCESSES = 3_000, 20, 2
LIMIT_S = 600.0


def _command(root: Path, source: str, to: Path, *options: str, python: object = None) -> list[str]:
    given = ["score", root / "bundle", root / source, "--out", to, "--threads", 1, "--cache", root / "cache", *options]
    return [str(python or sys.executable), "-m", "penstock", *map(str, given)]


def _parts(to: Path) -> int:
    return len(list(to.glob("*.parquet")))


def exactly_once() -> list[float]:
    """Rows that are missing, there twice or different after the kills.

    Raises:
        BenchError: Spark is not installed, a run ended before it was killed, or failed.
    """
    chance = random.Random(1)
    with TemporaryDirectory(prefix="penstock-score-") as folder:
        root = Path(folder)
        write_bundle(root / "bundle")
        return [float(max(_on_one_machine(root, chance), _on_spark(root, chance)))]


def _on_one_machine(root: Path, chance: random.Random) -> int:
    """Kill the command; return the rows that are wrong."""
    write_rows(root / "in" / "a.parquet", rows(UNITS * ROWS), ROWS)
    out = root / "out"
    command = _command(root, "in", out, "--device=cpu")
    for _ in range(KILLS):
        wanted = _parts(out) + chance.randint(0, PARTS)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and (not out.exists() or _parts(out) < wanted):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.005))
        if process.poll() is not None:
            raise BenchError("a run ended before it was killed; give it more units.")
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return _wrong(root, "in", out, UNITS, ROWS)


def _on_spark(root: Path, chance: random.Random) -> int:
    """Kill an executor and then the driver, in turn; return the rows that are wrong."""
    write_rows(root / "spark-in" / "a.parquet", rows(SPARK_UNITS * SPARK_ROWS), SPARK_ROWS)
    out = root / "spark-out"
    with cluster("spark") as running:
        options = ("--on", running.on, f"--processes={PROCESSES}")
        command = _command(root, "spark-in", out, *options, python=running.python)
        for _ in range(KILLS // 2):
            _killed_twice(running, command, out, chance)
        finished(command, running.environment)
    return _wrong(root, "spark-in", out, SPARK_UNITS, SPARK_ROWS)


def _killed_twice(running: Cluster, command: Sequence[str], out: Path, chance: random.Random) -> None:
    """Start the command, kill one of its executors at its work, and once the others have got on, itself."""
    with started(command, running.environment) as process:
        try:
            _get_on(out, process, chance)
            _until(lambda: len(running.executors()) == PROCESSES, process)
            executors = set(running.executors())
            with suppress(ProcessLookupError):
                os.kill(chance.choice(sorted(executors)), signal.SIGKILL)
            # Spark starts another executor, which scores too.
            _until(lambda: bool(set(running.executors()) - executors), process)
            _get_on(out, process, chance)
            if process.poll() is not None:
                raise BenchError("a run ended before it was killed; give it more units.")
        finally:
            process.kill()


def _get_on(out: Path, process: "subprocess.Popen[str]", chance: random.Random) -> None:
    """Wait until a run has written some more parts, and a little longer."""
    wanted = _parts(out) + chance.randint(1, PARTS)
    _until(lambda: _parts(out) >= wanted, process)
    time.sleep(chance.uniform(0, 0.05))


def _until(is_so: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            raise BenchError(f"a run ended before it was killed, or hangs: {process.communicate()[1][-500:]}")
        time.sleep(0.005)


def _wrong(root: Path, source: str, out: Path, units: int, rows_each: int) -> int:
    """Count rows that are not, byte for byte, those of a run that was not killed, or not there once."""
    whole = root / f"{source}-whole"
    subprocess.run(_command(root, source, whole, "--device=cpu"), check=True, stdout=subprocess.DEVNULL)
    names = {file.name for to in (out, whole) for file in to.iterdir()}
    differing = [name for name in names if _bytes(out / name) != _bytes(whole / name)]
    counts = np.bincount(pq.read_table(out)["row"].to_numpy(), minlength=units * rows_each)
    return max(rows_each * len(differing), int(np.abs(counts - 1).sum()))


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None
