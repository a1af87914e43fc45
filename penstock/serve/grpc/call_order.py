"""The order of the inference calls of a connection.

gRPC begins them in the order of their heads, and may read the message of a later one first. Requests of sequences are
submitted in the order of the heads. A call whose message does not come holds up the others for about `PATIENCE_S`;
then it has lost its place, and is refused if it belongs to a sequence.
"""

import asyncio
from dataclasses import dataclass, field
from typing import final

from penstock.core.errors import Overloaded

PATIENCE_S = 0.25


@final
@dataclass(slots=True, eq=False)
class CallOrder:
    """Calls that have begun and have not submitted their request, by connection."""

    _places: dict[str, dict["CallPlace", None]] = field(default_factory=dict[str, "dict[CallPlace, None]"], init=False)
    # Connections with a timer for the first of their calls.
    _timed: set[str] = field(default_factory=set[str], init=False)

    def enter(self, peer: str) -> "CallPlace":
        """Return the place of a call that begins now; `end` it in any case.

        Args:
            peer: The connection.
        """
        place = CallPlace(self, peer, asyncio.get_running_loop().time())
        self._places.setdefault(peer, {})[place] = None
        return place

    def is_first(self, place: "CallPlace") -> bool:
        """Tell whether no earlier call of the connection holds a place."""
        return next(iter(self._places[place.peer])) is place

    def leave(self, place: "CallPlace") -> None:
        """Give a place up, and let the next call go on; a second time does nothing."""
        places = self._places.get(place.peer)
        if places is None or place not in places:
            return
        was_first = self.is_first(place)
        del places[place]
        if not places:
            del self._places[place.peer]
        elif was_first:
            next(iter(places)).is_first.set()

    def watch(self, peer: str) -> None:
        """Take the places of calls that hold up others for too long."""
        if peer not in self._timed:
            self._timed.add(peer)
            asyncio.get_running_loop().call_later(PATIENCE_S / 2, self._expire, peer)

    def _expire(self, peer: str) -> None:
        late_s = asyncio.get_running_loop().time() - PATIENCE_S
        # One that waits has its message, and goes on once it is the first.
        while (places := self._places.get(peer)) and not (first := next(iter(places))).is_waiting:
            if first.begun_s > late_s:
                break
            first.is_lost = True
            self.leave(first)
        self._timed.discard(peer)
        if places and any(place.is_waiting for place in places):
            self.watch(peer)


@final
@dataclass(slots=True, eq=False)
class CallPlace:
    """The place of one call among those of its connection.

    Args:
        order: Holds the places.
        peer: The connection.
        begun_s: When the call began, on the clock of the loop.

    Attributes:
        is_first: Set once no earlier call holds a place.
        is_lost: Whether later calls went first.
        is_waiting: Whether it waits for earlier calls.
    """

    order: CallOrder
    peer: str
    begun_s: float
    is_first: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    is_lost: bool = field(default=False, init=False)
    is_waiting: bool = field(default=False, init=False)

    async def wait(self) -> None:
        """Wait until all earlier calls of the connection have submitted their requests or lost their places.

        Raises:
            Overloaded: Later calls went first.
        """
        if not self.is_lost and not self.order.is_first(self):
            self.is_waiting = True
            self.order.watch(self.peer)
            await self.is_first.wait()
        if self.is_lost:
            raise Overloaded(
                f"The message came more than {PATIENCE_S:g} s after its call began, and later calls of the connection "
                f"went first; send the requests of a sequence one after the other."
            )

    def end(self) -> None:
        """Let later calls go on."""
        self.is_waiting = False
        self.order.leave(self)
