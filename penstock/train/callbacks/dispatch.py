"""Delivery of events to the callbacks of a training."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, final

from penstock.core.errors import PenstockError
from penstock.train.callbacks.callback import (
    Callback,
    CheckpointWritten,
    Ended,
    Started,
    StepTaken,
    Stop,
    Validated,
)


@final
class Callbacks:
    """Call the callbacks of a training in order, and collect their wish to stop.

    Args:
        watching: Callbacks whose errors do not end the training.
        required: Penstock's own records, called first; an error in one ends the training.
        notify: Called with a sentence for the user.

    Attributes:
        stop: The first `Stop` that a callback returned.
        takes_steps: True if a callback overrides `step`.
    """

    def __init__(
        self,
        watching: Sequence[Callback] = (),
        *,
        required: Sequence[Callback] = (),
        notify: Callable[[str], object] = lambda sentence: None,
    ) -> None:
        self.notify = notify
        self.stop: Stop | None = None
        self._required, self._watching = list(required), list(watching)
        self._step = 0
        self._ended = False
        self._take_steps: list[Callback] = []
        self._find_steps()

    def _find_steps(self) -> None:
        self._take_steps = [each for each in self._watching if type(each).step is not Callback.step]
        self.takes_steps = bool(self._take_steps)

    def start(self, event: Started) -> None:
        """Deliver the start."""
        self._step = event.step
        self._deliver("start", event)

    def step(self, event: StepTaken) -> None:
        """Deliver a step; call it only if `takes_steps`."""
        self._step = event.step
        for each in self._take_steps:
            try:
                self._take(each.step(event))
            except Exception as error:  # noqa: BLE001 - a callback is the user's code, and raises anything
                self._drop(each, error)

    def validation(self, event: Validated) -> None:
        """Deliver a validation."""
        self._step = event.step
        self._deliver("validation", event)

    def checkpoint(self, event: CheckpointWritten) -> None:
        """Deliver a written checkpoint."""
        self._deliver("checkpoint", event)

    def end(self, event: Ended) -> None:
        """Deliver the end, once."""
        if not self._ended:
            self._ended = True
            if event.state == "failed":
                # The error that ended the training counts; one of the records would hide it.
                for each in self._required:
                    with suppress(Exception):
                        each.end(event)
                self._required.clear()
            self._step = event.step
            self._deliver("end", event)

    def _deliver(self, name: str, event: Any) -> None:
        for each in self._required:
            self._take(getattr(each, name)(event))
        for each in list(self._watching):
            try:
                self._take(getattr(each, name)(event))
            except Exception as error:  # noqa: BLE001 - a callback is the user's code, and raises anything
                self._drop(each, error)

    def _take(self, wish: Stop | None) -> None:
        if self.stop is None and isinstance(wish, Stop):
            self.stop = wish

    def _drop(self, failed: Callback, error: Exception) -> None:
        self._watching = [each for each in self._watching if each is not failed]
        self._find_steps()
        what = " ".join(str(error).split())[:300]
        kind = "" if isinstance(error, PenstockError) else f"{type(error).__name__}: "
        self.notify(
            f"The callback {type(failed).__name__} failed at step {self._step:,} ({kind}{what}); the training "
            f"goes on without it."
        )
