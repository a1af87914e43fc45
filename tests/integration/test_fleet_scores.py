"""`penstock score --on` real clusters on this machine: Slurm, Spark and Ray, of two nodes each."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from benchmarks.acceptance.fleet.cluster_runs import started
from benchmarks.acceptance.fleet.clusters import (
    CLUSTERS,
    Cluster,
    NotInstalled,
    cluster,
    command_line,
    descendants,
    eventually,
    own_address,
)
from benchmarks.acceptance.fleet.namespaces import Machine, Network
from penstock import Bundle
from penstock.core.source_files.find_application import find_application
from tests.support.clusters import cluster_fixture, running_fixture, started_anew_fixture
from tests.support.scored import fixed_lists, hashes, numbers, write_numbers, write_parquet
from tests.support.serving import write_doubler

LIMIT_S = 900
UNITS, ROWS, SLEEP_S = 12, 40, 0.2
# A CUDA context breaks on a row of 11, once for all processes together, and stays so in that process.
LOSES = """
broken = False


def lose(folder, x):
    global broken
    from penstock.core.errors import DeviceLost

    mark = f"{folder}/lost-{os.getpid()}"
    if not broken and (x == 11).any() and not any(name.startswith("lost-") for name in os.listdir(folder)):
        broken = True
    if broken:
        with open(mark, "a") as sink:
            sink.write("once")
        raise DeviceLost("the GPU failed (on request); restart the process.")
"""
pytestmark = [pytest.mark.fleet, pytest.mark.timeout(LIMIT_S)]
SLOW_S, OTHER_HOST = 8, "127.0.0.2"
# Spark starts a second attempt of a task that takes longer than the others.
SPECULATION = """
spark.speculation true
spark.speculation.quantile 0.1
spark.speculation.interval 50ms
spark.speculation.multiplier 1.01
spark.speculation.minTaskRuntime 10ms
"""


started_anew = started_anew_fixture()
running = running_fixture()
spark, slurm, ray = (cluster_fixture(name) for name in ("spark", "slurm", "ray"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, an input, and in `whole` what one machine makes of it."""
    folder = tmp_path_factory.mktemp("scored")
    write_doubler(folder, sleep_s=SLEEP_S, holds=folder / "held")
    write_numbers(folder / "in", [ROWS * UNITS - 2 * ROWS, 2 * ROWS], rows=ROWS)
    subprocess.run([*command(folder, folder / "in", folder / "whole"), "--device=cpu"], check=True, env=environment({}))
    return folder


def command(place: Path, source: Path, to: Path, *options: object, python: object = None) -> list[str]:
    given = ["score", place / "bundle", source, "--to", to, "--executor=torch", "--threads=1"]
    return [
        str(python or sys.executable),
        "-m",
        "penstock",
        *map(str, [*given, f"--cache={place / 'cache'}", *options]),
    ]


def environment(more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **more}


def on(running: Cluster, place: Path, to: Path, *options: object, source: Path | None = None) -> list[str]:
    given = ("--on", running.on, *(options or ("--processes=2",)))
    return command(place, source or place / "in", to, *given, python=running.python)


