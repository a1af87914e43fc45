"""A clock that tests own."""

from dataclasses import dataclass, field


@dataclass
class Clock:
    """Time that passes only by waiting."""

    now_s: float = 100.0
    waits: list[float] = field(default_factory=list[float])

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Wait, at once."""
        self.waits.append(seconds)
        self.now_s += seconds

    async def sleep_async(self, seconds: float) -> None:
        """Wait, at once, for asyncio."""
        self.sleep(seconds)
