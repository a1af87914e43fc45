"""Ctrl-C and SIGTERM as a wish to stop after the step, so that a checkpoint can be written."""

import signal
import threading
from types import FrameType
from typing import Any, Self, final


@final
class Interrupt:
    """While it is entered, the first SIGINT or SIGTERM is remembered; a second one interrupts at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Signals reach the main thread only; elsewhere, in a notebook's worker say, there is nothing to catch.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
