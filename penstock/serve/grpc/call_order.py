"""The order of the calls of a connection: gRPC begins them in the order of their heads, and may read the message of a
later one first."""

import asyncio
from dataclasses import dataclass, field
from typing import final


@final
@dataclass(slots=True, eq=False)
class CallOrder:
    """Calls that have begun and have not submitted their request, by connection."""

    _under_way: dict[str, dict["CallTurn", None]] = field(default_factory=dict[str, "dict[CallTurn, None]"], init=False)

    def enter(self, peer: str) -> "CallTurn":
        """Return the turn of a call that begins now; `end` it in any case.

        Args:
            peer: The connection.
        """
        turn = CallTurn(self, peer)
        self._under_way.setdefault(peer, {})[turn] = None
        return turn

    def first(self, peer: str) -> "CallTurn":
        """Return the earliest turn of a connection that has one."""
        return next(iter(self._under_way[peer]))

    def leave(self, turn: "CallTurn") -> None:
        """Forget a turn; a second time does nothing."""
        turns = self._under_way.get(turn.peer)
        if turns is not None and turn in turns:
            del turns[turn]
            if not turns:
                del self._under_way[turn.peer]


@final
@dataclass(slots=True, eq=False)
class CallTurn:
    """The turn of one call.

    Args:
        order: Holds the turns.
        peer: The connection.
    """

    order: CallOrder
    peer: str
    _ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def wait(self) -> None:
        """Wait until the requests of all earlier calls of the connection are submitted, or have failed."""
        while (first := self.order.first(self.peer)) is not self:
            await first._ended.wait()

    def end(self) -> None:
        """Let later calls go on."""
        self.order.leave(self)
        self._ended.set()
