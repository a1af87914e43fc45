"""A clock under the control of a test."""

from collections.abc import Callable
from dataclasses import dataclass, field

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
