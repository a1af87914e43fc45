"""Learning-rate schedules declared by name and arguments, `Schedule("cosine", warmup=0.1)`."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Self, final

import torch.optim
from torch.optim.lr_scheduler import LRScheduler

from penstock.core.errors import TrainError
from penstock.train.declared import Declared, check_argument, nearest
from penstock.train.step.schedules import with_warm_up

_WARM_UP = {"warmup": 0.0, "warmup_steps": None}
_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "constant": _WARM_UP,
    "cosine": {**_WARM_UP, "last": 0.0},
    "linear": {**_WARM_UP, "last": 0.0},
    "one-cycle": {"warmup": 0.3, "warmup_steps": None, "first": 0.04, "last": 4e-6},
    "step": {**_WARM_UP, "at": (1 / 3, 2 / 3, 8 / 9), "factor": 0.1},
}
_SHARES = ("warmup", "first", "last")


@final
class Schedule(Declared):
    """A learning-rate schedule by its name, for `Recipe.schedule`: `Schedule("cosine", warmup=0.1)`.

    All begin with a warm-up to the optimizer's rate and depend on the step's number alone, so that a resumed or longer
    run goes on with them.

    Args:
        name: `"constant"`; `"cosine"` or `"linear"` to a last rate; `"step"` for a factor at given points; or
            `"one-cycle"`, a cosine up and a cosine down (Smith and Topin 2018, "Super-convergence").
        arguments: `warmup`, the share of the steps of the warm-up, or `warmup_steps`, their number; 0 by default, 0.3
            for `"one-cycle"`. `last`, the final rate as a share of the optimizer's: 0 for `"cosine"` and `"linear"`,
            4e-6 for `"one-cycle"`, which also has `first`, 0.04. `"step"` has `at`, shares of the steps at which the
            rate falls, by default (1/3, 2/3, 8/9), and `factor`, 0.1.

    Raises:
        TrainError: There is no such schedule, it has no such argument, or the argument is out of range.
    """

    KIND = "schedule"
    __slots__ = ()

    def __init__(self, name: str, **arguments: Any) -> None:
        key = str(name).lower()
        if key not in _ARGUMENTS:
            raise TrainError(f"there is no schedule {name!r}; {nearest(key, self.names())}.")
        known = _ARGUMENTS[key]
        for own, value in arguments.items():
            if own not in known:
                raise TrainError(f"the schedule {key!r} has no argument {own!r}; {nearest(own, known)}.")
            check_argument(f"the schedule {key!r}", own, value, known[own])
        _check(key, arguments)
        super().__init__(key, known, arguments)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """List the names of schedules."""
        return tuple(_ARGUMENTS)

    @classmethod
    def settings_of(cls, name: str) -> tuple[str, ...]:
        """List the arguments of a schedule."""
        return tuple(_ARGUMENTS[name])

    def with_setting(self, name: str, value: Any) -> Self:
        """Return a copy with another name or argument; `warmup` replaces `warmup_steps` and the other way round."""
        other = {"warmup": "warmup_steps", "warmup_steps": "warmup"}.get(name)
        if other is None or value is None:
            return super().with_setting(name, value)
        return self._made(self.name, {**self._without(other), name: value})

    def __call__(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        """Make the schedule of an optimizer for a number of steps."""
        rising = self.settings["warmup_steps"]
        if rising is None:
            rising = round(self.settings["warmup"] * steps)
        before = None
        if self.name == "one-cycle":
            first = self.settings["first"]
            before = _cosine(first, 1.0)
        return with_warm_up(optimizer, steps, rising, self._after(rising / steps), before)

    def _after(self, warm_up: float) -> Callable[[float], float]:
        """Return the factor of the rate by the share of the steps after the warm-up that is done."""
        if self.name == "constant":
            return lambda done: 1.0
        if self.name == "step":
            at, factor = self.settings["at"], self.settings["factor"]
            return lambda done: factor ** sum(warm_up + done * (1 - warm_up) >= share - 1e-9 for share in at)
        last = self.settings["last"]
        return (lambda done: 1 + (last - 1) * done) if self.name == "linear" else _cosine(1.0, last)

    @classmethod
    def _made(cls, name: Any, arguments: Mapping[str, Any]) -> Self:
        return cls(name, **arguments)


def _cosine(first: float, last: float) -> Callable[[float], float]:
    return lambda done: last + (first - last) * (1 + math.cos(math.pi * done)) / 2


def _check(name: str, arguments: Mapping[str, Any]) -> None:
    what = f"the schedule {name!r}"
    if arguments.get("warmup") is not None and arguments.get("warmup_steps") is not None:
        raise TrainError(f"{what} has warmup and warmup_steps; give one of them.")
    shares = [(own, arguments[own]) for own in _SHARES if own in arguments]
    for own, share in [*shares, *(("at", each) for each in arguments.get("at", ()))]:
        if not 0 <= share <= 1:
            raise TrainError(f"{what} has {own} {share}; it must be a share, from 0 to 1.")
    steps = arguments.get("warmup_steps")
    if steps is not None and (type(steps) is not int or steps < 0):
        raise TrainError(f"{what} has warmup_steps {steps!r}; it must be a whole number from 0.")
    if not arguments.get("factor", 1) > 0:
        raise TrainError(f"{what} has factor {arguments['factor']}; it must be above 0.")
