"""Wall time that training loses to a checkpoint: steps with and without a checkpoint being written, in alternation."""

import tempfile
import time
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.errors import BenchError
from penstock.train.checkpoint.format import newest_checkpoint
from penstock.train.checkpoint.saver import Saver
from penstock.train.history import History, save_checkpoint
from penstock.train.numerics import numerics
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.parallel.world import World, device_of, join_world
from penstock.train.recipe import ArraySet, Data, Recipe, StepExecution
from penstock.train.step.host_sync import HostSync
from penstock.train.trainer import Trainer

REPEAT = 5
PART_S = 8.0
EVERY_S = 60.0
WARM_STEPS = 10
# Allowed difference between steps before and after; half of it, times the measured seconds, is the error.
SPREAD = 0.05
BATCH, FEATURES, WIDTH, CLASSES = 16, 2048, 4096, 1000


def lost_fractions() -> list[float]:
    """Return the share of a minute that each of several checkpoints costs."""
    nothing = ArraySet(inputs=np.zeros(1), targets=np.zeros(1))
    recipe = Recipe(
        data=lambda: Data(train=nothing, validation=nothing),
        loss=CrossEntropy(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
        batch_size=BATCH,
        steps=1,
        execution=StepExecution(deterministic=False),
    )
    device = device_of(None, cuda=torch.cuda.is_available())
    with (
        tempfile.TemporaryDirectory(prefix="penstock-checkpoints-") as name,
        join_world(None, device) as world,
        numerics(recipe),
        Saver(Path(name), world) as saver,
    ):
        return _StallMeasurement(recipe, world, saver, Path(name)).lost()


def _network() -> nn.Module:
    """63 million weights, as many as AlexNet has."""
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        *(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())),
        nn.Linear(WIDTH, CLASSES),
    )


@final
class _StallMeasurement:
    """A training that repeats one step, with the host synchronizations of the training loop."""

    def __init__(self, recipe: Recipe, world: World, saver: Saver, folder: Path) -> None:
        inputs = np.random.default_rng(0).normal(size=(BATCH, FEATURES)).astype(np.float32)
        self._trainer = Trainer(_network(), recipe, 1, world, inputs=inputs[:2])
        self._batch = torch.from_numpy(inputs).to(world.device), torch.arange(BATCH, device=world.device)
        self._saver, self._folder = saver, folder
        self._sync = HostSync(world)
        self._history = History()

    def lost(self) -> list[float]:
        """Return the share of a minute for each checkpoint."""
        for _ in range(WARM_STEPS):
            self._take()
        self._look()
        found: list[float] = []
        before_s = self._step_s()
        for _ in range(REPEAT):
            # The worst case: the best weights change each time, so that they are copied and written too.
            self._history.keep_best(self._trainer, {"loss": 0.0})
            state = self._trainer.module.state_dict()
            expected = {name: tensor.detach().clone() for name, tensor in state.items()}
            steps, seconds = self._with_checkpoint()
            self._check(expected)
            after_s = self._step_s()
            if abs(after_s - before_s) > SPREAD * min(before_s, after_s):
                raise BenchError(
                    f"a step took {1e3 * before_s:.3g} ms before a checkpoint and {1e3 * after_s:.3g} ms after it, too "
                    f"different to measure its cost; use an idle machine."
                )
            found.append((seconds - steps * (before_s + after_s) / 2) / EVERY_S)
            before_s = after_s
        return found

    def _step_s(self) -> float:
        steps, seconds = self._run(time.perf_counter())
        return seconds / steps

    def _with_checkpoint(self) -> tuple[int, float]:
        started = time.perf_counter()
        # The training loop checks this before each checkpoint.
        if not self._trainer.is_finite():
            raise BenchError("the saved weights are not finite and cannot be compared; lower the learning rate.")
        save_checkpoint(self._saver, self._trainer, self._history)
        return self._run(started)

    def _run(self, started: float) -> tuple[int, float]:
        """Take steps for some seconds and until the checkpoint is written."""
        before = self._history.step
        while True:
            self._take()
            if not self._sync.is_due:
                continue
            self._look()
            seconds = time.perf_counter() - started
            if seconds > EVERY_S:
                raise BenchError(f"a checkpoint takes longer than the {EVERY_S:g} s between two; the disk is too slow.")
            if seconds >= PART_S and not self._saver.is_busy:
                return self._history.step - before, seconds

    def _take(self) -> None:
        self._sync.step_taken(self._trainer.step(self._batch, self._history.step))
        self._history.step += 1

    def _look(self) -> None:
        if self._sync.wait(stops=False, due=False, failed=self._saver.has_failed).failed:
            self._saver.check()

    def _check(self, expected: dict[str, Tensor]) -> None:
        """Compare the written weights with those at the time of the request."""
        self._saver.wait()
        checkpoint = newest_checkpoint(self._folder)
        if checkpoint is None:
            raise BenchError("no checkpoint was written; no figure is given.")
        for group in (checkpoint.state["model"], checkpoint.state["best"]["weights"]):
            if not all(torch.equal(group[name].whole(), tensor.cpu()) for name, tensor in expected.items()):
                raise BenchError("a checkpoint has other weights than at the time of its request; no figure is given.")
