"""Places beside those that count against the limit of connections: few, and each for a moment."""

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar, final

# Connections that have a place at once, and for how long each has it.
PLACES, PLACE_S = 64, 2.0

# A connection, of any kind.
Placed = TypeVar("Placed")


@final
class ReservedPlaces(Generic[Placed]):
    """The connections that have such a place; where there is none left, the oldest makes room.

    The newest stays: a health check sends its request at once, and who only holds connections does not.

    Args:
        end: Ends a connection that has lost its place.
        call_later: `call_later` of the event loop.
    """

    def __init__(
        self, end: Callable[[Placed], object], call_later: Callable[[float, Callable[[], None]], object]
    ) -> None:
        self._end = end
        self._call_later = call_later
        # The oldest first.
        self._connections: dict[Placed, None] = {}

    def __contains__(self, connection: object) -> bool:
        return connection in self._connections

    def add(self, connection: Placed) -> None:
        """Give a connection a place, until its time is over or newer ones need it."""
        if len(self._connections) == PLACES:
            self._remove(next(iter(self._connections)))
        self._connections[connection] = None
        self._call_later(PLACE_S, partial(self._remove, connection))

    def discard(self, connection: Placed) -> None:
        """Free the place of a connection that has ended by itself, if it has one."""
        self._connections.pop(connection, None)

    def _remove(self, connection: Placed) -> None:
        if connection in self._connections:
            del self._connections[connection]
            self._end(connection)
