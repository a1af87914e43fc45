"""Training in several processes from the command line: the same training, killed, hung, resumed, refused."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import penstock
from penstock.cli import build
from penstock.core.errors import TrainError
from penstock.train.checkpoint.format import newest_checkpoint
from tests.support.serving import free_port
from tests.support.training import APPLICATION, COMMAND, LIMIT_S, fields, losses, penstock_run, workers_of

# Every process imports torch and its optimizers: seconds of a core for each, and minutes where the machine is shared.
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(2 * LIMIT_S)]


# Names of the threads that are left when the interpreter ends.
LAST_THREADS = """

import atexit
import os


@atexit.register
def write_threads():
    if "LAST_THREADS" in os.environ:
        names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
        open(os.environ["LAST_THREADS"], "w").writelines(names)
"""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("app") / "app.py"
    file.write_text(APPLICATION + LAST_THREADS)
    return file


@pytest.fixture(scope="module")
def alone(app: Path) -> Path:
    run = app.parent / "alone"
    done = penstock_run("train", app, "--out", run)
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def together(app: Path) -> Path:
    """Two processes, started as torchrun starts them; some of their steps are profiled."""
    run = app.parent / "together"
    port = free_port()
    processes = [
        subprocess.Popen(
            [*COMMAND, "train", str(app), "--out", str(run), "--checkpoint-every-steps", "20", "--profile", "5"],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            | {"LAST_THREADS": str(app.with_name(f"threads-{rank}"))},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [" ".join(process.communicate(timeout=LIMIT_S)[0].split()) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "Training on 2 processes, each on the CPU, in fp32." in said[0]
    assert "Placement of layers.2: column-parallel." in said[0]
    assert said[1] == ""
    return run


def test_two_processes_train_as_one_does(alone: Path, together: Path) -> None:
    expected, found = losses(alone), losses(together)
    assert len(expected) >= 2
    assert [line[0] for line in found] == [line[0] for line in expected]
    for one, two in zip(expected, found, strict=True):
        assert two == pytest.approx(one, rel=1e-3)
    said = fields(together)
    assert (said["processes"], said["device"], said["state"]) == (2, "cpu", "finished")
    assert said["placements"]["layers.2"]["kind"] == "column-parallel"
    # What is left is whole: bundles and checkpoints of both have the same tensors.
    one, two = penstock.load(alone / "bundle"), penstock.load(together / "bundle")
    inputs = torch.randn(5, 8).numpy()
    assert two.predict(inputs) == pytest.approx(one.predict(inputs), abs=1e-3)
    shapes = [_shapes(newest_checkpoint(run / "checkpoints")) for run in (alone, together)]
    assert shapes[0] == shapes[1]


def test_no_thread_of_the_process_group_is_left_at_the_end(app: Path, together: Path) -> None:
    # Those of gloo would wait for the interpreter's lock while it ends, and abort the process or keep it for ever.
    for rank in range(2):
        names = app.with_name(f"threads-{rank}").read_text().splitlines()
        assert names
        assert not [name for name in names if "gloo" in name or "tcpstore" in name], names


def test_the_breakdown_is_of_both_processes(together: Path) -> None:
    assert (together / "trace.json").exists()
    assert (together / "trace-1.json").exists()
    assert (together / "timeline.svg").exists()
    breakdown = json.loads((together / "step-time.json").read_text())
    assert [len(steps) for steps in breakdown["ranks"]] == [5, 5]
    parts = ("compute", "communication", "imbalance", "input", "launch")
    for step in itertools.chain(*breakdown["ranks"]):
        assert sum(step[f"{name}_ns"] for name in parts) == step["wall_ns"]
        assert step["compute_ns"] > 0
        assert step["communication_ns"] + step["imbalance_ns"] + step["overlapped_ns"] > 0


def _shapes(checkpoint: Any) -> Any:
    model = {name: tensor.shape for name, tensor in checkpoint.state["model"].items()}
    optimizer = {
        index: {name: getattr(value, "shape", None) for name, value in values.items()}
        for index, values in checkpoint.state["optimizer"]["state"].items()
    }
    return checkpoint.step, model, optimizer


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which one process was killed."""
    folder = tmp_path_factory.mktemp("killed")
    app, run = folder / "app.py", folder / "run"
    app.write_text(APPLICATION)
    (folder / "slow").touch()
    command = [*COMMAND, "train", app, "--out", run, "--processes", "2", "--checkpoint-every-steps", "20"]
    with subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True) as process:
        while not list(run.glob("checkpoints/step-*")):
            assert process.poll() is None
            time.sleep(0.005)
        workers = workers_of(run)
        assert workers.keys() == {0, 1}
        os.kill(workers[1], signal.SIGKILL)
        (folder / "slow").unlink()
        said = process.communicate(timeout=LIMIT_S)[1]
        assert process.returncode == 2
    assert f"rank 1 of 2 (process {workers[1]}) was ended by SIGKILL; the others were ended." in said
    assert f"penstock train --resume {run}" in said
    assert "Traceback" not in said
    assert fields(run)["state"] == "running"
    return run


