"""Processes and devices of `penstock train`, from options, a launcher's variables and the GPUs of the machine."""

from typing import Any

import pytest

from penstock.cli.launch_options import LaunchOptions, launch_options
from penstock.core.errors import TrainError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def chosen(visible: int = 0, environment: dict[str, str] | None = None, **options: Any) -> LaunchOptions:
    given = {"device": None, "gpus": None, "processes": None, "timeout_s": None} | options
    return launch_options(**given, environment=environment or {}, visible_gpus=lambda: visible)


@pytest.mark.parametrize(
    ("options", "visible", "device", "count"),
    [
        ({}, 0, "cpu", None),
        ({}, 1, "cuda", 1),
        ({}, 8, "cuda", 8),
        ({"device": "cuda"}, 2, "cuda", 2),
        ({"device": "cpu"}, 8, "cpu", None),
        ({"gpus": 1}, 8, "cuda", 1),
        ({"processes": 2}, 8, "cpu", 2),
        ({"device": "cpu", "processes": 2}, 8, "cpu", 2),
    ],
)
def test_all_gpus_train_unless_an_option_says_less(
    options: dict[str, Any], visible: int, device: str, count: int | None
) -> None:
    found = chosen(visible, **options)
    assert (found.device, found.count, found.chosen) == (device, count, bool(options))
    assert found.is_launcher == ((count or 1) > 1)


def test_a_process_of_a_launcher_takes_its_own_gpu() -> None:
    found = chosen(2, TORCHRUN)
    assert found.assignment is not None
    assert (found.device, found.assignment.local_rank, found.assignment.local_size) == ("cuda", 1, 2)
    assert not found.is_launcher
    assert chosen(0, TORCHRUN).device == "cpu"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "--device is 'tpu'; choose cpu or cuda"),
        ({"device": "cuda"}, "torch sees no GPU"),
        ({"device": "cpu", "gpus": 1}, "--device cpu and --gpus 1 contradict each other"),
        ({"device": "cuda", "processes": 2}, "--device cuda and --processes 2 contradict each other"),
        ({"gpus": 4, "environment": TORCHRUN}, "the launcher of this one started 2 on this machine"),
    ],
)
def test_what_contradicts_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainError, match=message):
        chosen(**options)


SLURM = {
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-05,17]",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
}


def test_srun_starts_the_processes_as_torchrun_does() -> None:
    found = chosen(4, SLURM).assignment
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.local_size) == (9, 12, 1, 2)
    assert (found.address, found.port, found.has_own_gpu) == ("gpu03", 16234, False)
    bound = chosen(1, SLURM | {"CUDA_VISIBLE_DEVICES": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"})
    assert bound.assignment is not None
    assert (bound.assignment.address, bound.assignment.port) == ("10.0.0.1", 29501)
    assert bound.assignment.has_own_gpu


def test_a_batch_script_of_slurm_is_one_process() -> None:
    assert chosen(2, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}).assignment is None
    assert chosen(2, {"SLURM_STEP_NUM_TASKS": "1"}).assignment is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-05,17]", "gpu03"), ("n7", "n7"), ("a-1,b-2", "a-1"), ("rack[2]-gpu,x", "rack2-gpu"), ("n[9,11]", "n9")],
)
def test_the_first_host_is_read_from_slurms_list(nodes: str, first: str) -> None:
    found = chosen(0, SLURM | {"SLURM_STEP_NODELIST": nodes}).assignment
    assert found is not None
    assert found.address == first


def test_a_damaged_variable_is_named() -> None:
    with pytest.raises(TrainError, match="the environment has SLURM_PROCID='x'; it must be a whole number"):
        chosen(0, SLURM | {"SLURM_PROCID": "x"})
