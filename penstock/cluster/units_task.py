"""The scoring of units in the engine's process on a machine of the cluster, which keeps the network between tasks."""

import gc
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cluster.job import UNITS, ClusterJob, unpack_sources
from penstock.core.errors import DeviceLost, EngineLost, PenstockError, StorageError
from penstock.core.source_files.find_application import reference_parts

if TYPE_CHECKING:
    from penstock.score.shared_run import UnitScorer

# What may go well at another time, or on another machine: the engine runs the task again.
PASSING = (StorageError, DeviceLost, EngineLost)
_PASSED = re.compile(rf"penstock\.core\.errors\.(?:{'|'.join(each.__name__ for each in PASSING)}): ([^\n]+)")
# Beside the record: why a process ended itself.
ENDED = "ended.txt"
EXIT_ENDED = 70
OTHER_COMMAND = "another command scores into the same folder, so this one has ended."
# Of a process that is kept, with what it has loaded.
_unpacked: list[tempfile.TemporaryDirectory[str]] = []


def score_units(file: Path, units: Sequence[int]) -> Mapping[str, Any]:
    """Score units of a job whose parts are not there.

    Args:
        file: The record of the job.
        units: Their places in the plan.

    Returns:
        `units`, how many there were, and `error`, the sentence of a failure that would come again; empty without one.

    Raises:
        PenstockError: A failure that may pass, see `PASSING`.
    """
    # Files that came meanwhile change the units and their names: parts of the older plan would be rows given twice.
    if not file.exists():
        return {"units": 0, "error": OTHER_COMMAND}
    try:
        scorer_of(str(file)).score(units)
    except PASSING:
        raise
    except PenstockError as error:
        return {"units": 0, "error": str(error)}
    return {"units": len(units), "error": ""}


def score_units_or_end(file: Path, units: Sequence[int]) -> Mapping[str, Any]:
    """Score units as `score_units` does, but end this process where only a new one can use the GPU again.

    For an engine that runs a task again in the process in which it failed.
    """
    try:
        return score_units(file, units)
    except DeviceLost as error:
        sentence = f"on {socket.gethostname()}: {error}"
        with suppress(OSError):
            file.with_name(ENDED).write_text(sentence)
        sys.stderr.write(f"penstock: {sentence}\n")
        sys.stderr.flush()
        for each in _unpacked:
            each.cleanup()
        os._exit(EXIT_ENDED)


@lru_cache(maxsize=1)
def scorer_of(file: str) -> "UnitScorer":
    """Load the network of a job; it is kept for the next units.

    Raises:
        PenstockError: It cannot be loaded here; the sentence names this machine.
    """
    from penstock.score.shared_run import SharedRun, UnitScorer

    try:
        job, run = ClusterJob.read(Path(file)), SharedRun.read(Path(file).with_name(UNITS))
        folder = tempfile.TemporaryDirectory(prefix="penstock-")
        _unpacked.append(folder)
        copy = unpack_sources(job, Path(file), Path(folder.name))
        name = reference_parts(run.reference)[1] if copy is not None else ""
        application = None if copy is None else f"{copy}:{name}" if name else str(copy)
        scorer = UnitScorer(run, application)
    except PASSING:
        raise
    except PenstockError as error:
        raise type(error)(f"on {socket.gethostname()}: {error}") from error
    # Spark collects garbage after each task, which with torch takes longer than a small unit.
    gc.collect()
    gc.freeze()
    return scorer


def passing_sentence(said: str) -> str:
    """Find the sentence of a failure that did not pass in the text of an engine's error; empty without one."""
    return next(reversed(_PASSED.findall(said)), "")


def ended_sentence(file: Path) -> str:
    """Return why a process of a job ended itself, the last one that did; empty if none did.

    Args:
        file: The record of the job.
    """
    try:
        return file.with_name(ENDED).read_text()
    except OSError:
        return ""


def parts_there(out: str) -> int:
    """Count the parts in an output folder."""
    from penstock.score.files import OutputFolder

    return sum(name.endswith(".parquet") for name in OutputFolder(out).names())
