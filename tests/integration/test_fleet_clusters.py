"""`penstock train --on` real clusters on this machine: Slurm, Spark and Ray, of two nodes each."""

import os
import re
import shutil
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.acceptance.fleet.cluster_runs import (
    APPLICATION,
    HOST,
    TARGETS,
    by_launcher,
    by_torchrun,
    cluster_command,
    hash_of,
    killed_run,
    on_cluster,
    started,
    write_application,
)
from benchmarks.acceptance.fleet.clusters import CLUSTERS, Cluster, cluster
from benchmarks.acceptance.fleet.installed import NotInstalled, bare_python
from benchmarks.acceptance.fleet.namespaces import Network, namespaces
from tests.support.clusters import running_fixture, started_anew_fixture

LIMIT_S = 900
pytestmark = [pytest.mark.fleet, pytest.mark.timeout(LIMIT_S)]


started_anew = started_anew_fixture()
running = running_fixture()


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_application(tmp_path_factory.mktemp("user"))


@pytest.fixture(scope="module")
def wanted(application: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Train by our own launcher, undisturbed; the hash of the last weights."""
    return hash_of(by_launcher(application, tmp_path_factory.mktemp("launcher") / "run"))


def ended(command: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run a command; its exit status and the last line of its standard error."""
    with started(command, environment) as process:
        said = process.communicate(timeout=LIMIT_S / 3)[1]
    return process.returncode, said.strip().splitlines()[-1] if said.strip() else ""


def test_torchrun_ends_with_the_hash_of_our_launcher(application: str, wanted: str, tmp_path: Path) -> None:
    assert hash_of(by_torchrun(application, tmp_path / "run")) == wanted


def test_a_run_ends_with_the_hash_of_our_launcher(
    running: Cluster, application: str, wanted: str, tmp_path: Path
) -> None:
    run = on_cluster(running, application, tmp_path / "run")
    assert hash_of(run) == wanted
    assert (run / "bundle" / "manifest.json").exists()
    # Nothing of the engine is left.
    assert not (run / ".cluster").exists()


@pytest.mark.parametrize("target", TARGETS)
def test_a_run_of_which_something_is_killed_ends_with_the_undisturbed_hash(
    running: Cluster, application: str, wanted: str, tmp_path: Path, target: str
) -> None:
    assert hash_of(killed_run(running, application, tmp_path / "run", target)) == wanted


def test_a_failing_application_shows_its_sentence_and_is_not_started_again(running: Cluster, tmp_path: Path) -> None:
    failing = "def slowed(x, y, generator):\n    from penstock.core.errors import TrainError\n\n"
    failing += "    raise TrainError('the camera is off; turn it on.')\n\n\ndef unused(x, y, generator):\n"
    file = tmp_path / "app.py"
    file.write_text(APPLICATION.replace("def slowed(x, y, generator):\n", failing))
    status, said = ended(cluster_command(running, str(file), tmp_path / "run"), dict(running.environment))
    assert status == 2
    assert said == "penstock: the camera is off; turn it on."
    assert not (tmp_path / "run" / "bundle").exists()
    assert len(list((tmp_path / "run" / ".attempts").iterdir())) == 1


def test_too_few_slots_are_a_sentence(running: Cluster, application: str, tmp_path: Path) -> None:
    command = cluster_command(running, application, tmp_path / "run", ranks=5)
    status, said = ended(command, dict(running.environment))
    assert status == 2
    assert said.startswith("penstock: ")
    assert "5 processes" in said or "fewer than 5 free slots" in said
    assert not (tmp_path / "run" / "run.json").exists()


def test_sources_are_shipped_to_machines_that_do_not_have_them(
    running: Cluster, application: str, wanted: str, tmp_path: Path
) -> None:
    file = shutil.copy(application, tmp_path / "app.py")
    run = tmp_path / "run"
    with started(cluster_command(running, str(file), run), running.environment) as process:
        deadline_s = time.monotonic() + LIMIT_S / 3
        while not list(run.glob(".cluster/*/job.json")):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        # The tasks have not looked for it yet.
        Path(file).unlink()
        _, said = process.communicate(timeout=LIMIT_S / 3)
    assert process.returncode == 0, said
    assert hash_of(run) == wanted


@pytest.mark.parametrize(
    ("on", "environment", "says"),
    [
        ("slurm", {"SLURM_CONF": os.devnull}, "Slurm's controller does not answer"),
        ("spark://127.0.0.1:9", {}, "no Spark master answers at spark://127.0.0.1:9 (Connection refused)"),
        ("ray", {"RAY_ADDRESS": "127.0.0.1:9"}, "there is no Ray cluster to reach from here"),
    ],
)
def test_a_cluster_that_is_not_there_is_a_sentence(
    on: str, environment: dict[str, str], says: str, application: str, tmp_path: Path
) -> None:
    kind = on.partition(":")[0]
    try:
        there = CLUSTERS[kind](tmp_path)
    except NotInstalled as error:
        pytest.skip(str(error))
    command = [str(there.python), "-m", "penstock", "train", application, "--out", str(tmp_path / "run")]
    status, said = ended([*command, "--processes=2", "--on", on], environment)
    assert status == 2
    assert says in said
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.fixture(scope="module")
def two_machines(started_anew: None) -> Generator[Network]:
    """Two network namespaces. A sandbox may forbid them: the reason of the skip has its error."""
    try:
        with namespaces() as network:
            yield network
    except NotInstalled as error:
        pytest.skip(str(error))


def test_ranks_on_two_machines_of_a_network_end_with_the_hash_of_our_launcher(
    two_machines: Network, application: str, wanted: str, tmp_path: Path
) -> None:
    """Master, Workers, executors and ranks reach one another by the addresses of the machines alone."""
    try:
        with cluster("spark", network=two_machines) as running:
            assert hash_of(on_cluster(running, application, tmp_path / "run")) == wanted
            assert hash_of(killed_run(running, application, tmp_path / "killed", HOST)) == wanted
    except NotInstalled as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kind", list(CLUSTERS))
def test_executors_without_torch_are_a_sentence(kind: str, application: str, tmp_path: Path) -> None:
    try:
        with bare_cluster(kind, tmp_path / "bare") as (running, environment):
            command = cluster_command(running, application, tmp_path / "run")
            # What PYTHONPATH names would be there too.
            status, said = ended(command, {**running.environment, **environment, "PYTHONPATH": ""})
    except NotInstalled as error:
        pytest.skip(str(error))
    assert status == 2
    lacking = re.search(rf"\({tmp_path}/bare/bin/python\) has no (penstock and no )?torch; install the same env", said)
    assert lacking, said
    # Slurm's log stays; nothing that could be taken for a run does.
    assert not (tmp_path / "run" / "run.json").exists()
    assert not (tmp_path / "run" / "bundle").exists()


@contextmanager
def bare_cluster(kind: str, folder: Path) -> Generator[tuple[Cluster, dict[str, str]]]:
    """A cluster whose machines have a Python without Penstock and torch, and variables of the command."""
    if kind == "spark":
        bare = bare_python(folder)
        with cluster(kind) as running:
            yield running, {"PYSPARK_PYTHON": str(bare)}
    elif kind == "ray":
        with cluster(kind, node_python=bare_python(folder)) as running:
            yield running, {}
    else:
        # The same path, as Slurm needs it: here with all, in a task of the second node without.
        with cluster(kind) as running:
            running.python = bare_python(folder, where="os.environ.get('SLURMD_NODENAME') == 'n1'")
            yield running, {}
