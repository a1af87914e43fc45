"""Folders that take seconds to make, shared by all workers of a run."""

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Make a folder once a run of the tests. Tests must not change it.

    Args:
        factory: Of the process.
        name: Of the folder.
        make: Fills the folder, in the first process; the others wait.
    """
    place = factory.getbasetemp()
    # Each worker of pytest-xdist has a folder below that of the run.
    folder = (place.parent if place.name.startswith("popen-") else place) / name
    done = folder.with_suffix(".done")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
