"""TensorBoard's event files in the folder of a run."""

from pathlib import Path
from typing import Any, final

from penstock.core.errors import TrainError
from penstock.train.callbacks.callback import Callback, Ended, Started, StepTaken, Stop, Validated
from penstock.train.callbacks.logger import EVERY_STEPS, is_installed

EVENTS_FOLDER = "events"


@final
class TensorBoard(Callback):
    """Write losses and validations as TensorBoard events. Every run with a folder has one.

    Without the package `tensorboard` it says so and the training goes on.

    Args:
        folder: The folder of the events; RUN/events by default.
        every_steps: The loss of each step whose number is a multiple of this is written too.
    """

    def __init__(self, folder: str | Path | None = None, *, every_steps: int = EVERY_STEPS) -> None:
        self._given, self._every_steps = folder, every_steps
        self._events: Any = None

    def start(self, event: Started) -> Stop | None:
        """Open the events; those after the step of a resumed training are dropped."""
        self._events = None
        folder = self._given or (None if event.folder is None else event.folder / EVENTS_FOLDER)
        if folder is not None:
            if not is_installed("tensorboard"):
                raise TrainError("tensorboard is not installed; pip install 'penstock-nn[train]'")
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder), purge_step=event.step + 1 if event.step else None)

    def step(self, event: StepTaken) -> Stop | None:
        """Write the losses of every `every_steps`-th step."""
        if not event.losses or self._events is None:
            return None
        for step, loss in enumerate(event.losses, start=event.step - len(event.losses) + 1):
            if step % self._every_steps == 0:
                self._events.add_scalar("step_loss", loss, step)
        return None

    def validation(self, event: Validated) -> Stop | None:
        """Write the figures of a validation."""
        if self._events is not None:
            for name, value in event.figures.items():
                if name != "step":
                    self._events.add_scalar(name, value, event.step)

    def end(self, event: Ended) -> None:
        """Close the events."""
        if self._events is not None:
            self._events.close()
            self._events = None
