"""The event protocol of a training: start, step, validation, checkpoint, end.

Only the first process calls callbacks. An event is data: a callback reads it, and may return `Stop`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The training starts, or a stopped one is resumed.

    Args:
        name: Name of the application or the network.
        folder: The folder of the run; None if it has none.
        step: Steps taken before.
        total_steps: Steps that the training takes if nothing stops it.
        settings: Settings of the recipe by name, and the device.
        metric: The metric that selects the best weights.
        mode: `"max"` if a larger value of it is better, else `"min"`.
        validations: Figures of the validations before, of a run that is resumed.
    """

    name: str
    folder: Path | None
    step: int
    total_steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    metric: str = "loss"
    mode: Literal["max", "min"] = "min"
    validations: Sequence[Mapping[str, float]] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTaken:
    """A step was launched; a GPU may still be computing it.

    Args:
        step: Its number, from 1.
        time_s: `time.monotonic()`.
        losses: Losses of the last steps up to this one, at a host synchronization: about five times a second, and at
            least every 64 steps. Empty at other steps, because reading a loss waits for the GPU.
    """

    step: int
    time_s: float
    losses: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Validated:
    """The network was validated.

    Args:
        step: The number of steps taken.
        figures: The line of metrics.jsonl: `seconds`, `train_loss`, `learning_rate`, `validation_loss` and so on.
        is_best: True if these weights are the best so far.
    """

    step: int
    figures: Mapping[str, float]
    is_best: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointWritten:
    """A checkpoint is complete on disk.

    Args:
        step: Its number of steps.
        folder: Its folder. A later checkpoint may remove it.
    """

    step: int
    folder: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The training ended.

    Args:
        state: `"finished"`, also after a callback stopped it; `"stopped"` by the user, or `"failed"`.
        step: Steps taken.
        metrics: Metrics of the best weights, with those of the test set if the training finished.
        reason: The callback's reason, if one stopped the training; the error, if the training failed.
    """

    state: Literal["finished", "stopped", "failed"]
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """The return value of a callback that stops the training.

    Args:
        reason: Why, as a phrase for the user.
    """

    reason: str


class Callback:
    """Base class of callbacks. Override the events that are needed; each may return `Stop` but the last.

    An exception in a callback is printed once; the training goes on without that callback.
    """

    def start(self, event: Started) -> Stop | None:
        """Called before the first step; also when a stopped training is resumed."""

    def step(self, event: StepTaken) -> Stop | None:
        """Called after each step. It must be fast: the next step is launched after it."""

    def validation(self, event: Validated) -> Stop | None:
        """Called after each validation."""

    def checkpoint(self, event: CheckpointWritten) -> Stop | None:
        """Called after a checkpoint was written."""

    def end(self, event: Ended) -> None:
        """Called once, after the training."""
