"""What `make fleet` installs, and whether it is there."""

import json
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
    """Make a Python that has pyspark and Ray, and also Penstock and torch, but not where a condition is true.

    Args:
        folder: A new folder.
        where: A Python expression over `os.environ`.

    Raises:
        NotInstalled: The engines are not.
    """
    engines = engines_python("pyspark")
    subprocess.run([engines, "-m", "venv", "--without-pip", folder], check=True)
    code = "import json, sysconfig; print(json.dumps(sysconfig.get_path('purelib')))"
    own, has_engines, has_all = (
        json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout)
        for python in (folder / "bin" / "python", engines, sys.executable)
    )
    # Files of such a folder are not looked at in turn, so what the engines see beside them is not seen.
    lines = [has_engines, f"import os, sys; sys.path.extend([] if {where} else [{str(ROOT)!r}, {has_all!r}])"]
    Path(own, "bare.pth").write_text("\n".join(lines) + "\n")
    return folder / "bin" / "python"


def program(name: str) -> str | None:
    """Find a program, also one of the superuser."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
