"""Places for a few connections beyond the limit, each for a short time."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar, final

# Connections that have a place at once, and for how long each has it.
PLACES, PLACE_S = 64, 2.0

# A connection, of any kind.
Placed = TypeVar("Placed")


@final
class ReservedPlaces(Generic[Placed]):
    """The connections that have such a place. Where none is left, the oldest makes room.

    The newest stays: a health check sends its request at once, and a client that only holds connections does not.

    Args:
        end: Ends a connection that has lost its place.
        call_later: `call_later` of the event loop.
        clock_s: A clock in seconds.
    """

    def __init__(
        self,
        end: Callable[[Placed], object],
        call_later: Callable[[float, Callable[[], None]], object],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end = end
        self._call_later, self._clock_s = call_later, clock_s
        # When each ends, the oldest first.
        self._connections: dict[Placed, float] = {}
        # One timer for all of them: a flood may take places faster than they end.
        self._timer_set = False

    def __contains__(self, connection: object) -> bool:
        return connection in self._connections

    def add(self, connection: Placed) -> None:
        """Give a connection a place, until its time is over or newer ones need it."""
        if len(self._connections) == PLACES:
            self._remove(next(iter(self._connections)))
        self._connections[connection] = self._clock_s() + PLACE_S
        self._wait_for_oldest()

    def discard(self, connection: Placed) -> None:
        """Free the place of a connection that has ended by itself, if it has one."""
        self._connections.pop(connection, None)

    def _wait_for_oldest(self) -> None:
        if self._connections and not self._timer_set:
            self._timer_set = True
            oldest_s = next(iter(self._connections.values()))
            self._call_later(max(0.0, oldest_s - self._clock_s()), self._end_old)

    def _end_old(self) -> None:
        self._timer_set = False
        now_s = self._clock_s()
        for connection in [each for each, end_s in self._connections.items() if end_s <= now_s]:
            self._remove(connection)
        self._wait_for_oldest()

    def _remove(self, connection: Placed) -> None:
        if self._connections.pop(connection, None) is not None:
            self._end(connection)
