"""Learning-rate schedules that begin with a warm-up, for `Recipe.schedule`.

Goyal et al. 2017, "Accurate, large minibatch SGD", section 2.2: a large rate is reached over the first steps, not at
once.
"""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from penstock.core.errors import TrainError

Schedule = Callable[[Optimizer, int], LRScheduler]


def warm_up_cosine(warm_up: float = 0.05, last: float = 0.0) -> Schedule:
    """Up in a line to the optimizer's rate, then down by half a cosine: Loshchilov and Hutter 2017, "SGDR", equation 5.

    Args:
        warm_up: The share of the steps that it takes to reach the optimizer's rate.
        last: The share of that rate which is left at the end.

    Raises:
        TrainError: A share is not from 0 to 1.
    """
    _check_share("warm_up", warm_up)
    _check_share("last", last)
    return _schedule(warm_up, lambda done: last + (1 - last) * (1 + math.cos(math.pi * done)) / 2)


def warm_up_steps(
    warm_up: float = 0.05, *, at: tuple[float, ...] = (1 / 3, 2 / 3, 8 / 9), factor: float = 0.1
) -> Schedule:
    """Up in a line to the optimizer's rate, then down by a factor at certain points.

    Args:
        warm_up: The share of the steps that it takes to reach the optimizer's rate.
        at: After which shares of the steps the rate falls; by default 30, 60 and 80 of 90 epochs.
        factor: What it is multiplied by each time.

    Raises:
        TrainError: A share is not from 0 to 1, or the factor not above 0.
    """
    for name, share in (("warm_up", warm_up), *(("at", share) for share in at)):
        _check_share(name, share)
    if not factor > 0:
        raise TrainError(f"the schedule has factor {factor}; it must be above 0.")

    def after(done: float) -> float:
        passed = warm_up + done * (1 - warm_up)
        return factor ** sum(passed >= share - 1e-9 for share in at)

    return _schedule(warm_up, after)


def check_schedule(schedule: LRScheduler | None) -> None:
    """See that what a recipe made moves once a step, by nothing but the step's number.

    Args:
        schedule: What `Recipe.schedule` made; None where the recipe has none.

    Raises:
        TrainError: It moves by a metric.
    """
    if isinstance(schedule, ReduceLROnPlateau):
        raise TrainError(
            "the recipe's schedule is ReduceLROnPlateau, which moves by a metric; a schedule moves once a step, by the "
            "step's number alone. Take warm_up_cosine or warm_up_steps of penstock.train.schedules, or another of "
            "torch.optim.lr_scheduler."
        )


def _schedule(warm_up: float, after: Callable[[float], float]) -> Schedule:
    def schedule(optimizer: Optimizer, steps: int) -> LRScheduler:
        rising = round(warm_up * steps)

        def factor(step: int) -> float:
            # The first step is taken at a part of the rate too: at none it would learn nothing.
            if step < rising:
                return (step + 1) / rising
            return after(min(1.0, (step - rising) / max(1, steps - rising)))

        return LambdaLR(optimizer, factor)

    return schedule


def _check_share(name: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise TrainError(f"the schedule has {name} {share}; it must be a share of the steps, from 0 to 1.")
