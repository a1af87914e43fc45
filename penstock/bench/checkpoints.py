"""Wall time that a training loses to a checkpoint: steps with one being written and steps without, in turn."""

import tempfile
import time
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.errors import BenchError
from penstock.train.checkpoint import newest_checkpoint
from penstock.train.looks import Looks
from penstock.train.losses import CrossEntropy
from penstock.train.numerics import numerics
from penstock.train.recipe import ArraySet, Data, Recipe
from penstock.train.saver import Saver
from penstock.train.trainer import History, Trainer
from penstock.train.world import World, device_of, joined

REPEAT = 5
PART_S = 8.0
EVERY_S = 60.0
WARM_STEPS = 10
# By how much steps before and after may differ: half of that, of the seconds measured, is the error.
SPREAD = 0.05
BATCH, FEATURES, WIDTH, CLASSES = 16, 2048, 4096, 1000


def lost_fractions() -> list[float]:
    """The share of a minute that a checkpoint costs the steps, of several."""
    nothing = ArraySet(inputs=np.zeros(1), targets=np.zeros(1))
    recipe = Recipe(
        data=lambda: Data(train=nothing, validation=nothing),
        loss=CrossEntropy(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
        batch_size=BATCH,
        steps=1,
        deterministic=False,
    )
    device = device_of(None, cuda=torch.cuda.is_available())
    with (
        tempfile.TemporaryDirectory(prefix="penstock-checkpoints-") as name,
        joined(None, device) as world,
        numerics(recipe),
        Saver(Path(name), world) as saver,
    ):
        return _Measured(recipe, world, saver, Path(name)).lost()


def _network() -> nn.Module:
    """63 million weights, as many as AlexNet has."""
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        *(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())),
        nn.Linear(WIDTH, CLASSES),
    )


@final
class _Measured:
    """A training that takes the same step again and again, and looks at it as the loop does."""

    def __init__(self, recipe: Recipe, world: World, saver: Saver, folder: Path) -> None:
        inputs = np.random.default_rng(0).normal(size=(BATCH, FEATURES)).astype(np.float32)
        self._trainer = Trainer(_network(), recipe, 1, world, inputs=inputs[:2])
        self._batch = torch.from_numpy(inputs).to(world.device), torch.arange(BATCH, device=world.device)
        self._saver, self._folder = saver, folder
        self._looks = Looks(world)
        self._history = History()

    def lost(self) -> list[float]:
        """Of a minute for each checkpoint."""
        for _ in range(WARM_STEPS):
            self._take()
        self._look()
        found: list[float] = []
        before_s = self._step_s()
        for _ in range(REPEAT):
            # The worst there is: the best weights are others each time, so that they are copied and written too.
            self._trainer.keep_best(self._history, {"loss": 0.0})
            state = self._trainer.module.state_dict()
            expected = {name: tensor.detach().clone() for name, tensor in state.items()}
            steps, seconds = self._with_checkpoint()
            self._check(expected)
            after_s = self._step_s()
            if abs(after_s - before_s) > SPREAD * min(before_s, after_s):
                raise BenchError(
                    f"a step took {1e3 * before_s:.3g} ms before a checkpoint and {1e3 * after_s:.3g} ms after it, so "
                    f"that what it cost cannot be told; measure on a machine that does nothing else."
                )
            found.append((seconds - steps * (before_s + after_s) / 2) / EVERY_S)
            before_s = after_s
        return found

    def _step_s(self) -> float:
        """Of a step while nothing is written."""
        steps, seconds = self._run(time.perf_counter())
        return seconds / steps

    def _with_checkpoint(self) -> tuple[int, float]:
        started = time.perf_counter()
        # What the loop asks before each.
        if not self._trainer.is_finite():
            raise BenchError("the weights that are saved are not finite; there is nothing to compare.")
        self._trainer.save(self._saver, self._history)
        return self._run(started)

    def _run(self, started: float) -> tuple[int, float]:
        """Steps for some seconds, and until nothing is written any more."""
        before = self._history.step
        while True:
            self._take()
            if not self._looks.are_due:
                continue
            self._look()
            seconds = time.perf_counter() - started
            if seconds > EVERY_S:
                raise BenchError(f"a checkpoint takes longer than the {EVERY_S:g} s between two; the disk is too slow.")
            if seconds >= PART_S and not self._saver.is_busy:
                return self._history.step - before, seconds

    def _take(self) -> None:
        self._looks.taken(self._trainer.step(self._batch, self._history.step))
        self._history.step += 1

    def _look(self) -> None:
        if self._looks.look(asked=False, due=False, failed=self._saver.has_failed).failed:
            self._saver.check()

    def _check(self, expected: dict[str, Tensor]) -> None:
        """What was written must be what was there when it was asked for, whatever the steps did meanwhile."""
        self._saver.wait()
        checkpoint = newest_checkpoint(self._folder)
        if checkpoint is None:
            raise BenchError("no checkpoint was written; no figure is given.")
        for group in (checkpoint.state["model"], checkpoint.state["best"]["weights"]):
            if not all(torch.equal(group[name].whole(), tensor.cpu()) for name, tensor in expected.items()):
                raise BenchError("a checkpoint has other weights than were asked for; no figure is given.")
