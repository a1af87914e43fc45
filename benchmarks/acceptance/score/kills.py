"""Each row once, though the process that scores is killed."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow.parquet as pq

from benchmarks.acceptance.score.null_network import rows, write_bundle, write_rows
from penstock.core.errors import BenchError

KILLS, UNITS, ROWS = 20, 400, 500
# A kill comes after so many more parts at most, so that the runs together do not end too early.
PARTS = 8


def _command(root: Path, to: Path) -> list[str]:
    options = ["--device", "cpu", "--cache", str(root / "cache"), "--threads", "1"]
    return [
        sys.executable,
        "-m",
        "penstock",
        "score",
        str(root / "bundle"),
        str(root / "in"),
        "--out",
        str(to),
        *options,
    ]


def _parts(to: Path) -> int:
    return len(list(to.glob("*.parquet")))


def exactly_once() -> list[float]:
    """Rows that are missing, there twice or different after the kills."""
    chance = random.Random(1)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        write_bundle(root / "bundle")
        write_rows(root / "in" / "a.parquet", rows(UNITS * ROWS), ROWS)
        subprocess.run(_command(root, root / "whole"), check=True, stdout=subprocess.DEVNULL)
        out = root / "out"
        for _ in range(KILLS):
            wanted = _parts(out) + chance.randint(0, PARTS)
            process = subprocess.Popen(_command(root, out), stdout=subprocess.DEVNULL)
            while process.poll() is None and (not out.exists() or _parts(out) < wanted):
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.005))
            if process.poll() is not None:
                raise BenchError("a run ended before it was killed; give it more units.")
            process.send_signal(signal.SIGKILL)
            process.wait()
        subprocess.run(_command(root, out), check=True, stdout=subprocess.DEVNULL)
        names = {file.name for to in (out, root / "whole") for file in to.iterdir()}
        differing = [name for name in names if _bytes(out / name) != _bytes(root / "whole" / name)]
        wrong = ROWS * len(differing)
        found = np.sort(pq.read_table(out)["row"].to_numpy())
        counts = np.bincount(found, minlength=UNITS * ROWS)
        return [float(max(wrong, int(np.abs(counts - 1).sum())))]


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.exists() else None