def ended(command: list[str], environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a command; its exit status, what it printed, and the last line of its standard error."""
    with started(command, environment) as process:
        out, said = process.communicate(timeout=LIMIT_S / 3)
    return process.returncode, out, said.strip().splitlines()[-1] if said.strip() else ""


def until(is_so: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline_s = time.monotonic() + LIMIT_S / 3
    while not is_so():
        assert process.poll() is None, process.communicate()[1][-500:]
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def parts(to: Path) -> int:
    return len(list(to.glob("*.parquet")))


def test_the_output_is_that_of_one_machine(running: Cluster, place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, said, error = ended(on(running, place, out), running.environment)
    assert status == 0, error
    assert said.startswith(f"Rows: {ROWS * UNITS:,} in {out}, {ROWS * UNITS:,} of them new.\n")
    # Bytes, names and the manifest; and nothing of the engine is left.
    assert hashes(out) == hashes(place / "whole")
    first = {file: file.stat().st_mtime_ns for file in out.glob("*.parquet")}
    next(iter(first)).unlink()
    status, said, error = ended(on(running, place, out), running.environment)
    assert status == 0, error
    assert said.startswith(f"Rows: {ROWS * UNITS:,} in {out}, {ROWS:,} of them new.\n")
    assert hashes(out) == hashes(place / "whole")
    # The parts that were there were not written again.
    assert sum(file.stat().st_mtime_ns != before for file, before in first.items()) == 1


def test_a_killed_process_is_run_again_by_the_engine(running: Cluster, place: Path, tmp_path: Path) -> None:
    def kill(worker: int) -> None:
        (executor,) = (each for each in running.executors() if worker in (each, *descendants(each)))
        os.kill(executor, signal.SIGKILL)
        eventually(lambda: executor not in running.executors(), "the end of the killed process")

    scored_with_a_kill(running, place, tmp_path / "out", kill)


def test_a_killed_machine_that_comes_back_is_no_end(running: Cluster, place: Path, tmp_path: Path) -> None:
    """Slurm does not notice in time: its node is back before `SlurmdTimeout`."""
    scored_with_a_kill(running, place, tmp_path / "out", lambda worker: running.kill_node(1), node=1)


def test_the_killed_machine_of_the_batch_job_is_no_end(slurm: Cluster, place: Path, tmp_path: Path) -> None:
    scored_with_a_kill(slurm, place, tmp_path / "out", lambda worker: slurm.kill_node(0), node=0)


def scored_with_a_kill(
    running: Cluster, place: Path, out: Path, kill: Callable[[int], object], node: int | None = None
) -> None:
    """Score, and kill what runs a process while that one scores a unit.

    Args:
        running: The cluster.
        place: See the fixture.
        out: The output.
        kill: Kills, given the process.
        node: The node where the process is to be; any by default.
    """

    def working() -> list[int]:
        found = [int(file.name) for file in held.iterdir() if file.name != "hold"]
        return [each for each in found if node is None or running.is_on(each, node)]

    held = place / "held"
    held.mkdir()
    try:
        with started(on(running, place, out), running.environment) as process:
            until(lambda: parts(out) > 0, process)
            # From here on no process ends the unit that it has begun.
            (held / "hold").touch()
            until(lambda: bool(working()), process)
            victim = random.choice(working())
            kill(victim)
            until(lambda: not command_line(victim), process)
            (held / "hold").unlink()
            _, said = process.communicate(timeout=LIMIT_S / 2)
        assert process.returncode == 0, said[-500:]
        # It did not end that batch.
        assert (held / str(victim)).exists()
    finally:
        shutil.rmtree(held)
    assert hashes(out) == hashes(place / "whole")


def test_the_same_command_goes_on_after_a_killed_driver(running: Cluster, place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with started(on(running, place, out), running.environment) as process:
        until(lambda: parts(out) > 1, process)
        process.kill()
    assert not (out / "_manifest.json").exists()
    status, _, said = ended(on(running, place, out), running.environment)
    assert status == 0, said
    # What the killed driver had begun may still be written, with the same bytes.
    shutil.rmtree(out / ".cluster", ignore_errors=True)
    assert hashes(out) == hashes(place / "whole")


def test_a_failing_application_shows_its_sentence(running: Cluster, place: Path, tmp_path: Path) -> None:
    given = numbers(2 * ROWS)
    given[ROWS + 3] = 13
    write_parquet(tmp_path / "in" / "a.parquet", {"numbers": fixed_lists(given)}, rows=ROWS)
    out = tmp_path / "out"
    status, _, said = ended(on(running, place, out, source=tmp_path / "in"), running.environment)
    assert status == 2
    assert said.startswith(f"penstock: a.parquet, row {ROWS + 3}: the network raised ValueError: thirteen. Mend it, or")
    assert not (out / "_manifest.json").exists()
    assert not (out / ".cluster").exists()


def test_too_few_slots_are_a_sentence(running: Cluster, place: Path, tmp_path: Path) -> None:
    status, _, said = ended(on(running, place, tmp_path / "out", "--processes=5"), running.environment)
    assert status == 2
    assert "5 processes" in said or "fewer than 5 free slots" in said
    assert parts(tmp_path / "out") == 0
    assert not (tmp_path / "out" / "_manifest.json").exists()


def test_the_output_of_another_run_is_refused(running: Cluster, place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "whole", tmp_path / "out")
    options = ("--processes=2", "--reply")
    status, _, said = ended(on(running, place, tmp_path / "out", *options), running.environment)
    assert status == 2
    assert "holds scores with reply False, and now it is True" in said
    assert hashes(tmp_path / "out") == hashes(place / "whole")


def test_sources_are_shipped_to_machines_that_do_not_have_them(running: Cluster, tmp_path: Path) -> None:
    write_doubler(tmp_path, sleep_s=0.01)
    write_numbers(tmp_path / "in", [4 * ROWS], rows=ROWS)
    out = tmp_path / "out"
    with started(on(running, tmp_path, out), running.environment) as process:
        until(lambda: bool(list(out.glob(".cluster/*/units.json"))), process)
        # The tasks have not looked for it yet.
        (tmp_path / "app.py").rename(tmp_path / "away.py")
        _, said = process.communicate(timeout=LIMIT_S / 3)
    assert process.returncode == 0, said[-500:]
    (tmp_path / "away.py").rename(tmp_path / "app.py")
    whole = tmp_path / "whole"
    subprocess.run([*command(tmp_path, tmp_path / "in", whole), "--device=cpu"], check=True, env=environment({}))
    assert hashes(out) == hashes(whole)


@pytest.mark.parametrize(
    ("at", "more", "says"),
    [
        ("slurm", {"SLURM_CONF": os.devnull}, "Slurm's controller does not answer"),
        ("spark://127.0.0.1:9", {}, "no Spark master answers at spark://127.0.0.1:9 (Connection refused)"),
        ("ray", {"RAY_ADDRESS": "127.0.0.1:9"}, "there is no Ray cluster to reach from here"),
    ],
)
def test_a_cluster_that_is_not_there_is_a_sentence(
    at: str, more: dict[str, str], says: str, place: Path, tmp_path: Path
) -> None:
    try:
        there = CLUSTERS[at.partition(":")[0]](tmp_path)
    except NotInstalled as error:
        pytest.skip(str(error))
    given = command(place, place / "in", tmp_path / "out", "--processes=2", "--on", at, python=there.python)
    status, _, said = ended(given, more)
    assert status == 2
    assert says in said
    assert not (tmp_path / "out").exists()


def test_executors_without_torch_are_a_sentence(spark: Cluster, place: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([spark.python, "-m", "venv", "--without-pip", bare], check=True)
    python = {"PYSPARK_PYTHON": str(bare / "bin" / "python")}
    status, _, said = ended(on(spark, place, tmp_path / "out"), {**spark.environment, **python})
    assert status == 2
    assert f"({bare}/bin/python) has no torch" in said or f"({bare}/bin/python) has no penstock and no torch" in said
    assert not (tmp_path / "out" / "_manifest.json").exists()


@pytest.mark.parametrize(
    ("node", "lacks", "says"),
    [
        (1, "bundle", r"without-1 does not see {shared}/bundle; put it into a folder that all machines share\."),
        (1, "in", r"without-1 does not see {shared}/in; put it into a folder that all machines share\."),
        (1, "out", r"without-1 does not see {shared}/out/\.cluster/\w+/job\.json; give an --out in a folder that all"),
        (0, "out", r": n0 does not see {shared}/out/\.cluster/\w+, or cannot write there; give an --out in a folder"),
    ],
)
def test_a_machine_that_does_not_see_a_folder_is_named(
    started_anew: None, tmp_path: Path, node: int, lacks: str, says: str
) -> None:
    shared, local = tmp_path / "shared", tmp_path / "local"
    at = {each: shared if each == lacks else local for each in ("bundle", "in", "out")}
    for each in (shared, local):
        each.mkdir()
    write_doubler(at["bundle"])
    write_numbers(at["in"] / "in", [2 * ROWS], rows=ROWS)
    try:
        with cluster("slurm", unseen=(node, shared)) as slurm:
            given = on(slurm, at["bundle"], at["out"] / "out", source=at["in"] / "in")
            status, _, said = ended(given, slurm.environment)
    except NotInstalled as error:
        pytest.skip(str(error))
    assert status == 2
    assert re.search(says.format(shared=shared), said), said
    assert not list(at["out"].glob("out/*.parquet"))


def test_a_process_of_ray_that_lost_its_gpu_is_not_used_again(ray: Cluster, tmp_path: Path) -> None:
    write_doubler(tmp_path)
    file = tmp_path / "app.py"
    file.write_text(
        file.read_text().replace("            hold(", f"            lose({str(tmp_path)!r}, x)\n            hold(")
    )
    with file.open("a") as sink:
        sink.write(LOSES)
    found = find_application(str(file))
    shutil.rmtree(tmp_path / "bundle")
    Bundle.write(found, found.model(), np.arange(8, dtype=np.float32).reshape(2, 4), to=tmp_path / "bundle")
    given = numbers(UNITS * ROWS)
    given[ROWS + 3] = 11
    write_parquet(tmp_path / "in" / "a.parquet", {"numbers": fixed_lists(given)}, rows=ROWS)
    status, _, said = ended(on(ray, tmp_path, tmp_path / "out"), ray.environment)
    assert status == 0, said
    # Each process that lost its GPU did so once, and scored nothing afterwards.
    assert [file.read_text() for file in tmp_path.glob("lost-*")] == ["once"]
    assert parts(tmp_path / "out") == UNITS


def test_the_executors_of_spark_have_the_cores_of_the_command(spark: Cluster, place: Path, tmp_path: Path) -> None:
    conf = tmp_path / "conf"
    conf.mkdir()
    defaults = "spark.executor.cores 2\nspark.cores.max 4\nspark.task.cpus 2\nspark.dynamicAllocation.enabled true\n"
    (conf / "spark-defaults.conf").write_text(defaults)
    more = {**spark.environment, "SPARK_CONF_DIR": str(conf)}
    status, _, said = ended(on(spark, place, tmp_path / "out"), more)
    assert status == 0, said
    assert hashes(tmp_path / "out") == hashes(place / "whole")


ASKS_FOR_SETTINGS = """
import sys
from penstock.cluster.job import ClusterJob
from penstock.cluster.spark_connection import SparkConnection

job = ClusterJob(token="x", size=1, device="cpu", cores=1, working_folder="", sources={})
conf = SparkConnection(sys.argv[1]).context(job, {"spark.task.maxFailures": "8", "spark.locality.wait": "1s"}).getConf()
print([conf.get(name) for name in ("spark.task.maxFailures", "spark.locality.wait", "spark.executor.cores")])
"""


def test_the_defaults_of_spark_come_before_penstocks(spark: Cluster, tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text("spark.task.maxFailures 3\nspark.executor.cores 2\n")
    done = subprocess.run(
        [str(spark.python), "-c", ASKS_FOR_SETTINGS, spark.on],
        env={**os.environ, **spark.environment, "SPARK_CONF_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['3', '1s', '1']"


@pytest.mark.parametrize("early", [True, False])
def test_the_end_of_sparks_driver_is_a_sentence(spark: Cluster, place: Path, tmp_path: Path, early: bool) -> None:
    """Early is before the executors are there: it needs more of them than there are."""
    out = tmp_path / "out"

    def drivers() -> list[int]:
        return [each for each in descendants(process.pid) if "SparkSubmit" in command_line(each)]

    with started(on(spark, place, out, f"--processes={5 if early else 2}"), spark.environment) as process:
        until(lambda: bool(spark.executors()) if early else parts(out) > 0, process)
        (driver,) = drivers()
        os.kill(driver, signal.SIGKILL)
        _, said = process.communicate(timeout=LIMIT_S / 3)
    assert process.returncode == 2, said
    assert said.splitlines()[-1].startswith("penstock: Spark's driver, a Java process on this machine, has ended;"), (
        said
    )
    assert "Traceback" not in said
    assert not (out / "_manifest.json").exists()
    # The same command goes on.
    status, _, said = ended(on(spark, place, out), spark.environment)
    assert status == 0, said
    assert hashes(out) == hashes(place / "whole")


def test_speculation_gives_each_row_once(started_anew: None, place: Path, tmp_path: Path) -> None:
    given = numbers(6 * ROWS)
    # The first unit is slow, so that the other executor, idle by then, begins it too.
    given[0] = -SLOW_S
    write_parquet(tmp_path / "in" / "a.parquet", {"numbers": fixed_lists(given)}, rows=ROWS)
    conf, log = tmp_path / "conf", tmp_path / "log"
    conf.mkdir()
    log.mkdir()
    events = f"spark.eventLog.enabled true\nspark.eventLog.compress false\nspark.eventLog.dir file://{log}\n"
    (conf / "spark-defaults.conf").write_text(SPECULATION + events)
    try:
        # Spark runs no second attempt on the host of the first one.
        here = Machine(address=own_address())
        network = Network(here=here, nodes=(here, Machine(address=OTHER_HOST)))
        with cluster("spark", network=network) as spark:
            more = {**spark.environment, "SPARK_CONF_DIR": str(conf)}
            status, _, said = ended(on(spark, place, tmp_path / "out", source=tmp_path / "in"), more)
    except NotInstalled as error:
        pytest.skip(str(error))
    assert status == 0, said
    whole = command(place, tmp_path / "in", tmp_path / "whole", "--device=cpu")
    subprocess.run(whole, check=True, env=environment({}))
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")
    ran = "".join(file.read_text() for file in log.rglob("*") if file.is_file())
    assert '"Speculative":true' in ran
