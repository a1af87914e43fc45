"""Checkpoints of several forks of one process: `python -m tests.support.checkpoints HOW FOLDER`."""

import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.core.application import Application
from penstock.core.errors import TrainError
from penstock.core.spec import TensorSpec
from penstock.runtime.load import as_found
from penstock.train.checkpoint import saver as saver_module
from penstock.train.checkpoint.format import newest_checkpoint, write_blocks
from penstock.train.checkpoint.saver import Saver
from penstock.train.history import History, restore_checkpoint, save_checkpoint
from penstock.train.parallel.launch import held_port
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.parallel.rank_assignment import RankAssignment
from penstock.train.parallel.world import World, join_world
from penstock.train.placement import Placement
from penstock.train.recipe import (
    ArraySet,
    CheckpointPolicy,
    Data,
    EMASettings,
    Parallel,
    Recipe,
    Selection,
    StepExecution,
)
from penstock.train.run import train
from penstock.train.trainer import Trainer

LIMIT_S = 120.0
PROCESSES = 4
RNG = np.random.default_rng(0)
INPUTS, TARGETS = RNG.normal(size=(24, 8)).astype(np.float32), RNG.integers(0, 4, 24)
SET = ArraySet(inputs=INPUTS, targets=TARGETS)

# Every way to lay a layer, buffers that are no parameters, rows that do not divide, an EMA of the weights.
RECIPE = Recipe(
    data=lambda: Data(train=SET, validation=SET),
    loss=CrossEntropy(0.1),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    schedule=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps + 1),
    batch_size=12,
    steps=10_000,
    ema=EMASettings(decay=0.9),
    execution=StepExecution(threads=1),
    parallel=Parallel(
        placements={
            "0": Placement(kind="fully-sharded"),
            "3": Placement(kind="column-parallel"),
            "5": Placement(kind="row-parallel"),
            "7": Placement(kind="vocab-parallel"),
        }
    ),
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(8, 18), nn.BatchNorm1d(18), nn.Tanh(), nn.Linear(18, 24), nn.ReLU(), nn.Linear(24, 18)),
        *(nn.Tanh(), nn.Linear(18, 4)),
    )


def made(world: World) -> Trainer:
    return Trainer(network(), RECIPE, 10, world, inputs=INPUTS[:2])


def step(trainer: Trainer, history: History) -> None:
    own = np.arange(12)[trainer.rows]
    trainer.step((torch.from_numpy(INPUTS[own]), torch.from_numpy(TARGETS[own])), history.step)
    history.step += 1


def together(size: int, run: Callable[[World], None]) -> list[BaseProcess]:
    """Start processes as forks of this one, so that torch is imported once."""
    processes: list[BaseProcess] = []

    def one(rank: int, port: int) -> None:
        seat = RankAssignment(rank=rank, size=size, local_rank=rank, local_size=size, address="127.0.0.1", port=port)
        with join_world(seat, torch.device("cpu"), LIMIT_S) as world:
            run(world)

    # The forks hold the port, too.
    with held_port() as port:
        for rank in range(size):
            process = multiprocessing.get_context("fork").Process(target=one, args=(rank, port), daemon=True)
            process.start()
            processes.append(process)
    return processes


