"""What waits between a source and the network, decided without threads or clocks.

With room for one, the latest frame wins: what it replaces was never looked at. Sound keeps its order and has more room.
"""

from collections import deque
from typing import Generic, Protocol, TypeVar, final


class Timed(Protocol):
    """What has a moment at which it was taken."""

    @property
    def taken_s(self) -> float:
        """When it was due or came, in seconds on the clock of the run."""
        ...


T = TypeVar("T", bound=Timed)


@final
class Inbox(Generic[T]):
    """What came and was not taken yet.

    Args:
        most: How many may wait; the oldest makes room.
        most_age_s: What waited longer is let go when it would be taken: its answer would be of another world.

    Attributes:
        offered: How many came.
        dropped: How many of them were replaced or grew too old.
    """

    def __init__(self, *, most: int = 1, most_age_s: float = float("inf")) -> None:
        self.offered = 0
        self.dropped = 0
        self._most = most
        self._most_age_s = most_age_s
        self._waiting: deque[T] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, item: T) -> None:
        """Something came."""
        self.offered += 1
        self._waiting.append(item)
        if len(self._waiting) > self._most:
            self._waiting.popleft()
            self.dropped += 1

    def take(self, now_s: float) -> T | None:
        """The oldest that is young enough; None if there is none."""
        while self._waiting:
            item = self._waiting.popleft()
            if now_s - item.taken_s <= self._most_age_s:
                return item
            self.dropped += 1
        return None


@final
class Pace:
    """When each frame of a recording is due, so that it plays as fast as it was recorded.

    A decoder that falls behind by more than `most_behind_s` makes the recording play later, instead of frames that are
    older and older.

    Attributes:
        behind_s: Seconds by which decoding was slower than real time, in all.
    """

    def __init__(self, most_behind_s: float = 0.25) -> None:
        self.behind_s = 0.0
        self._most_behind_s = most_behind_s
        self._start_s: float | None = None

    def due_s(self, time_s: float, now_s: float) -> float:
        """When a frame is due.

        Args:
            time_s: Its time in the recording.
            now_s: The time at which it is there, decoded.
        """
        if self._start_s is None:
            self._start_s = now_s - time_s
        late_s = now_s - (self._start_s + time_s)
        if late_s > self._most_behind_s:
            self.behind_s += late_s
            self._start_s += late_s
        return self._start_s + time_s
