"""The queue between a source and the network, and the playback clock; both without threads or clocks of their own.

With room for one item, the latest frame replaces an older one. Sound keeps its order and has more room.
"""

from collections import deque
from typing import Generic, final

from penstock.device.source import T


@final
class Inbox(Generic[T]):
    """Items that arrived and were not taken yet.

    Args:
        capacity: Items that may wait; the oldest is dropped for a new one.

    Attributes:
        dropped: Items that were replaced.
    """

    def __init__(self, *, capacity: int = 1) -> None:
        self.dropped = 0
        self._capacity = capacity
        self._waiting: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, item: T) -> None:
        """Add an item."""
        self._waiting.append(item)
        if len(self._waiting) > self._capacity:
            self._waiting.popleft()
            self.dropped += 1

    def take(self) -> T | None:
        """Remove and return the oldest item; None if there is none."""
        return self._waiting.popleft() if self._waiting else None


@final
class PlaybackClock:
    """Due times of a recording's frames, so that it plays in real time.

    A decoder that falls behind by more than `max_lag_s` shifts the rest of the recording later, so that frames do not
    grow older and older.

    Attributes:
        lag_s: Seconds by which the recording was shifted, in all.
    """

    def __init__(self, max_lag_s: float = 0.25) -> None:
        self.lag_s = 0.0
        self._max_lag_s = max_lag_s
        self._start_s: float | None = None

    def due_s(self, time_s: float, now_s: float) -> float:
        """Due time of a frame.

        Args:
            time_s: Its time in the recording.
            now_s: The time at which it was decoded.
        """
        if self._start_s is None:
            self._start_s = now_s - time_s
        late_s = now_s - (self._start_s + time_s)
        if late_s > self._max_lag_s:
            self.lag_s += late_s
            self._start_s += late_s
        return self._start_s + time_s
