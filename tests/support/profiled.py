"""Real steps of a trainer, some of them profiled."""

from pathlib import Path

from penstock.train.data.loader import Loader
from penstock.train.profile.profiler import Profile
from penstock.train.profile.step_time import StepTimeBreakdown
from penstock.train.trainer import Trainer


def profiled(trainer: Trainer, feed: Loader, steps: int, folder: Path) -> StepTimeBreakdown | None:
    """Take steps and profile some of them; return the breakdown in the first process."""
    watch = Profile(trainer.world, steps, trainer.recipe.batch_size, folder)
    breakdown: StepTimeBreakdown | None = None
    for step in range(watch.steps_needed):
        watch.step(trainer, feed, step)
        breakdown = watch.taken()
    return breakdown
