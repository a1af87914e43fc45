"""How well the keywords are heard in a stream."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from penstock.core.errors import BenchError

SEEDS = (0, 1, 2)
# How long a training may take. Of the processor's time, which is what a training of one thread takes on a machine that
# does nothing else, and which does not count others' work.
TRAIN_SECONDS = 300
ROWS = 64


def word_error() -> list[float]:
    """The word error of each seed on the test voices, streamed in chunks of 80 ms."""
    return [_of_a_training(seed) for seed in SEEDS]


def streamed_word_error(bundle: Path) -> float:
    """The word error of a bundle on the test voices, by what serves it.

    Args:
        bundle: The folder.
    """
    import torch

    from penstock.apps.keywords.recipe import keywords, word_error
    from penstock.runtime.load import load, streaming_executor
    from penstock.runtime.streamed import streamed
    from penstock.train.examples import ArraySet

    predictor = load(bundle)
    executor = streaming_executor(predictor.application, predictor.module, slots=ROWS, max_rows=ROWS)
    test = keywords().test
    assert isinstance(test, ArraySet)
    return word_error(torch.from_numpy(streamed(executor, test.inputs)), torch.from_numpy(test.targets))


def _of_a_training(seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "penstock", "train", "keywords", "--seed", str(seed), "--out", str(run)]
        before = getrusage(RUSAGE_CHILDREN)
        subprocess.run(command, check=True)
        after = getrusage(RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        state = json.loads((run / "run.json").read_text())["state"]
        if state != "finished" or seconds > TRAIN_SECONDS:
            raise BenchError(
                f"the run of seed {seed} is {state} after {seconds:.0f} s of the processor's time; it must be finished "
                f"within {TRAIN_SECONDS} s."
            )
        return streamed_word_error(run / "bundle")
