"""A clock under the control of a test."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, final

from penstock.serve.batch_loop import BatchLoop


@dataclass
class Clock:
    """Time that advances only by sleeping."""

    now_s: float = 100.0
    waits: list[float] = field(default_factory=list[float])

    def __call__(self) -> float:
        return self.now_s

    def ns(self) -> int:
        """The time in nanoseconds."""
        return round(self.now_s * 1e9)

    def sleep(self, seconds: float) -> None:
        """Advance the time without waiting."""
        self.waits.append(seconds)
        self.now_s += seconds

    async def sleep_async(self, seconds: float) -> None:
        """Advance the time without waiting, as a coroutine."""
        self.sleep(seconds)


def idle_loop(clock_ns: Callable[[], int]) -> BatchLoop:
    """A batch loop that never has work; what is read arrives now."""
    return BatchLoop(lambda: 0, call_soon=lambda call: None, clock_ns=clock_ns)


@final
class _JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing that takes time: the time of the wait passes at once."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0 if timeout else timeout)
        if timeout and not found:
            self.now_s += timeout
        return found


@final
class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_without_waiting(scene: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine without threads and processes, in an event loop whose time passes only where all wait."""
    with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
        runner.run(scene)
