"""Ctrl-C and SIGTERM as requests to stop after the current step, so that a checkpoint can be written."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self, final


@final
class Interrupt:
    """Record the first SIGINT or SIGTERM while the context is open; a second one interrupts at once.

    Args:
        forward: Called with the number of the first signal.
    """

    def __init__(self, forward: Callable[[int], object] = lambda number: None) -> None:
        self.requested = False
        self._forward = forward
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Signals reach the main thread only, and not a notebook's worker thread.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._forward(number)
