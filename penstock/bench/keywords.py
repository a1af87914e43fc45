"""How well the keywords are heard in a stream."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from penstock.core.errors import BenchError

SEEDS = (0, 1, 2)
# How long a training may take, on the two cores that the target speaks of.
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

    predictor = load(bundle)
    executor = streaming_executor(predictor.application, predictor.module, slots=ROWS, max_rows=ROWS)
    test = keywords().test
    assert test is not None
    return word_error(torch.from_numpy(streamed(executor, test.inputs)), torch.from_numpy(test.targets))


def _of_a_training(seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "penstock", "train", "keywords", "--seed", str(seed), "--out", str(run)]
        subprocess.run(command, check=True)
        fields = json.loads((run / "run.json").read_text())
        if fields["state"] != "finished" or fields["seconds"] > TRAIN_SECONDS:
            raise BenchError(
                f"the run of seed {seed} is {fields['state']} after {fields['seconds']:.0f} s; it must be finished "
                f"within {TRAIN_SECONDS} s, on a machine that does nothing else."
            )
        return streamed_word_error(run / "bundle")
