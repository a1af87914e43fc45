"""A clock under the control of a test."""

import asyncio
import selectors
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only where it has nothing to do but wait, at once; nothing comes from outside."""

    def __init__(self) -> None:
        self._clock = Clock()
        super().__init__(_Waits(self._clock))

    def time(self) -> float:
        return self._clock.now_s


class _Waits(selectors.SelectSelector):
    """Waits on a clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen"
        self._clock.sleep(timeout)
        return super().select(0)


def idle_loop(clock_ns: Callable[[], int]) -> BatchLoop:
    """A batch loop that never has work; what is read arrives now."""
    return BatchLoop(lambda: 0, call_soon=lambda call: None, clock_ns=clock_ns)
