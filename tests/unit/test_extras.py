"""The sentences on missing packages, and on another project's distribution of the same name."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.core.errors import ApplicationError
from penstock.core.machine.extras import DISTRIBUTION, PACKAGES, missing_package
from penstock.core.machine.same_name import warn_of_same_name
from penstock.core.machine.versions import installed_version, versions_of
from penstock.core.source_files.find_application import find_application

ROOT = Path(__file__).parents[2]
DECLARED: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Distributions whose modules have another name.
MODULES = {
    "grpcio": "grpc",
    "huggingface-hub": "huggingface_hub",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "openslide-python": "openslide",
    "pillow": "PIL",
    "prometheus-client": "prometheus_client",
    "protobuf": "google",
    "scikit-image": "skimage",
    "scikit-learn": "sklearn",
}
# They have no modules that Penstock imports.
WITHOUT_MODULES = {"openslide-bin", "penstock-nn-sounds"}


@pytest.mark.parametrize("extra", PACKAGES)
def test_the_packages_of_an_extra_are_those_that_are_declared(extra: str) -> None:
    lines = DECLARED["optional-dependencies"][extra]
    names = {re.split(r"[>=;\s]", line)[0] for line in lines if not line.startswith(f"{DISTRIBUTION}[")}
    assert {MODULES.get(name, name) for name in names - WITHOUT_MODULES} == PACKAGES[extra]


def test_every_extra_for_users_is_there() -> None:
    wanted = {"train", "cpu", "gpu", "client", "device", "apps", "bench", "all", "grpc", "telemetry"}
    assert wanted <= DECLARED["optional-dependencies"].keys()
    assert DECLARED["name"] == DISTRIBUTION


def test_neither_client_nor_device_nor_the_base_needs_torch() -> None:
    extras = DECLARED["optional-dependencies"]
    for lines in (DECLARED["dependencies"], extras["client"], extras["device"]):
        assert not [line for line in lines if line.startswith(("torch", "penstock", "onnxscript", "matplotlib"))]


@pytest.mark.parametrize(
    ("user", "module", "extra"),
    [
        ("serve", "torch", "cpu"),
        ("serve", "onnxruntime.capi", "cpu"),
        ("watch", "onnxruntime", "device"),
        ("watch", "av", "device"),
        ("Client", "orjson", "client"),
        ("load", "orjson", "cpu"),
        ("train", "matplotlib", "train"),
        ("tiles", "openslide", "slides"),
    ],
)
def test_the_extra_suits_what_is_used(user: str, module: str, extra: str) -> None:
    sentence = missing_package(f"penstock {user}", module, user)
    assert sentence is not None
    assert sentence.endswith(f"is not installed; pip install 'penstock-nn[{extra}]'.")


def test_a_module_of_the_users_own_is_no_missing_package() -> None:
    assert missing_package("penstock train", "my_layers", "train") is None
    assert missing_package("penstock train", None, "train") is None


def without(*packages: str) -> str:
    return f"import sys\nfor name in {packages!r}: sys.modules[name] = None\n"


@pytest.mark.parametrize(
    ("packages", "use", "sentence"),
    [
        (("torch",), "penstock.load", "penstock.load needs the package torch, which is not installed"),
        (("torch",), "penstock.fit", "penstock.fit needs the package torch, which is not installed"),
        (("httpx2",), "penstock.Client", "pip install 'penstock-nn[client]'."),
        (("torch", "onnxruntime"), "penstock.TensorSpec", ""),
    ],
)
def test_a_public_name_says_what_to_install(packages: tuple[str, ...], use: str, sentence: str) -> None:
    code = f"{without(*packages)}import penstock\n{use}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert sentence in done.stderr.rpartition("ModuleNotFoundError: ")[2]
    assert (done.returncode == 0) == (not sentence)


def test_a_command_without_its_packages_is_one_sentence() -> None:
    code = f"{without('typer')}sys.argv = ['penstock', 'serve', 'b']\nfrom penstock.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        "penstock: penstock serve needs the package typer, which is not installed; pip install 'penstock-nn[cpu]'.\n"
    )


def install_foreign(folder: Path, record: str) -> None:
    info = folder / "penstock-0.4.2.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(record)


def test_another_distribution_of_the_same_name_is_said_in_a_sentence(tmp_path: Path) -> None:
    install_foreign(tmp_path, "penstock/__init__.py,sha256=x,10\npenstock-0.4.2.dist-info/METADATA,,\n")
    with pytest.warns(UserWarning, match=r"penstock-0\.4\.2, is installed in .* beside penstock-nn"):
        warn_of_same_name([str(tmp_path / "missing"), str(tmp_path)])
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import penstock"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.count("UserWarning") == 1
    assert "pip uninstall penstock penstock-nn" in done.stderr


def test_editable_installs_and_unreadable_ones_are_no_foreign_files(tmp_path: Path) -> None:
    install_foreign(tmp_path, "__editable__.penstock-0.1.0.dev0.pth,sha256=x,10\n")
    (tmp_path / "penstock-0.5.dist-info").mkdir()
    (tmp_path / "penstock_nn-0.1.dist-info").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_same_name([str(tmp_path), ""])


def test_no_page_installs_the_distribution_of_another_project() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "penstock").rglob("*.py"),
    ]
    foreign = re.compile(r"install [^`\n]*\bpenstock(?!-nn)(\[|[\s'\"`]|$)")
    found = [
        page.name for page in pages if foreign.search(page.read_text().replace("uninstall penstock penstock-nn", ""))
    ]
    assert found == []


def test_the_version_is_ours() -> None:
    assert versions_of("penstock") == {"penstock": penstock.__version__} == {"penstock": DECLARED["version"]}


@pytest.mark.parametrize("package", ["torch", "numpy", "onnx", "onnxruntime", "onnxscript", "old", "lower"])
def test_an_installed_version_is_that_of_importlib(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Installed by a tool of long ago, without the file METADATA.
    (tmp_path / "old.egg-info").mkdir()
    (tmp_path / "old.egg-info" / "PKG-INFO").write_text("Metadata-Version: 1.0\nName: old\nVersion: 1.2\n")
    # The names of fields have no case, and a description may have lines that look like fields.
    (tmp_path / "lower-1.3.dist-info").mkdir()
    text = "metadata-version: 2.1\nname: lower\nversion: 1.3\n\nVersion: 9 is to come.\n"
    (tmp_path / "lower-1.3.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_version(package) == importlib.metadata.version(package)


def test_a_package_that_is_not_installed_has_no_version() -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError, match="no-such-package"):
        installed_version("no-such-package")


def test_an_application_that_needs_an_extra_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "app.py").write_text("import datasets\n")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ApplicationError, match=r"app.py needs the package datasets, .*penstock-nn\[data\]"):
        find_application(str(tmp_path / "app.py"))
