"""Progress of a run, and the checkpoints that hold it together with the trainer's state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from penstock.core.errors import TrainError
from penstock.train.checkpoint.format import Checkpoint, newest_checkpoint
from penstock.train.checkpoint.lazy_tensors import StoredTensor, read_tensors
from penstock.train.checkpoint.saver import Saver
from penstock.train.checkpoint.state import (
    full_names,
    load_full_state,
    load_optimizer,
    local_optimizer_state,
    local_state,
    parts_of,
)
from penstock.train.trainer import Trainer

# Where a schedule of torch is.
_SCHEDULE_PLACE = ("last_epoch", "_step_count", "_last_lr")


@dataclass(slots=True)
class History:
    """Progress of a run and its best weights. Each process holds its own part of `best_weights` and `bad_examples`."""

    step: int = 0
    seconds: float = 0.0
    best_step: int = 0
    best_value: float | None = None
    best_metrics: dict[str, float] | None = None
    best_weights: dict[str, Tensor] | None = None
    bad_examples: dict[str, int] = field(default_factory=dict)

    def keep_best(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Keep a copy of the trainer's weights as the best."""
        self.best_step, self.best_metrics = self.step, metrics
        self.best_value = metrics[trainer.recipe.selection.metric]
        self.best_weights = {name: tensor.detach().clone() for name, tensor in trainer.module.state_dict().items()}


def save_checkpoint(saver: Saver, trainer: Trainer, history: History) -> None:
    """Start writing a checkpoint of everything that the next step depends on. Collective.

    Raises:
        TrainError: The previous checkpoint could not be written.
    """
    weights, scale, ema = history.best_weights, trainer.optimizer_step.loss_scale, trainer.ema
    own = partial(local_state, trainer.parallel_model, full_names(trainer.parallel_model))
    state = {
        "model": own(trainer.module.state_dict()),
        "optimizer": local_optimizer_state(trainer.parallel_model, trainer.optimizer),
        "scale": None if scale is None else scale.state_dict(),
        "ema": None if ema is None else ema.state_dict(own),
        "schedule": None if trainer.schedule is None else _plain(trainer.schedule.state_dict()),
        "total_steps": trainer.total_steps,
        "seconds": history.seconds,
        "bad_examples": trainer.world.sum_counts(history.bad_examples),
        "best": {
            "step": history.best_step,
            "value": history.best_value,
            "metrics": history.best_metrics,
            "weights": None if weights is None else own(weights),
        },
    }
    saver.save(history.step, state, {"best": None if weights is None else history.best_step})


def restore_checkpoint(checkpoint: Checkpoint, trainer: Trainer) -> History:
    """Restore a trainer from a checkpoint, written by any number of processes.

    Raises:
        TrainError: The checkpoint belongs to another network or recipe.
    """
    state, best, placed, world = checkpoint.state, checkpoint.state["best"], trainer.parallel_model, trainer.world
    scale, ema, schedule = trainer.optimizer_step.loss_scale, trainer.ema, trainer.schedule
    for name, own in {"scale": scale, "ema": ema, "schedule": schedule}.items():
        if (state.get(name) is None) != (own is None):
            raise TrainError(
                f"the checkpoint was written {'without' if own else 'with'} the recipe's {name!r}; go on with the "
                f"recipe that the run began with, or begin a new run."
            )

    def parts(weights: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        return {name: part.to(world.device, copy=True) for name, part in parts_of(placed, world, weights).items()}

    load_full_state(placed, world, state["model"])
    groups = trainer.optimizer_step.capturable.with_device_flags(read_tensors(state["optimizer"]["param_groups"]))
    load_optimizer(placed, world, trainer.optimizer, state["optimizer"] | {"param_groups": groups})
    trainer.optimizer_step.restored()
    trainer.steps.restart()
    if scale is not None:
        scale.load_state_dict(read_tensors(state["scale"]))
    if ema is not None:
        ema.load_state_dict(state["ema"] | {"steps": read_tensors(state["ema"].get("steps"))}, parts)
    if schedule is not None:
        before = state.get("total_steps", trainer.total_steps)
        own_state = read_tensors(state["schedule"])
        if before == trainer.total_steps:
            schedule.load_state_dict(own_state)
        else:
            _load_of_another_length(own_state, schedule)
    return History(
        step=checkpoint.step,
        seconds=state["seconds"],
        best_step=best["step"],
        best_value=best["value"],
        best_metrics=best["metrics"],
        best_weights=None if best["weights"] is None else parts(best["weights"]),
        # A checkpoint holds the sum over the processes, which the first process continues.
        bad_examples=state.get("bad_examples", {}) if world.is_rank_zero else {},
    )


def resume(folder: Path, trainer: Trainer) -> History:
    """Restore a trainer from the newest checkpoint of a run, if there is one. Collective."""
    checkpoint = newest_checkpoint(folder / "checkpoints", trainer.world, set_aside=True)
    return restore_checkpoint(checkpoint, trainer) if checkpoint else History()


def _load_of_another_length(state: dict[str, Any], schedule: LRScheduler) -> None:
    """Let a schedule of this number of steps go on from the state of one of another number.

    Raises:
        TrainError: Its rates follow from those before, which were of the other number of steps.
    """
    made = _plain(schedule.state_dict())
    alike = all(state.get(name) == value for name, value in made.items() if name not in _SCHEDULE_PLACE)
    if not alike and not isinstance(schedule, OneCycleLR):
        raise TrainError(
            f"the schedule is a {type(schedule).__name__} for the run's first number of steps and cannot go on as one "
            f"for more; begin a new run with a Schedule, such as Schedule('cosine')."
        )
    schedule.load_state_dict(state if alike else {name: state[name] for name in _SCHEDULE_PLACE if name in state})
    if isinstance(schedule, LambdaLR | OneCycleLR):
        # The optimizer's state has the next step's rate by the other length; these schedules compute it from the step.
        schedule.last_epoch -= 1
        schedule.step()


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    # Schedules also name their functions and the optimizer's hooks, which are no state.
    return {name: value for name, value in state.items() if isinstance(value, int | float | str | list | bool | None)}
