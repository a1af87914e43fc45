"""Size on disk of what `pip install penstock-nn[EXTRA]` installs."""

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.acceptance.report.results import ROOT
from penstock.core.errors import BenchError


def megabytes(extra: str, *, compiled: bool) -> list[float]:
    """Install the last commit with an extra into an empty folder, without torch and what torch needs itself.

    Args:
        extra: The extra.
        compiled: Compile the modules, as pip does by default.

    Raises:
        BenchError: pip failed; the end of its output is in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        clone, target = f"{folder}/clone", Path(folder) / "installed"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), clone], check=True)
        declared = tomllib.loads(Path(clone, "pyproject.toml").read_text())["project"]
        packages = _needed(declared["dependencies"] + declared["optional-dependencies"][extra]) - _needed(["torch"])
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
        command += ["--target", str(target), "--compile" if compiled else "--no-compile", clone, *sorted(packages)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"pip ended with status {done.returncode}: {done.stderr[-500:]}")
        return [sum(file.stat().st_size for file in target.rglob("*") if file.is_file()) / 1e6]


def _needed(requirements: Iterable[str]) -> set[str]:
    """Return the names of packages that requirements need, as the installed ones declare it."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    left = [Requirement(line) for line in requirements]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        found.add(name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                inner = [Requirement(line) for line in distribution(name).requires or []]
                left += [one for one in inner if one.marker is None or one.marker.evaluate({"extra": extra})]
    return found
