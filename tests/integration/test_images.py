"""The container images: linted, pinned by hash, and their entry point run as the container runs it, without Docker."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.serving import free_port, write_doubler

ROOT = Path(__file__).parents[2]
DOCKERFILE, COMPOSE, LOCKS = ROOT / "Dockerfile", ROOT / "deploy" / "compose.yaml", ROOT / "deploy" / "images"
DIGEST = re.compile(r"\S+:\S+@sha256:[0-9a-f]{64}")
IN_IMAGE = ("cpu", "grpc", "telemetry")
LOCKED = re.compile(r"^([a-z0-9.-]+)==([^ ]+)", re.MULTILINE)


def instructions(name: str) -> list[str]:
    """The arguments of a Dockerfile's instruction, each time it is given, on one line."""
    joined = DOCKERFILE.read_text().replace("\\\n", " ")
    return re.findall(rf"^{name} +(.*)$", joined, re.MULTILINE)


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}")
    assert found is not None, f"{name} is not installed"
    return found


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="hadolint's package is for x86_64")
def test_the_dockerfile_passes_hadolint() -> None:
    done = subprocess.run([tool("hadolint"), DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_compose_file_fits_its_specification() -> None:
    command = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", COMPOSE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_images_of_others_are_pinned_by_digest() -> None:
    bases = [line.split()[0] for line in instructions("FROM")]
    assert set(bases) == {"${PYTHON}"}
    [python] = [line.partition("=")[2] for line in instructions("ARG") if line.startswith("PYTHON=")]
    others = re.findall(r"image: (\S+)", COMPOSE.read_text())
    assert all(DIGEST.fullmatch(image) for image in [python, *others] if not image.startswith("penstock")), others


@pytest.mark.parametrize(("name", "least"), [("cpu", 21), ("cuda", 21), ("sbom", 21), ("build", 1)])
def test_packages_are_pinned_by_hash(name: str, least: int) -> None:
    lines = (LOCKS / f"{name}.lock").read_text().replace("\\\n", " ").splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    assert len(entries) >= least
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert [entry for entry in entries if not re.match(r"[a-z0-9.-]+(==| @ https://)", entry)] == []


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_locks_hold_what_a_server_needs_in_the_versions_that_are_tested(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (LOCKS / f"{name}.lock").read_text()
    locked, tested = dict(LOCKED.findall(text)), dict(LOCKED.findall((ROOT / "requirements.lock").read_text()))
    needed = [Requirement(each) for extra in IN_IMAGE for each in extras[extra] if not each.startswith("penstock")]
    for each in needed:
        if each.name == "torch" and name == "cpu":
            from bootstrap import TORCH

            assert f"torch-{TORCH.removeprefix('torch==')}%2Bcpu-" in text
        else:
            assert locked[each.name] in each.specifier, each
    differing = {key: (version, tested[key]) for key, version in locked.items() if tested.get(key, version) != version}
    assert differing == {}
    assert ("nvidia-cudnn-cu13" in locked) == (name == "cuda")


def test_what_is_copied_is_there() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    for line in instructions("COPY"):
        for source in line.split()[:-1]:
            if not source.startswith("--from") and not line.startswith("--from"):
                assert (ROOT / source).exists(), source
                assert source.rstrip("/") not in ignored


def test_the_container_runs_without_root() -> None:
    [user] = instructions("USER")
    assert int(user.split(":")[0]) > 0


@pytest.mark.thorough
def test_the_entry_point_serves_the_mounted_models_and_the_health_check_follows(
    tmp_path: Path,
) -> None:
    [entry], [command] = instructions("ENTRYPOINT"), instructions("CMD")
    http, grpc = free_port(), free_port()
    models = tmp_path / "models"
    (models / "doubler").mkdir(parents=True)
    write_doubler(models / "doubler").rename(models / "doubler" / "1")
    # What differs from the container: the folder and the ports.
    here = {"/models": str(models), "0.0.0.0": "127.0.0.1", "8000": str(http), "8001": str(grpc)}
    given: list[str] = json.loads(entry) + json.loads(command)
    words = [here.get(word, word) for word in given]
    assert words[0] == "penstock"
    assert set(here) - {"/models"} < set(json.loads(command))
    environment = os.environ | {"PENSTOCK_CACHE": str(tmp_path / "cache"), "PYTHONUNBUFFERED": "1"}
    [check] = re.findall(r"CMD (\[.*\])", instructions("HEALTHCHECK")[0])
    health = [sys.executable, str(LOCKS / Path(json.loads(check)[1]).name)]
    asked = environment | {"PENSTOCK_HEALTH_URL": f"http://127.0.0.1:{http}/v2/health/ready"}

    def healthy() -> subprocess.CompletedProcess[str]:
        return subprocess.run(health, env=asked, capture_output=True, text=True, check=False, timeout=30)

    before = healthy()
    assert before.returncode == 1
    assert "refused" in before.stderr
    with subprocess.Popen(
        [sys.executable, "-m", *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        try:
            while (during := healthy()).returncode:
                assert server.poll() is None, server.stdout.read()
                assert "503" in during.stderr or "refused" in during.stderr, during.stderr
            server.terminate()
            assert server.wait(20) == 0, server.stdout.read()
        finally:
            server.kill()
    assert any((tmp_path / "cache").iterdir())


def test_the_documentation_builds_these_images() -> None:
    page = (ROOT / "docs" / "how-to" / "containers.md").read_text()
    commands = [shlex.split(line) for line in page.splitlines() if line.startswith("docker build")]
    variants = {word.partition("=")[2] for words in commands for word in words if word.startswith("VARIANT=")}
    assert {f"{variant}.lock" for variant in variants | {"cpu"}} <= {file.name for file in LOCKS.iterdir()}
