"""Polling without sleep for a short time, so that a request finds the processes on its way awake, see decision 088."""

from collections.abc import Callable
from typing import final

# With more slots in use by requests of all front-ends, no process polls: the cores have other work then, and a wake-up
# is short compared with a batch.
MAX_IN_USE = 16


@final
class IdlePolling:
    """Keeps an event loop from sleeping for some time after the last call of `extend`, and looks for work meanwhile.

    What another process puts into shared memory is seen before that process has told so.

    Args:
        call_soon: `call_soon` of the event loop, whose next poll then returns at once.
        clock_ns: A monotonic clock.
        stay_ns: The time; 0 for none.
        look: Looks for work, at every poll.
    """

    __slots__ = ("_call_soon", "_clock_ns", "_look", "_polling", "_stay_ns", "_until_ns")

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        clock_ns: Callable[[], int],
        stay_ns: int,
        look: Callable[[], object],
    ) -> None:
        self._call_soon, self._clock_ns, self._stay_ns, self._look = call_soon, clock_ns, stay_ns, look
        self._until_ns = 0
        self._polling = False

    @property
    def is_on(self) -> bool:
        """True if the loop polls at all, so that it is worth to find out whether it should now."""
        return self._stay_ns > 0

    def extend(self) -> None:
        """Do not sleep for the time from now on."""
        if not self._stay_ns:
            return
        self._until_ns = self._clock_ns() + self._stay_ns
        if not self._polling:
            self._polling = True
            self._call_soon(self._poll)

    def _poll(self) -> None:
        if self._clock_ns() >= self._until_ns:
            self._polling = False
            return
        self._look()
        self._call_soon(self._poll)
