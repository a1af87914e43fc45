"""How long `make demo` takes in a fresh clone."""

import subprocess
import tempfile
import time

from penstock.bench.results import ROOT
from penstock.core.errors import BenchError


def seconds() -> list[float]:
    """Seconds of `make demo` in a fresh clone of what is committed, without a terminal."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), f"{folder}/clone"], check=True)
        start = time.perf_counter()
        done = subprocess.run(
            ["make", "demo"],
            cwd=f"{folder}/clone",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        taken_s = time.perf_counter() - start
    if done.returncode:
        raise BenchError(f"make demo ended with status {done.returncode}: {done.stdout[-500:]}")
    return [taken_s]
