"""A measurement as a line of JSON that says how to repeat it."""

import json
import platform
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from penstock.core.machine.cores import available_cores
from penstock.core.machine.versions import versions_of

_SOURCE = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Another system measured in the same run.

    Args:
        name: Its name.
        median: Its figure, in the same unit.
        ratio: Our figure over its figure, or the inverse, so that above 1 is better for us.
    """

    name: str
    median: float
    ratio: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Repetitions of one figure, and everything that is needed to repeat them.

    Args:
        id: The target that it answers, or None.
        command: The command that repeats it, at `commit`.
        workload: What was measured, in words.
        metric: The meaning of the number.
        unit: Its unit.
        repetitions: Number of repetitions.
        median: Their median.
        p10: Their tenth percentile.
        p90: Their ninetieth percentile.
        peer: The system that it is compared with, or None.
        commit: The commit that was measured; empty outside a git checkout.
        dirty: True if tracked files differed from the commit.
        hardware: Models and counts of processors and GPUs.
        versions: Versions of Python and of the libraries that compute.
        date: Time of the measurement, UTC.
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
    peer: Comparison | None
    commit: str
    dirty: bool
    hardware: str
    versions: dict[str, str]
    date: str


def make_measurement(
    values: Sequence[float],
    *,
    id: str | None = None,
    workload: str,
    metric: str,
    unit: str,
    command: str | None = None,
    peer: Comparison | None = None,
) -> Measurement:
    """Describe some repetitions, with the commit, hardware and versions of this process.

    Args:
        values: The repetitions.
        id: The target that they answer, or None.
        workload: What was measured, in words.
        metric: The meaning of the number.
        unit: Its unit.
        command: The command that repeats it; this process's command by default.
        peer: The system that it is compared with, or None.
    """
    commit, dirty = _commit()
    return Measurement(
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


def append(measurement: Measurement, file: Path) -> None:
    """Append a measurement to a file of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as sink:
        sink.write(json.dumps(asdict(measurement)) + "\n")


def own_command() -> str:
    """Return the command line of this process as a user would type it, without `--record` and its file."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = "penstock" if spec is None else spec.name.removesuffix(".__main__")
    program = ["penstock"] if module == "penstock" else ["python", "-m", module]
    arguments = sys.argv[1:]
    if "--record" in arguments:
        at = arguments.index("--record")
        # Only `penstock bench` takes the file.
        del arguments[at : at + (2 if module == "penstock" else 1)]
    return shlex.join([*program, *arguments])


def hardware() -> str:
    """Return the models of the processor and of the GPUs, and how many cores this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    return ", ".join([f"{model}, {available_cores()} cores", *_gpus()])


def _gpus() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=False)
    names = Counter(listed.stdout.splitlines() if listed.returncode == 0 else [])
    return [f"{count} {name}" for name, count in names.items()]


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that compute or carry requests."""
    packages = ("torch", "numpy", "uvloop", "httptools", "penstock")
    return {"python": platform.python_version(), **versions_of(*packages, missing="not installed")}


def _commit() -> tuple[str, bool]:
    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=_SOURCE, capture_output=True, text=True, check=False).stdout.strip()

    # A measurement writes results and pictures itself; they do not change what is measured.
    written = (":!benchmarks/results", ":!docs/performance.md", ":!docs/assets")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *written)
    return git("rev-parse", "HEAD"), bool(changed)
