"""Programs and packages that `make fleet` installs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.acceptance.fleet.routing_proxies import FLEET
from benchmarks.acceptance.report.results import ROOT
from penstock.core.errors import BenchError

# The virtual environment of pyspark and Ray, which sees the packages of the main one.
PYTHON = FLEET / "engines" / "bin" / "python"
_LACKING = ("penstock", "torch", "functorch", "__")


class NotInstalled(BenchError):
    """This machine has not what a cluster needs."""


def engines_python(module: str) -> Path:
    """Return the Python of the engines.

    Raises:
        NotInstalled: It has not the module.
    """
    if not PYTHON.exists() or subprocess.run([PYTHON, "-c", f"import {module}"], check=False).returncode:
        raise NotInstalled(f"{module} is not installed in {PYTHON.parent.parent}; 'make fleet' installs it.")
    return PYTHON


def bare_python(folder: Path, *, where: str = "True") -> Path:
    """Make a Python with all packages of the engines but Penstock and torch; with these, where a condition is false.

    Args:
        folder: A new folder.
        where: A Python expression over `os.environ`.

    Raises:
        NotInstalled: The engines are not.
    """
    engines = engines_python("pyspark")
    subprocess.run([engines, "-m", "venv", "--without-pip", folder], check=True)
    own, *others = (_packages_of(python) for python in (folder / "bin" / "python", engines, Path(sys.executable)))
    for each in (each for other in others for each in other.iterdir()):
        if each.suffix != ".pth" and not each.name.startswith(_LACKING) and not (own / each.name).exists():
            (own / each.name).symlink_to(each)
    rest = [str(ROOT), *map(str, others)]
    (own / "bare.pth").write_text(f"import os, sys; sys.path.extend([] if {where} else {rest!r})\n")
    return folder / "bin" / "python"


def _packages_of(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", code], capture_output=True, check=True, text=True).stdout.strip())


def program(name: str) -> str | None:
    """Find a program, also one of the superuser."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
