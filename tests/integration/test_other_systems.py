"""Systems without the calls of Linux: import, fit, load and export work, and serving says that it needs Linux."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.serve import serve
from penstock.core.errors import ServeError
from penstock.core.machine.cores import available_cores
from tests.support.wheel import PYTHON, ROOT

# What Python has on Linux and not on macOS.
LINUX_ONLY = (
    "CLONE_NEWNS",
    "O_DIRECT",
    "copy_file_range",
    "eventfd",
    "memfd_create",
    "pidfd_open",
    "posix_fadvise",
    "posix_fallocate",
    "sched_getaffinity",
    "sched_setaffinity",
)
MACOS = f"""
import ctypes, os, select, socket, sys

for name in {LINUX_ONLY!r}:
    if hasattr(os, name):
        delattr(os, name)
for name in [name for name in dir(select) if name.lower().startswith("epoll")]:
    delattr(select, name)
real = os.sysconf

def sysconf(name):
    if name == "SC_AVPHYS_PAGES":
        raise ValueError("unrecognized configuration name")
    return real(name)

os.sysconf = sysconf
"""
MODULES = """
import importlib, pkgutil
import penstock

for part in ("core", "client", "device", "export", "nn", "models", "runtime", "train", "cli"):
    package = importlib.import_module("penstock." + part)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(".triton"):
            importlib.import_module(module.name)
print("imported")
"""
APPLICATION = """
from dataclasses import replace

from penstock import Application, TensorSpec


def network():
    from torch import nn

    return nn.Linear(4, 4)


numbers = TensorSpec(dtype="float32", shape=(4,), meaning="four numbers")
app = Application(name="four", input=numbers, output=numbers, model=":network")
"""
RECIPE = """

def recipe():
    import numpy as np
    from torch.nn.functional import mse_loss

    from penstock import Optimizer
    from penstock.train.recipe import ArraySet, Data, Recipe

    rows = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    examples = ArraySet(inputs=rows, targets=rows)
    data = Data(train=examples, validation=examples)
    return Recipe(data=lambda: data, loss=mse_loss, optimizer=Optimizer("sgd", lr=0.1), epochs=1)


app = replace(app, recipe=recipe)
"""
WORK = """
import numpy as np
import penstock
from penstock.core.source_files.find_application import find_application

found = find_application("four.py")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
fitted = penstock.fit(found.model(), (x, 2 * x), out="run", epochs=2, quiet=True)
for _ in range(2):
    penstock.Bundle.write(found, fitted.network, x[:8], to="bundle")
print(penstock.load("bundle").predict(x[:3]).shape)
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)


def command(*arguments: str, folder: Path) -> str:
    """Run a command of which every process, those that it starts too, lacks the calls of Linux; return its output."""
    (folder / "system").mkdir(exist_ok=True)
    (folder / "system" / "sitecustomize.py").write_text(MACOS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "system"), str(ROOT)])}
    started = [PYTHON, "-m", "penstock", *arguments]
    done = subprocess.run(started, cwd=folder, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_module_but_those_of_serving_is_imported(tmp_path: Path) -> None:
    done = run(MACOS + MODULES, tmp_path)
    assert done.stdout == "imported\n", done.stderr


@pytest.mark.thorough
def test_a_network_is_fitted_bundled_and_loaded(tmp_path: Path) -> None:
    (tmp_path / "four.py").write_text(APPLICATION)
    done = run(MACOS + WORK, tmp_path)
    assert done.stdout.endswith("(3, 4)\n"), done.stderr


@pytest.mark.slow
def test_a_run_is_trained_exported_and_watched(tmp_path: Path) -> None:
    (tmp_path / "four.py").write_text(APPLICATION + RECIPE)
    command("train", "four.py", "--out", "run", "--epochs", "1", folder=tmp_path)
    command("export", "run/bundle", "--out", "pack", folder=tmp_path)
    (tmp_path / "rows.csv").write_text("1,2,3,4\n4,3,2,1\n")
    seen = command("watch", "pack", "--source", "rows.csv", "--json", "-", folder=tmp_path)
    assert seen.count('"row"') == 2


def test_serving_says_that_it_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ServeError, match=r"penstock serve needs Linux, and this is darwin; run it in a container"):
        serve(["bundle"])


def test_cores_without_an_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5})
    assert available_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert available_cores() == 8
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cores() == 1
