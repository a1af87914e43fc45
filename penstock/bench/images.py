"""How well the photographs are known again."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from penstock.core.errors import BenchError

SEEDS = (0, 1, 2)
# How long a training may take on two cores, in seconds of the processor's time of both: others' work does not count.
TRAIN_SECONDS = 300
CORES = 2


def accuracy() -> list[float]:
    """Of each seed the share of held-out views whose likeliest label is the right one, by what is served."""
    return [_of_a_training(seed) for seed in SEEDS]


def held_out_accuracy(bundle: Path) -> float:
    """The share of the held-out views that a bundle knows, by what serves it.

    Args:
        bundle: The folder.
    """
    from penstock.apps.images.photographs import tested_on
    from penstock.runtime.load import load

    test = tested_on()
    found = load(bundle).predict(test.inputs.astype("float32")).argmax(1)
    return float((found == test.targets).mean())


def _of_a_training(seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "penstock", "train", "images", "--seed", str(seed), "--out", str(run)]
        before = getrusage(RUSAGE_CHILDREN)
        subprocess.run(command, check=True)
        after = getrusage(RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        state = json.loads((run / "run.json").read_text())["state"]
        if state != "finished" or seconds > TRAIN_SECONDS * CORES:
            raise BenchError(
                f"the run of seed {seed} is {state} after {seconds:.0f} s of the processor's time; it must be finished "
                f"within {TRAIN_SECONDS} s of {CORES} cores."
            )
        return held_out_accuracy(run / "bundle")
