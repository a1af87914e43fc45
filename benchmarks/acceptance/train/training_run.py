"""`penstock train` of an application as a user runs it, for what is measured of the trained network."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

from penstock.core.errors import BenchError

SEEDS = (0, 1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """A run that finished.

    Args:
        bundle: Its bundle's folder.
        fields: Its run.json.
    """

    bundle: Path
    fields: dict[str, Any]


@contextmanager
def trained(application: str, *options: str, limit_cpu_s: float | None = None) -> Generator[FinishedRun]:
    """Train an application in a process of its own; its folder exists until the block ends.

    Args:
        application: Its name or file.
        options: More options of `penstock train`.
        limit_cpu_s: The most user and system seconds that it may take. CPU time is not inflated by other work.

    Raises:
        BenchError: The run failed, did not finish, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        before = getrusage(RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "penstock", "train", application, *options, "--out", str(run)]
        if (status := subprocess.run(command, stdout=sys.stderr, check=False).returncode) != 0:
            raise BenchError(f"{' '.join(command[2:])} ended with status {status}; see its message above.")
        after = getrusage(RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        fields = json.loads((run / "run.json").read_text())
        if fields["state"] != "finished" or (limit_cpu_s is not None and cpu_s > limit_cpu_s):
            limit = "" if limit_cpu_s is None else f" within {limit_cpu_s:g} s"
            raise BenchError(
                f"{' '.join(command[2:])} is {fields['state']} after {cpu_s:.0f} CPU seconds; it must finish{limit}."
            )
        yield FinishedRun(bundle=run / "bundle", fields=fields)
