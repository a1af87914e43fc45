"""A thread that reads a source into an inbox, so that the network never delays the source."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Generic, Self, final

from penstock.core.errors import SourceError
from penstock.device.inbox import Inbox, PlaybackClock
from penstock.device.source import Source, T

# Interval at which a wait checks for a stall.
POLL_S = 0.1
# Time for a pending read to return when the reader stops.
JOIN_TIMEOUT_S = 1.0


@final
class SourceReader(Generic[T]):
    """Read ahead of the consumer while the context lasts.

    Args:
        source: Its items are frozen records. A recording is played back in real time.
        inbox: Receives the items.
        clock: Monotonic seconds.
        stall_timeout_s: The source is given up after so many seconds without an item.
    """

    def __init__(
        self, source: Source[T], inbox: Inbox[T], *, clock: Callable[[], float], stall_timeout_s: float
    ) -> None:
        self.playback = PlaybackClock()
        self._source = source
        self._inbox = inbox
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._ended = False
        self._error: BaseException | None = None
        # Since when the source's next item is awaited; None while an item waits for its due time.
        self._reading_since_s: float | None = None
        # A daemon, because a read that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="source", daemon=True)

    def __enter__(self) -> Self:
        self._reading_since_s = self._clock()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join(JOIN_TIMEOUT_S)
        # A source that is still being read must not be closed; it ends with the process.
        if not self._thread.is_alive():
            self._source.close()

    def __iter__(self) -> Iterator[T]:
        """Items as they arrive, until the source ends.

        Raises:
            SourceError: The source failed or stalled.
        """
        while (item := self._next()) is not None:
            yield item

    def _next(self) -> T | None:
        while True:
            with self._changed:
                item = self._inbox.take()
                if item is not None:
                    return item
                if self._ended:
                    if self._error is not None:
                        raise self._error
                    return None
                since_s = self._reading_since_s
                if since_s is not None and self._clock() - since_s > self._stall_timeout_s:
                    raise SourceError(
                        f"{self._source.name} gave nothing for {self._stall_timeout_s:g} s; it stalled or is gone."
                    )
                self._changed.wait(POLL_S)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._source.items():
                if not self._offer(item):
                    break
        except BaseException as caught:  # noqa: BLE001 - the top of the thread; the consumer raises it again
            error = caught
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify()

    def _offer(self, item: T) -> bool:
        now_s = due_s = self._clock()
        if self._source.recorded:
            due_s = self.playback.due_s(item.time_s, now_s)
            self._reading_since_s = None
            while (left_s := due_s - self._clock()) > 0:
                if self._stopped.wait(left_s):
                    return False
        with self._changed:
            self._inbox.offer(replace(item, captured_s=due_s))
            self._reading_since_s = self._clock()
            self._changed.notify()
        return not self._stopped.is_set()
