"""Parameter hashes of runs that are killed at a random moment and resumed."""

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.acceptance.report.results import ROOT
from penstock.core.errors import BenchError

KILLS = 20
STEPS = 600
SEED = 0

APPLICATION = (ROOT / "benchmarks" / "apps" / "interrupted.py").read_text()


def same_hash() -> list[float]:
    """Return 1 for each killed and resumed run with the hash of an uninterrupted run, 0 for each other."""
    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "app.py").write_text(APPLICATION)
        uninterrupted = _hash_of(_start(folder, "uninterrupted"), folder / "uninterrupted")
        return [float(_killed_hash(folder, f"killed-{index}", rng) == uninterrupted) for index in range(KILLS)]


def _killed_hash(folder: Path, name: str, rng: random.Random) -> str:
    run = folder / name
    process = _start(folder, name)
    # Any moment after the first checkpoint: in a step, in a validation, in the write of a checkpoint.
    while not list(run.glob("checkpoints/step-*")):
        if process.poll() is not None:
            raise BenchError(f"the training ended with status {process.returncode} before its first checkpoint.")
        time.sleep(0.005)
    time.sleep(rng.uniform(0.0, 0.5))
    process.send_signal(signal.SIGKILL)
    process.wait()
    if (run / "bundle").exists():
        raise BenchError("the run finished before it was killed; raise STEPS.")
    return _hash_of(_penstock("train", "--resume", str(run)), run)


def _start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    steps = ("--steps", str(STEPS), "--checkpoint-every-steps", "25")
    return _penstock("train", str(folder / "app.py"), "--out", str(folder / name), *steps)


def _penstock(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "penstock", *arguments], stdout=subprocess.DEVNULL)


def _hash_of(process: subprocess.Popen[bytes], run: Path) -> str:
    if process.wait():
        raise BenchError(f"the training ended with status {process.returncode}; run it by hand to see why.")
    return json.loads((run / "run.json").read_text())["parameter_hash"]
