"""Wheels of this repository, and environments that hold one of them and the packages of some extras alone."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path
from sysconfig import get_path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYTHON = Path(get_path("scripts")) / "python"
SOUNDS = "penstock/apps/keywords/data/"
BUILD = "import sys; from setuptools import build_meta; print(build_meta.{}(sys.argv[1]))"


def copy_of_sources(folder: Path, root: Path = ROOT) -> Path:
    """Copy what a distribution is built of, without the leftovers of earlier builds."""
    # Setuptools takes the list of files from an earlier build, if there is one.
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "*.so")
    for name in ("penstock", "sounds"):
        shutil.copytree(root / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, folder / name)
    return folder


def bare() -> dict[str, str]:
    """Environment variables by which no Python finds this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def build(sources: Path, to: Path, kind: str = "wheel", *, compiled: bool = False) -> Path:
    """Build a wheel or an sdist with the setuptools of this environment, offline."""
    to.mkdir(exist_ok=True)
    environment = bare() | {"PENSTOCK_COMPILE": "1" if compiled else "0"}
    command = [PYTHON, "-W", "ignore", "-c", BUILD.format(f"build_{kind}"), str(to)]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    return to / done.stdout.splitlines()[-1]


def wheel_of_sdist(sdist: Path, folder: Path) -> Path:
    """Build the wheel from the files of an sdist alone, with its compiled modules."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build(folder / sdist.name.removesuffix(".tar.gz"), folder / "wheels", compiled=True)


def missing_files(wheels: Iterable[Path]) -> set[str]:
    """Files of the package that none of the wheels holds."""
    held = {name for wheel in wheels for name in zipfile.ZipFile(wheel).namelist()}
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "penstock").rglob("*") if path.is_file()}
    return {name for name in there - held if "__pycache__" not in name and not name.endswith(".so")}


def needed(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Installed distributions that requirements need, by name, with their dependencies."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    left = [Requirement(line) for line in requirements]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        found[name] = distribution(name)
        for extra in {"", *requirement.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            inner = [Requirement(line) for line in found[name].requires or []]
            left += [one for one in inner if one.marker is None or one.marker.evaluate({"extra": extra})]
    return found


def environment(folder: Path, wheel: Path, requirements: Iterable[str]) -> Path:
    """Make a virtual environment of a wheel and of installed distributions that are linked; return its Python."""
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    python = folder / "bin" / "python"
    install = [PYTHON, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*install, "--no-compile", str(wheel)], check=True, timeout=120, env=bare())
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = folder / "lib" / version / "site-packages"
    for one in needed(requirements).values():
        for top in {file.parts[0] for file in one.files or [] if file.parts[0] != ".."}:
            link, target = packages / top, Path(str(one.locate_file(top)))
            if not link.exists():
                link.symlink_to(target)
    return python
