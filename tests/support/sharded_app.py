"""A training on shards at any place, whose hash tells whether it had the same examples in the same order."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.acceptance.train.resume import APPLICATION
from benchmarks.apps.interrupted import data
from penstock.train.data.shard_writer import write_parts

# Where the application finds its shards.
PLACE = "SHARDS_OF_THE_TEST"
STEPS = 60
_CHANGES = (
    ("import numpy as np\n", "import os\nimport time\n\nimport numpy as np\n"),
    ("Data(train=ArraySet(inputs=x[:200], targets=y[:200]), ", "Data(train=shards('train'), "),
    ("validation=ArraySet(inputs=x[200:], targets=y[200:]))", "validation=shards('validation'))"),
    ("augment=lambda x, y, generator: (x", "augment=lambda x, y, generator: (time.sleep({step_s}), x)[1:] and (x"),
)
_SHARDS = f"""

def shards(name):
    from penstock.train.data.shards import Shards

    return Shards(f"{{os.environ['{PLACE}']}}/{{name}}")
"""


def write_sharded(folder: Path, step_s: float = 0.0) -> Path:
    """Write the application into a folder, and its shards into `shards` of it, eleven examples in each."""
    write_parts({"train": data().train, "validation": data().validation}, folder / "shards", shard_bytes=11 * 32)
    text = APPLICATION
    for old, new in _CHANGES:
        assert old in text, old
        text = text.replace(old, new.format(step_s=step_s) if "{step_s}" in new else new)
    text += _SHARDS
    (folder / "app.py").write_text(text)
    return folder / "app.py"


def objects(folder: Path) -> Iterator[tuple[str, bytes]]:
    """The files to copy into a bucket, by name: `shards/...`."""
    for file in sorted((folder / "shards").rglob("*.*")):
        yield f"shards/{file.relative_to(folder / 'shards')}", file.read_bytes()


def started_on(
    app: Path, place: object, run: str, environment: Mapping[str, str], *more: str
) -> "subprocess.Popen[str]":
    """Start a training, on shards at a place; its cache is beside the application unless the environment says."""
    given = {"PENSTOCK_CACHE": str(app.parent / "cache"), **environment, PLACE: str(place)}
    command = [sys.executable, "-m", "penstock", "train", str(app), "--out", str(app.parent / run), "--device", "cpu"]
    command += ["--steps", str(STEPS), "--checkpoint-every-steps", "10", *more]
    return subprocess.Popen(command, env=os.environ | given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def trained_on(app: Path, place: object, run: str, environment: Mapping[str, str], *more: str) -> tuple[int, str]:
    """Train; return the exit status and what was said as an error."""
    process = started_on(app, place, run, environment, *more)
    errors = process.communicate(timeout=240)[1]
    return process.returncode, errors


def parameter_hash(app: Path, run: str) -> str:
    """The hash of a run's last weights."""
    return json.loads((app.parent / run / "run.json").read_text())["parameter_hash"]
