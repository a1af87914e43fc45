"""Time for which an event loop does not run: slow calls of `decode` are logged, and engines are not blamed for it."""

import asyncio
import logging
from typing import final

log = logging.getLogger(__name__)

# A `decode` that holds the loop for so long is logged, once in so long for each model.
SLOW_NS, LOGGED_EACH_NS = 250_000_000, 60_000_000_000


@final
class SlowDecodes:
    """Logs a `decode` of an application that holds the event loop.

    Args:
        name: Name of the model.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._logged_ns: int | None = None

    def add(self, begin_ns: int, end_ns: int) -> None:
        """Log a `decode` that was slow, unless it ran in a thread, or another one was logged lately."""
        if end_ns - begin_ns < SLOW_NS or not _in_event_loop():
            return
        if self._logged_ns is not None and end_ns - self._logged_ns < LOGGED_EACH_NS:
            return
        self._logged_ns = end_ns
        log.warning(
            "the decode of %r held the front-end for %.1f s: other requests waited (see how-to/prepare.md)",
            self._name,
            (end_ns - begin_ns) / 1e9,
        )


def held_ns(begin_ns: int, end_ns: int, asked_ns: int) -> int:
    """Return for how long an event loop did not run during a sleep, in nanoseconds.

    Args:
        begin_ns: When a task began to sleep.
        end_ns: When it woke.
        asked_ns: How long it wanted to sleep.
    """
    return max(0, end_ns - begin_ns - asked_ns)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
