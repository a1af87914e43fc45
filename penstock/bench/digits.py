"""How well and how fast the digits are learned."""

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from penstock.core.errors import BenchError

SEEDS = (0, 1, 2)


def accuracy() -> list[float]:
    """The held-out accuracy of each seed."""
    return [run["metrics"]["test_accuracy"] for run in _runs()]


def train_seconds() -> list[float]:
    """The training time of each seed, in seconds."""
    return [run["seconds"] for run in _runs()]


def learned_vs_hog() -> list[float]:
    """HOG's error over the learned embedding's, for each seed of the network."""
    from penstock.bench.features import learned_vs_hog as compare

    return compare(SEEDS).ratios


@cache
def _runs() -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            command = [sys.executable, "-m", "penstock", "train", "digits", "--seed", str(seed), "--out", str(run)]
            subprocess.run(command, check=True)
            fields = json.loads((run / "run.json").read_text())
            if fields["state"] != "finished":
                raise BenchError(f"the run of seed {seed} did not finish.")
            runs.append(fields)
    return runs