def test_one_that_is_killed_ends_the_run_and_the_run_goes_on_exactly(together: Path, killed: Path) -> None:
    run = killed.with_name("resumed")
    shutil.copytree(killed, run)
    resumed = penstock_run("train", "--resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert fields(run)["parameter_hash"] == fields(together)["parameter_hash"]
    assert losses(run) == losses(together)


def test_a_run_goes_on_with_another_number(alone: Path, killed: Path) -> None:
    run = killed.with_name("by one")
    shutil.copytree(killed, run)
    resumed = penstock_run("train", "--resume", run, "--processes", 1)
    assert resumed.returncode == 0, resumed.stderr
    assert fields(run)["processes"] == 1
    for one, other in zip(losses(alone), losses(run), strict=True):
        assert other == pytest.approx(one, rel=1e-3)


@pytest.mark.slow
def test_a_placement_that_does_not_fit_another_number_is_refused_and_the_run_stays(killed: Path) -> None:
    run = killed.with_name("by three")
    shutil.copytree(killed, run)
    refused = penstock_run("train", "--resume", run, "--processes", 3)
    assert refused.returncode == 2
    assert "'layers.6' has 4 outputs, which do not divide by 3 processes" in refused.stderr
    assert "Traceback" not in refused.stderr
    resumed = penstock_run("train", "--resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert (fields(run)["processes"], fields(run)["state"]) == (2, "finished")


@pytest.mark.slow
def test_a_data_parallel_run_of_two_goes_on_with_three(tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    # Batches of 30 over 200 examples, the last of 20: neither two nor three processes have equal shares of all.
    text = re.sub(r"    parallel=Parallel\(.*?\n    \),\n", "", APPLICATION, flags=re.DOTALL)
    # A schedule that may become longer.
    app.write_text(re.sub(r"    schedule=.*\n", "", text))
    assert "placements=" not in app.read_text()
    for name, first, then in (("alone", 1, 1), ("other", 2, 3)):
        for steps, processes in ((30, first), (60, then)):
            done = penstock_run("train", app, "--out", tmp_path / name, "--steps", steps, "--processes", processes)
            assert done.returncode == 0, done.stderr
    one, other = tmp_path / "alone", tmp_path / "other"
    assert [fields(run)["processes"] for run in (one, other)] == [1, 3]
    assert len(losses(one)) == len(losses(other)) >= 2
    for expected, found in zip(losses(one), losses(other), strict=True):
        assert found == pytest.approx(expected, rel=1e-3)


def test_one_that_hangs_is_waited_for_so_long_and_no_longer() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    said = " ".join(done.stderr.split())
    assert "PeersLost: rank 0 of 2 waited in the all-gather of fc for the other processes, which did not arrive" in said


# Rank 1 comes, and then does nothing any more.
HANGS = """
import multiprocessing, socket, sys, time, torch
from penstock.train.parallel.collectives import all_gather_rows
from penstock.train.parallel.rank_assignment import RankAssignment
from penstock.train.parallel.world import join_world

def seat(rank, port):
    return RankAssignment(rank=rank, size=2, local_rank=rank, local_size=2, address="127.0.0.1", port=port)

def hang(port):
    with join_world(seat(1, port), torch.device("cpu")) as world:
        world.sum_counts({"a": 1, "only here": 2})
        time.sleep(600)

with socket.socket() as place:
    place.bind(("127.0.0.1", 0))
    port = place.getsockname()[1]
other = multiprocessing.get_context("fork").Process(target=hang, args=(port,), daemon=True)
other.start()
try:
    with join_world(seat(0, port), torch.device("cpu"), 3.0) as world:
        assert world.sum_counts({"a": 3}) == {"a": 4, "only here": 2}
        all_gather_rows(world, "fc", torch.zeros(2, 2))
finally:
    other.kill()
"""


def test_mistakes_are_said_in_a_sentence(app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mistakes: list[tuple[tuple[object, ...], dict[str, str], str]] = [
        (("--gpus", 2, "--processes", 2), {}, "--gpus 2 and --processes 2 contradict each other"),
        (("--processes", 0), {}, "0 processes are requested; give at least 1"),
        (("--processes", 100_000), {}, "100,000 processes are requested, too many for the"),
        (("--timeout-s", 0), {}, "--timeout-s is 0; it must be above 0"),
        (("--processes", 3), {"RANK": "0", "WORLD_SIZE": "2"}, "the launcher of this one started 2 on this machine"),
        ((), {"RANK": "one", "WORLD_SIZE": "2"}, "the environment has RANK='one'; it must be a whole number"),
        ((), {"RANK": "2", "WORLD_SIZE": "2"}, "the environment says rank 2 of 2"),
    ]
    for arguments, environment, sentence in mistakes:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            done = CliRunner().invoke(
                build(), ["train", str(app), "--out", str(tmp_path / "run"), *map(str, arguments)]
            )
        assert isinstance(done.exception, TrainError), done.output
        assert sentence in str(done.exception)
