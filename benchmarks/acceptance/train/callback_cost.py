"""Time of a training with a callback for each step over that without, in alternation."""

from typing import final

import numpy as np
from torch import nn

from penstock.train.callbacks.callback import Callback, StepTaken
from penstock.train.fit import fit
from penstock.train.recipe import StepExecution

PAIRS, STEPS, BATCH, FEATURES, WIDTH, CLASSES = 15, 1500, 64, 784, 256, 10


@final
class _KeepsLosses(Callback):
    """Look at the time and keep the losses that are known, as a logger does in each step."""

    def __init__(self) -> None:
        self.steps = 0
        self.losses: list[float] = []
        self.latest_s = 0.0

    def step(self, event: StepTaken) -> None:
        self.steps += 1
        self.latest_s = event.time_s
        self.losses.extend(event.losses)


def cost_ratios() -> list[float]:
    """Return the seconds of a training with the callback over those without, of each pair of trainings."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(BATCH * 64, FEATURES)).astype(np.float32)
    targets = rng.integers(0, CLASSES, len(inputs))
    network = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

    def seconds(callbacks: list[Callback]) -> float:
        fitted = fit(
            network,
            (inputs, targets),
            steps=STEPS,
            batch_size=BATCH,
            callbacks=callbacks,
            quiet=True,
            execution=StepExecution(threads=1),
        )
        return fitted.seconds

    seconds([])
    ratios: list[float] = []
    for pair in range(PAIRS):
        kept = _KeepsLosses()
        # The order changes, because a machine may slow down or speed up meanwhile.
        if pair % 2:
            without_s, with_s = seconds([]), seconds([kept])
        else:
            with_s, without_s = seconds([kept]), seconds([])
        assert (kept.steps, len(kept.losses)) == (STEPS, STEPS)
        ratios.append(with_s / without_s)
    return ratios
