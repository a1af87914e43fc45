"""Event loops that are held: by whose `decode`, which is logged, and for how long, which no engine is blamed for."""

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


@final
class HeldTime:
    """Time for which an event loop did not run, as a task finds that it wakes too late.

    Args:
        every_ns: Interval at which the task wakes.
        now_ns: The time now.
    """

    def __init__(self, every_ns: int, now_ns: int) -> None:
        self._every_ns, self._last_ns = every_ns, now_ns

    def since_last(self, now_ns: int) -> int:
        """Return the time for which the loop was held since the last call, in nanoseconds; called at each wake."""
        held_ns = max(0, now_ns - self._last_ns - self._every_ns)
        self._last_ns = now_ns
        return held_ns


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
