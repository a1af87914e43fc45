"""Loggers: callbacks that send the figures of a training to another program, from a thread of their own."""

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from queue import Full, Queue
from typing import Any, Literal

from penstock.core.errors import TrainError
from penstock.train.callbacks.callback import Callback, Ended, Started, StepTaken, Stop, Validated

# A figure that finds so many others in the queue is dropped.
MAX_QUEUED = 10_000
OPEN_S = 120.0
CLOSE_S = 30.0
EVERY_STEPS = 50
Status = Literal["finished", "stopped", "failed"]


class Logger(Callback, ABC):
    """Send settings, losses and validations to another program.

    A thread makes all calls, so that steps do not wait for a network. The start waits for `open`, at most 120 s, and
    the end waits for what is queued, at most 30 s. The first error ends the logger, and not the training.

    Args:
        every_steps: The loss of each step whose number is a multiple of this is logged too.

    Attributes:
        package: The package that the logger needs.

    Raises:
        TrainError: The interval is out of range.
    """

    package: str

    def __init__(self, every_steps: int = EVERY_STEPS) -> None:
        if not isinstance(every_steps, int) or every_steps < 1:
            raise TrainError(
                f"{type(self).__name__} has every_steps {every_steps!r}; it must be a whole number above 0."
            )
        self._every_steps = every_steps
        self._thread: _Thread | None = None

    def check(self) -> None:
        """Check before the training that the package is installed.

        Raises:
            TrainError: It is not.
        """
        if not is_installed(self.package):
            raise TrainError(
                f"the callback {type(self).__name__} needs the package {self.package!r}, which is not installed; run "
                f"'pip install {self.package}', or leave the callback out."
            )

    @abstractmethod
    def open(self, package: Any, event: Started) -> None:
        """Start or resume a record of this training. `package` is the imported module."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record values by name."""

    @abstractmethod
    def close(self, status: Status) -> None:
        """End the record."""

    def start(self, event: Started) -> Stop | None:
        """Import the package and start the record."""
        self._thread = _Thread(type(self).__name__)
        self._thread.put(lambda: self.open(import_module(self.package), event))
        if not self._thread.wait(OPEN_S):
            raise TimeoutError(f"no answer within {OPEN_S:.0f} s")

    def step(self, event: StepTaken) -> Stop | None:
        """Log the losses of every `every_steps`-th step."""
        if not event.losses:
            return None
        for step, loss in enumerate(event.losses, start=event.step - len(event.losses) + 1):
            if step % self._every_steps == 0:
                self._put({"step_loss": loss}, step)
        return None

    def validation(self, event: Validated) -> Stop | None:
        """Log the figures of a validation."""
        self._put({name: value for name, value in event.figures.items() if name != "step"}, event.step)

    def end(self, event: Ended) -> None:
        """Log the metrics of the best weights, and end the record."""
        thread = self._thread
        assert thread is not None, self
        if event.metrics:
            self._put({f"best_{name}": value for name, value in event.metrics.items()}, event.step)
        thread.put(lambda: self.close(event.state))
        if not thread.wait(CLOSE_S):
            raise TimeoutError(f"figures were still queued after {CLOSE_S:.0f} s")
        thread.end()

    def _put(self, values: Mapping[str, float], step: int) -> None:
        assert self._thread is not None, self
        self._thread.put(lambda: self.log(values, step))


class _Thread:
    """A thread that makes queued calls in order, until the first error."""

    def __init__(self, name: str) -> None:
        self._queue: Queue[Callable[[], object] | threading.Event | None] = Queue(MAX_QUEUED)
        self._error: Exception | None = None
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def put(self, call: Callable[[], object] | threading.Event) -> None:
        """Queue a call, or an event to set. Raises the error of an earlier one."""
        if self._error is not None:
            raise self._error
        try:
            self._queue.put_nowait(call)
        except Full:
            raise TimeoutError(f"{MAX_QUEUED:,} figures wait to be sent") from None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the queued calls; False if they take longer. Raises the error of one."""
        done = threading.Event()
        self.put(done)
        is_done = done.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return is_done

    def end(self) -> None:
        """End the thread after the queued calls."""
        self._queue.put(None)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                if isinstance(call, threading.Event):
                    call.set()
                elif self._error is None:
                    call()
            except Exception as error:  # noqa: BLE001 - a logger's package raises anything
                self._error = error


def is_installed(package: str) -> bool:
    """Check whether a package can be imported, without importing it."""
    return sys.modules.get(package) is not None or find_spec(package) is not None
