"""Wall time of the commands that people run first: `make demo` and `make test`."""

import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.acceptance.report.results import ROOT
from penstock.core.errors import BenchError


def demo_seconds() -> list[float]:
    """Return the seconds of `make demo` in a fresh clone of the last commit, without a terminal."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), f"{folder}/clone"], check=True)
        return [make_seconds("demo", Path(folder) / "clone")]


def test_seconds() -> list[float]:
    """Return the seconds of `make test` in this tree, with its environment set up before."""
    make_seconds("setup", ROOT)
    return [make_seconds("test", ROOT)]


def make_seconds(target: str, folder: Path) -> float:
    """Run `make TARGET` in a folder and return its wall time.

    Raises:
        BenchError: It failed; the end of its output is in the message.
    """
    start = time.perf_counter()
    done = subprocess.run(
        ["make", target], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise BenchError(f"make {target} ended with status {done.returncode}: {done.stdout[-500:]}")
    return seconds
