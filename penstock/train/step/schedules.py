"""Learning-rate schedules with a linear warm-up, for `Recipe.schedule`.

Goyal et al. 2017, "Accurate, large minibatch SGD", section 2.2.
"""

import math
from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from penstock.core.errors import TrainError

MakeSchedule = Callable[[Optimizer, int], LRScheduler]


def warm_up_cosine(warm_up: float = 0.05, last: float = 0.0) -> MakeSchedule:
    """Linear warm-up to the optimizer's rate, then cosine decay: Loshchilov and Hutter 2017, "SGDR", equation 5.

    Args:
        warm_up: Share of the steps until the optimizer's rate is reached.
        last: Final rate, as a share of the optimizer's.

    Raises:
        TrainError: A share is not from 0 to 1.
    """
    _check_share("warm_up", warm_up)
    _check_share("last", last)
    return partial(_warm_up_cosine, warm_up=warm_up, last=last)


def warm_up_steps(
    warm_up: float = 0.05, *, at: tuple[float, ...] = (1 / 3, 2 / 3, 8 / 9), factor: float = 0.1
) -> MakeSchedule:
    """Linear warm-up to the optimizer's rate, then decay by a factor at given points.

    Args:
        warm_up: Share of the steps until the optimizer's rate is reached.
        at: Shares of the steps at which the rate falls; by default 30, 60 and 80 of 90 epochs.
        factor: Factor of the rate at each of them.

    Raises:
        TrainError: A share is not from 0 to 1, or the factor not above 0.
    """
    _check_steps(warm_up, at, factor)
    return partial(_warm_up_steps, warm_up=warm_up, at=at, factor=factor)


def check_schedule(schedule: LRScheduler | None) -> None:
    """Check that a schedule depends on the step's number alone.

    Args:
        schedule: The result of `Recipe.schedule`; None if the recipe has none.

    Raises:
        TrainError: The schedule depends on a metric.
    """
    if isinstance(schedule, ReduceLROnPlateau):
        raise TrainError(
            "the recipe's schedule is ReduceLROnPlateau, which depends on a metric; a schedule must depend on the "
            "step's number alone. Use a Schedule, such as Schedule('cosine'), or another of torch.optim.lr_scheduler."
        )


# Functions of their own, so that `functools.partial` shows their settings: `penstock train --set schedule.warm_up=0.1`.


def _warm_up_cosine(optimizer: Optimizer, steps: int, *, warm_up: float = 0.05, last: float = 0.0) -> LRScheduler:
    _check_share("warm_up", warm_up)
    _check_share("last", last)
    rising = round(warm_up * steps)
    return with_warm_up(optimizer, steps, rising, lambda done: last + (1 - last) * (1 + math.cos(math.pi * done)) / 2)


def _warm_up_steps(
    optimizer: Optimizer,
    steps: int,
    *,
    warm_up: float = 0.05,
    at: tuple[float, ...] = (1 / 3, 2 / 3, 8 / 9),
    factor: float = 0.1,
) -> LRScheduler:
    _check_steps(warm_up, at, factor)

    def after(done: float) -> float:
        passed = warm_up + done * (1 - warm_up)
        return factor ** sum(passed >= share - 1e-9 for share in at)

    return with_warm_up(optimizer, steps, round(warm_up * steps), after)


def with_warm_up(
    optimizer: Optimizer,
    steps: int,
    rising: int,
    after: Callable[[float], float],
    before: Callable[[float], float] | None = None,
) -> LRScheduler:
    """Make a schedule of a warm-up and what follows it.

    Args:
        optimizer: Its rates are those at the end of the warm-up.
        steps: Number of steps.
        rising: Steps of the warm-up.
        after: Factor of the rate, by the share of the other steps that is done.
        before: Factor of the rate, by the share of the warm-up that is done; None for a linear one.
    """

    def factor(step: int) -> float:
        # The rate of the first step is above 0, or the step would learn nothing.
        if step < rising:
            return (step + 1) / rising if before is None else before(step / rising)
        return after(min(1.0, (step - rising) / max(1, steps - rising)))

    return LambdaLR(optimizer, factor)


def _check_steps(warm_up: float, at: tuple[float, ...], factor: float) -> None:
    for name, share in (("warm_up", warm_up), *(("at", share) for share in at)):
        _check_share(name, share)
    if not factor > 0:
        raise TrainError(f"the schedule has factor {factor}; it must be above 0.")


def _check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise TrainError(f"the schedule has {name} {share}; it must be a share of the steps, from 0 to 1.")
