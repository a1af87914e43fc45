"""The wheels and the sdist, installed in environments that hold the packages of one extra alone."""

import re
import subprocess
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from penstock.serve.compiled import c_names, compiled_names
from tests.support.wheel import ROOT, SOUNDS, bare, build, copy_of_sources, environment, missing_files, wheel_of_sdist

# The modules are compiled, which takes minutes on a busy machine.
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]
DECLARED: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = DECLARED["optional-dependencies"]
# The page of the server, the app of a device, the vocabulary of an application, a description: one of each kind.
DATA_FILES = (
    "penstock/serve/page/",
    "penstock/device/web/",
    "penstock/apps/digits/README.md",
    "penstock/apps/translate/data/",
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built of the files of the sdist alone."""
    folder = tmp_path_factory.mktemp("built")
    return wheel_of_sdist(build(sources, folder / "sdist", "sdist"), folder)


@pytest.fixture(scope="module")
def sounds(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(sources / "sounds", tmp_path_factory.mktemp("sounds"))


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the Python of an environment, which finds nothing of this checkout."""
    return subprocess.run([python, *arguments], cwd=cwd, env=bare(), capture_output=True, text=True, timeout=120)


def flat(extra: str) -> list[str]:
    """The requirements of an extra, with those of the extras that it takes over."""
    lines: list[str] = []
    for line in EXTRAS[extra]:
        own = re.fullmatch(r"penstock-nn\[(.+)\]", line)
        lines += [line] if own is None else [more for name in own[1].split(",") for more in flat(name)]
    return lines


def requirements(*extras: str) -> list[str]:
    return DECLARED["dependencies"] + [line for extra in extras for line in flat(extra)]


def test_the_wheels_hold_every_file_of_the_package(wheel: Path, sounds: Path) -> None:
    assert missing_files([wheel, sounds]) == set()
    assert wheel.name.startswith("penstock_nn-")
    compiled = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert len(compiled) == len(compiled_names() | c_names())
    assert wheel.name.endswith(f"-{sysconfig.get_platform().replace('-', '_')}.whl")
    missing = missing_files([wheel])
    assert len(missing) > 60
    assert all(name.startswith(SOUNDS) for name in missing)


def test_a_wheel_without_its_data_files_is_found(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "lacking").mkdir()
    lacking = copy_of_sources(tmp_path / "lacking", sources)
    declared = lacking / "pyproject.toml"
    declared.write_text(re.sub(r'(?m)^penstock = \["py\.typed".*$', "", declared.read_text()))
    missing = missing_files([build(lacking, tmp_path / "wheel")])
    for kind in DATA_FILES:
        assert any(name.startswith(kind) for name in missing), kind


def test_the_sdist_holds_no_tests_of_this_machine(sources: Path, tmp_path: Path) -> None:
    with tarfile.open(build(sources, tmp_path, "sdist")) as archive:
        names = archive.getnames()
    assert not [name for name in names if "__pycache__" in name or name.endswith(".flac")]


def test_a_client_is_complete_and_small_and_names_the_extra_of_the_rest(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "client", wheel, requirements("client"))
    there = run(
        python, "-c", "import penstock; print(penstock.Client.__name__, penstock.TensorSpec.__name__)", cwd=tmp_path
    )
    assert (there.stdout, there.stderr) == ("Client TensorSpec\n", "")
    for name in ("torch", "onnxruntime", "typer", "PIL"):
        assert run(python, "-c", f"import {name}", cwd=tmp_path).returncode == 1, f"{name} is installed"
    loading = run(python, "-c", "import penstock; penstock.load", cwd=tmp_path).stderr.splitlines()
    assert re.fullmatch(
        r"ModuleNotFoundError: penstock\.load needs the package \w+, which is not installed; "
        r"pip install 'penstock-nn\[cpu\]'\.",
        loading[-1],
    )
    for command, extra in (("serve", "cpu"), ("train", "cpu"), ("watch", "device")):
        done = run(python, "-m", "penstock", command, "bundle", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert re.fullmatch(
            rf"penstock: penstock {command} needs the package \w+, which is not installed; "
            rf"pip install 'penstock-nn\[{extra}\]'\.\n",
            done.stderr,
        ), done.stderr


def test_the_base_declares(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "base", wheel, requirements())
    declare = (
        "import penstock; s = penstock.TensorSpec(dtype='float32', shape=(4,), meaning='numbers'); "
        "print(penstock.Application(name='four', input=s, output=s, model=':network').name)"
    )
    assert run(python, "-c", declare, cwd=tmp_path).stdout == "four\n"
    script = python.with_name("penstock")
    done = run(python, str(script), "--version", cwd=tmp_path)
    assert "penstock needs the package typer, which is not installed" in done.stderr


@pytest.mark.slow
def test_a_device_without_torch_runs_a_pack(wheel: Path, pictures_pack: Any, tmp_path: Path) -> None:
    pack, _ = pictures_pack
    python = environment(tmp_path / "device", wheel, requirements("device"))
    assert run(python, "-c", "import torch", cwd=tmp_path).returncode == 1
    ask = (
        "import sys; from pathlib import Path; from penstock.device.pack_engine import PackEngine; "
        "from penstock.core.packs.pack import read_pack; PackEngine(read_pack(Path(sys.argv[1]))); print('ran')"
    )
    engine = run(python, "-c", ask, str(pack.folder), cwd=tmp_path)
    assert engine.stdout == "ran\n", engine.stderr
    for command in ("watch", "index", "search", "tiles"):
        done = run(python, "-m", "penstock", command, "--help", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = run(python, "-m", "penstock", "serve", "bundle", cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'penstock-nn[cpu]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


APPLICATION = """
from penstock import Application, TensorSpec


def network():
    from torch import nn

    return nn.Linear(4, 4)


numbers = TensorSpec(dtype="float32", shape=(4,), meaning="four numbers")
app = Application(name="four", input=numbers, output=numbers, model=":network")
"""
FIRST_HOUR = """
import urllib.request
from pathlib import Path

import numpy as np
import penstock
from penstock.bench.server_process import running_server
from penstock.core.source_files.find_application import find_application
from penstock.serve.compiled import interpreted_note

if __name__ == "__main__":
    found = find_application("four.py")
    x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
    fitted = penstock.fit(found.model(), (x, 2 * x), out="run", epochs=2)
    penstock.Bundle.write(found, fitted.network, x[:8], to="bundle")
    print(penstock.load("bundle").predict(x[:3]).shape)
    assert interpreted_note() == ""
    with running_server(Path("bundle")) as server:
        print(urllib.request.urlopen(server.url).read().decode().count("<html"))
"""


@pytest.mark.slow
def test_a_cpu_without_matplotlib_and_tensorboard_fits_loads_and_serves(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "cpu", wheel, requirements("cpu"))
    for name in ("matplotlib", "tensorboard", "soundfile"):
        assert run(python, "-c", f"import {name}", cwd=tmp_path).returncode == 1, f"{name} is installed"
    (tmp_path / "four.py").write_text(APPLICATION)
    (tmp_path / "first_hour.py").write_text(FIRST_HOUR)
    done = run(python, "first_hour.py", cwd=tmp_path)
    assert done.stdout.splitlines()[-2:] == ["(3, 4)", "1"], done.stderr
    for package in ("tensorboard", "matplotlib"):
        assert f"{package} is not installed" in done.stdout + done.stderr, done.stdout
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    words = run(python, "-m", "penstock", "train", "keywords", "--out", "words", "--epochs", "1", cwd=tmp_path)
    assert words.returncode == 2
    assert "pip install 'penstock-nn[apps]'" in words.stderr