def done(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(LIMIT_S)
        assert process.exitcode == 0, process.exitcode


def sizes(folder: Path) -> None:
    """Write a checkpoint with four processes; restore and rewrite it with one, two and four."""

    def write(world: World) -> None:
        trainer, history = made(world), History()
        with Saver(folder / "first", world) as saver:
            for number in range(3):
                step(trainer, history)
                if number == 1:
                    history.keep_best(trainer, {"loss": 0.5})
            save_checkpoint(saver, trainer, history)

    def rewrite(world: World) -> None:
        trainer = made(world)
        checkpoint = newest_checkpoint(folder / "first", world)
        assert checkpoint is not None
        history = restore_checkpoint(checkpoint, trainer)
        with Saver(folder / f"by-{world.size}", world) as saver:
            save_checkpoint(saver, trainer, history)
            step(trainer, history)

    done(together(PROCESSES, write))
    for size in (1, 2, PROCESSES):
        done(together(size, rewrite))


def full(folder: Path) -> None:
    """Fill the disk of one process at its third checkpoint; record the error of each process."""
    application = Application(
        name="full",
        input=TensorSpec(dtype="float32", shape=(8,), meaning="eight numbers"),
        output=TensorSpec(dtype="float32", shape=(4,), meaning="four logits", name="logits"),
        model=network,
    )
    recipe = replace(RECIPE, checkpoints=CheckpointPolicy(every_steps=2), selection=Selection(every_epochs=9999.0))

    def run(world: World) -> None:
        calls: list[Any] = []

        def writes(*arguments: Any) -> dict[str, Any]:
            calls.append(arguments)
            if len(calls) == 3 and world.rank == 2:
                raise OSError(28, "No space left on device", "state-00002.safetensors")
            return write_blocks(*arguments)

        setattr(saver_module, "write_blocks", writes)  # noqa: B010
        try:
            train(as_found(application), folder / "run", recipe, overrides={}, quiet=True, world=world)
        except TrainError as error:
            (folder / f"said-{world.rank}").write_text(str(error))

    done(together(PROCESSES, run))


def killed(folder: Path) -> None:
    """Kill all processes while two have written their part of the second checkpoint and two have not."""

    def run(world: World) -> None:
        trainer, history, calls = made(world), History(), []

        def writes(*arguments: Any) -> dict[str, Any]:
            calls.append(arguments)
            if len(calls) == 2 and world.rank >= 2:
                (folder / f"writes-{world.rank}").touch()
                time.sleep(LIMIT_S)
            return write_blocks(*arguments)

        setattr(saver_module, "write_blocks", writes)  # noqa: B010
        with Saver(folder / "run", world) as saver:
            for _ in range(2):
                step(trainer, history)
                save_checkpoint(saver, trainer, history)

    processes = together(PROCESSES, run)
    until = time.monotonic() + LIMIT_S
    awaited = [*(f"writes-{rank}" for rank in (2, 3)), *(f"run/.step-*2-*/state-0000{rank}.*" for rank in (0, 1))]
    while not all(list(folder.glob(name)) for name in awaited):
        assert time.monotonic() < until
        time.sleep(0.01)
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()


def each(folder: Path) -> None:
    """Kill the writer at its first call to the file system, at its second, and so on; check what is left."""
    before = folder / "before"
    with Saver(before, World()) as saver:
        for number in (1, 2):
            saver.save(number, _state(number), {"best": 1})
    survived, at = False, 0
    while not survived:
        at += 1
        left = folder / str(at)
        shutil.copytree(before, left)
        child = os.fork()
        if child == 0:
            _save_until(at, left)
        survived = os.waitpid(child, 0)[1] == 0
        found = newest_checkpoint(left)
        assert found is not None, at
        assert found.state["x"].whole().unique().tolist() == [found.step], (at, found.step)
        assert found.step == 4 if survived else found.step in (2, 3, 4), (at, found.step)
        Saver(left, World())
        assert not list(left.glob(".*")), at
    sys.stdout.write(f"{at}\n")


def _state(number: int) -> dict[str, Any]:
    return {"x": torch.full((1000,), float(number)), "best": torch.ones(3)}


def _save_until(at: int, folder: Path) -> None:
    """Save two checkpoints, and kill this process at its call number `at` to the file system."""
    asked = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal asked
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link") and "step-" in str(arguments):
            asked += 1
            if asked == at:
                os.kill(os.getpid(), signal.SIGKILL)

    saver = Saver(folder, World())
    sys.addaudithook(hook)
    for number in (3, 4):
        saver.save(number, _state(number), {"best": 1})
        saver.wait()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # What an optimizer imports when it is made takes seconds: once, and not in each process.
    RECIPE.optimizer([nn.Parameter(torch.zeros(1))])
    {"sizes": sizes, "full": full, "killed": killed, "each": each}[sys.argv[1]](Path(sys.argv[2]))
