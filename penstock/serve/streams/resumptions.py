"""Live streams of one model whose engine has died, until another engine goes on with them or their time is up."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar, final

from penstock.serve.table.slots import COUNTS, LOST_NO_ENGINE, STREAMS_OPEN

# Streams that are opened on an engine in one iteration of the event loop.
AT_ONCE = 256


class Waiting(Protocol):
    """A stream whose engine has died."""

    def give_up(self, status: int) -> None:
        """End it with the error of a status."""


W = TypeVar("W", bound=Waiting)


@final
class Resumptions(Generic[W]):
    """The streams that wait, the first one first.

    Args:
        now_ns: A monotonic clock.
        wait_s: Time after which a stream is given up, in seconds.

    Attributes:
        uncounted: Counts of streams without an engine, by the columns of a table's `counts`, until there is a table.
    """

    def __init__(self, now_ns: Callable[[], int], wait_s: float) -> None:
        self._now_ns, self._wait_ns = now_ns, int(wait_s * 1e9)
        # When each is given up, and the status that it ends with.
        self._waiting: dict[W, tuple[int, int]] = {}
        self.uncounted = [0] * COUNTS

    @property
    def waiting(self) -> int:
        """Number of streams that wait."""
        return len(self._waiting)

    def add(self, stream: W, status: int) -> None:
        """Let a stream wait, which ends with a status if nothing takes it."""
        self._waiting[stream] = self._now_ns() + self._wait_ns, status

    def discard(self, stream: W) -> None:
        """Forget a stream: it has ended, or an engine goes on with it."""
        self._waiting.pop(stream, None)

    def first(self) -> Iterator[W]:
        """The streams that have waited longest, some at most."""
        return iter(list(islice(self._waiting, AT_ONCE)))

    def expire(self) -> None:
        """Give up the streams whose time is up."""
        now_ns = self._now_ns()
        self._give_up([stream for stream, (until_ns, _) in self._waiting.items() if until_ns <= now_ns])

    def give_up(self) -> None:
        """Give up all streams, now."""
        self._give_up(list(self._waiting))

    def close(self) -> None:
        """Let streams wait for no engine that is not there: the server shuts down, and starts none again."""
        self._wait_ns = 0
        self._waiting = {stream: (0, status) for stream, (_, status) in self._waiting.items()}

    def count_in(self, counts: "memoryview[int] | list[int]") -> None:
        """Add what is uncounted to the counts of a table."""
        uncounted = self.uncounted
        for column in range(COUNTS):
            # A table counts the streams that are open on it alone.
            if column != STREAMS_OPEN:
                counts[column] += uncounted[column]
            uncounted[column] = 0

    def _give_up(self, streams: list[W]) -> None:
        for stream in streams:
            # One that is told may end others.
            if (waiting := self._waiting.pop(stream, None)) is not None:
                self.uncounted[LOST_NO_ENGINE] += 1
                stream.give_up(waiting[1])
