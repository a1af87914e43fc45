"""Waits of the steps of ResNet-50 for JPEG photographs, trained by `penstock train` as a user runs it."""

import os
import tempfile
from pathlib import Path

from benchmarks.acceptance.report.results import ROOT
from benchmarks.acceptance.train.photographs import write_folder
from benchmarks.acceptance.train.training_run import trained
from penstock.core.errors import BenchError
from penstock.train.report.run_log import read_metrics

PICTURES = 4096
APPLICATION = ROOT / "benchmarks" / "apps" / "photographs.py"
# Intervals between validations that are left out: compiling, capturing, the first reading.
WARM = 2


def waited_shares() -> list[float]:
    """Return the share of the time between two validations in which the steps waited for examples.

    Raises:
        BenchError: The run failed, or its device is not a GPU.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-photographs-") as name:
        write_folder(Path(name), PICTURES)
        os.environ["PHOTOGRAPHS"] = name
        with trained(str(APPLICATION), "--gpus", "1") as run:
            records = read_metrics(run.bundle.parent)
    steps = [
        ((later["seconds"] - before["seconds"]), (later["waited_s"] - before["waited_s"]))
        for before, later in zip(records[WARM:-1], records[WARM + 1 :], strict=True)
    ]
    if len(steps) < 3:
        raise BenchError(f"the run was validated {len(records)} times, too few for a figure.")
    return [waited_s / seconds for seconds, waited_s in steps]
