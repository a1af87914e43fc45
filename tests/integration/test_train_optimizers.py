"""LARS and LAMB over two processes, their weights cut in every way, and Muon: the steps and checkpoints of one process.

python -m tests.integration.test_train_optimizers RANK SIZE PORT FOLDER   one process
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.acceptance.train.parity import SmallConvNet
from penstock.train.checkpoint.format import newest_checkpoint
from penstock.train.checkpoint.lazy_tensors import read_tensors
from penstock.train.checkpoint.saver import Saver
from penstock.train.history import History, restore_checkpoint, save_checkpoint
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.parallel.rank_assignment import RankAssignment
from penstock.train.parallel.world import World, join_world
from penstock.train.placement import Placement
from penstock.train.recipe import ArraySet, Data, EMASettings, Parallel, Recipe
from penstock.train.step.declared_optimizer import Optimizer
from penstock.train.step.optimizers import LAMB, LARS
from penstock.train.trainer import Trainer
from tests.support.serving import free_port

# Two processes that import torch: seconds of a core for each.
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

LIMIT_S = 240
STEPS, BATCH = 4, 15
# What is left of float64: a loss over classes has its smoothing in float32.
TOLERANCE = 1e-6
INPUTS = np.random.default_rng(0).normal(size=(BATCH, 3, 8, 8))
LABELS = np.random.default_rng(1).integers(0, 12, BATCH)
MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LARS": lambda weights: LARS(weights, lr=0.5, trust=0.01),
    "LAMB": lambda weights: LAMB(weights, lr=0.02),
    "LAMB of vectors too": lambda weights: LAMB(weights, lr=0.02, exclude_vectors=False),
    "Muon": Optimizer("muon", lr=0.02, others=("head",)),
}
PLACEMENTS: dict[str, dict[str, Placement]] = {
    "data": {},
    "tensor-parallel": {
        "classifier.1": Placement(kind="column-parallel"),
        "classifier.4": Placement(kind="row-parallel"),
    },
    "model and vocab-parallel": {"classifier.1": Placement(kind="model"), "head": Placement(kind="vocab-parallel")},
    # Nine filters: the processes have parts of different sizes.
    "fully-sharded": {
        "features": Placement(kind="fully-sharded"),
        "head": Placement(kind="fully-sharded", activation_checkpointing=True),
    },
}
# Muon needs whole matrices.
CASES = [(name, placed) for name in MAKES for placed in PLACEMENTS if name != "Muon" or placed == "data"]


def trainer(case: tuple[str, str], world: World) -> Trainer:
    name, placed = case
    torch.manual_seed(0)
    nothing = ArraySet(inputs=np.zeros(1), targets=np.zeros(1))
    recipe = Recipe(
        data=lambda: Data(train=nothing, validation=nothing),
        loss=CrossEntropy(0.1),
        optimizer=MAKES[name],
        batch_size=BATCH,
        steps=STEPS + 1,
        parallel=Parallel(batch_norm="synchronized", placements=PLACEMENTS[placed]),
        ema=EMASettings(decay=0.9, warm_up=True),
    )
    # In float64 hardly more than mistakes is left.
    return Trainer(SmallConvNet(0.0).double(), recipe, STEPS + 1, world, inputs=INPUTS)


def take(one: Trainer, first: int, steps: int, place: Path) -> None:
    for step in range(first, first + steps):
        one.step((torch.from_numpy(INPUTS[one.rows]), torch.from_numpy(LABELS[one.rows])), step)
    with Saver(place, one.world) as saver:
        save_checkpoint(saver, one, History(step=first + steps))


def go_on(case: tuple[str, str], world: World, start: Path, place: Path) -> None:
    checkpoint = newest_checkpoint(start)
    assert checkpoint is not None
    other = trainer(case, world)
    restore_checkpoint(checkpoint, other)
    take(other, STEPS, 1, place)


def tensors(place: Path) -> dict[str, Tensor]:
    checkpoint = newest_checkpoint(place)
    assert checkpoint is not None
    found: dict[str, Tensor] = {}
    for part in ("model", "ema", "optimizer"):
        _collect(read_tensors(checkpoint.state[part]), part, found)
    return found


def _collect(value: Any, path: str, found: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        found[path] = value
    for name, item in value.items() if isinstance(value, Mapping) else ():
        _collect(item, f"{path}/{name}", found)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each case by one process and by two, which go on from one another's checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for case in CASES:
        one = trainer(case, World())
        take(one, 0, STEPS, folder / json.dumps([*case, "one"]))
        take(one, STEPS, 1, folder / json.dumps([*case, "one, on"]))
    port = free_port()
    command = [sys.executable, "-m", "tests.integration.test_train_optimizers"]
    processes = [subprocess.Popen([*command, str(rank), "2", str(port), str(folder)]) for rank in range(2)]
    try:
        assert [process.wait(LIMIT_S) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    for case in CASES:
        go_on(case, World(), folder / json.dumps([*case, "two"]), folder / json.dumps([*case, "two, on by one"]))
    torch.set_num_threads(threads)
    return folder


@pytest.mark.parametrize("case", CASES, ids=", ".join)
@pytest.mark.parametrize(
    ("right", "found"), [("one", "two"), ("one, on", "one, on by two"), ("one, on", "two, on by one")]
)
def test_two_processes_step_as_one_does(runs: Path, case: tuple[str, str], right: str, found: str) -> None:
    one, two = (tensors(runs / json.dumps([*case, name])) for name in (right, found))
    assert one.keys() == two.keys()
    assert any("momentum_buffer" in name or "exp_avg" in name for name in one)
    errors = {name: (two[name] - tensor).double().norm() / tensor.double().norm() for name, tensor in one.items()}
    assert {name: error.item() for name, error in errors.items() if not error <= TOLERANCE} == {}


def test_a_step_is_long_enough_to_be_seen(runs: Path) -> None:
    for case in CASES:
        one, on = (tensors(runs / json.dumps([*case, name])) for name in ("one", "one, on"))
        weights = [name for name in one if name.startswith("model/") and name.endswith("weight")]
        for name in weights:
            assert (on[name] - one[name]).norm() > 1e-5 * one[name].norm(), (case, name)


def main(rank: int, size: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    seat = RankAssignment(rank=rank, size=size, local_rank=rank, local_size=size, address="127.0.0.1", port=port)
    with join_world(seat, torch.device("cpu"), LIMIT_S) as world:
        for case in CASES:
            take(trainer(case, world), 0, STEPS, folder / json.dumps([*case, "two"]))
            start = folder / json.dumps([*case, "one"])
            go_on(case, world, start, folder / json.dumps([*case, "one, on by two"]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), folder=Path(sys.argv[4]))
