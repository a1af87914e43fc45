"""Measurements as data: a JSON line each, which says how to repeat it."""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import BenchError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """What a figure is compared with, measured in the same run.

    Args:
        name: What it is.
        median: Its figure, in the same unit.
        ratio: Ours over its, or its over ours, so that above 1 is better for us.
    """

    name: str
    median: float
    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One measurement.

    Args:
        id: The target that it answers, or None.
        command: The command that repeats it.
        workload: What was measured, in words.
        metric: What the number is.
        unit: Its unit.
        repetitions: How often it was measured.
        median: Of the repetitions.
        p10: Their tenth percentile.
        p90: Their ninetieth percentile.
        peer: What it is compared with, or None.
        commit: The commit that was measured.
        dirty: Whether tracked files differed from it.
        hardware: The machine's models and counts.
        versions: Of the libraries that compute.
        date: When, in UTC.
    """

    id: str | None
    command: str
    workload: str
    metric: str
    unit: str
    repetitions: int
    median: float
    p10: float
    p90: float
    peer: Peer | None
    commit: str
    dirty: bool
    hardware: str
    versions: dict[str, str]
    date: str


def line_of(
    values: Sequence[float],
    *,
    id: str | None,
    workload: str,
    metric: str,
    unit: str,
    command: str | None = None,
    peer: Peer | None = None,
) -> Line:
    """A line of some repetitions, with everything about this machine and commit filled in.

    Args:
        values: The repetitions.
        id: The target that it answers, or None.
        workload: What was measured, in words.
        metric: What the number is.
        unit: Its unit.
        command: The command that repeats it; this process's own by default.
        peer: What it is compared with, or None.
    """
    commit, dirty = _commit()
    return Line(
        id=id,
        command=command or own_command(),
        workload=workload,
        metric=metric,
        unit=unit,
        repetitions=len(values),
        median=float(np.median(values)),
        p10=float(np.percentile(values, 10)),
        p90=float(np.percentile(values, 90)),
        peer=peer,
        commit=commit,
        dirty=dirty,
        hardware=hardware(),
        versions=versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def append(line: Line, name: str) -> Path:
    """Append a line to benchmarks/results/NAME.jsonl."""
    file = RESULTS / f"{name}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as sink:
        sink.write(json.dumps(asdict(line)) + "\n")
    return file


def read(folder: Path = RESULTS) -> list[Line]:
    """Every line of every file, in order.

    Raises:
        BenchError: A line is malformed.
    """
    lines: list[Line] = []
    for file in sorted(folder.glob("*.jsonl")):
        for number, text in enumerate(file.read_text().splitlines(), 1):
            try:
                fields: dict[str, Any] = json.loads(text)
                fields["peer"] = Peer(**fields["peer"]) if fields["peer"] else None
                lines.append(Line(**fields))
            except (ValueError, TypeError, KeyError) as error:
                raise BenchError(f"{file.name}:{number} is not a measurement ({error}); remove or mend it.") from None
    return lines


def own_command() -> str:
    """The command line of this process as a user would type it, without what only says to record."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--record"]
    return shlex.join(["penstock", *arguments])


def hardware() -> str:
    """The models of the processor and of the GPUs, and how many cores this process may use."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in _read("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        platform.processor() or platform.machine(),
    )
    return ", ".join([f"{model}, {len(os.sched_getaffinity(0))} cores", *_gpus()])


def _gpus() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, check=False)
    names = Counter(said.stdout.splitlines() if said.returncode == 0 else [])
    return [f"{count} {name}" for name, count in names.items()]


def versions() -> dict[str, str]:
    """Python's and those of the libraries that compute or carry."""
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "uvloop", "httptools", "penstock"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _commit() -> tuple[str, bool]:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    # Results and pictures are written while one measures; they change nothing that is measured.
    changed = git(
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ".",
        ":!benchmarks/results",
        ":!docs/performance.md",
        ":!docs/assets",
    )
    return git("rev-parse", "HEAD"), bool(changed)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
