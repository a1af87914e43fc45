"""Connections that wait at the listening sockets of other front-ends, which do not accept them.

The kernel gives each connection to one of the sockets of a port. A process that was killed frees its memory before
anybody learns of its end, and one that is stopped or computes for long accepts nothing either.
"""

import asyncio
import select
import socket
from collections.abc import Callable, Sequence
from typing import final

# Pause between two looks. What waits at both is neglected.
LOOK_S = 0.005


@final
class NeglectedQueues:
    """Looks at the listening sockets of other front-ends while this one has work; an idle process does not wake for it.

    Args:
        listeners: The sockets; this process has its own descriptors of them.
        accept: Accepts some of the connections that wait at one of them.
    """

    def __init__(self, listeners: Sequence[socket.socket], accept: Callable[[socket.socket], None]) -> None:
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._accept = accept
        self._poll = select.poll()
        for number, listener in self._listeners.items():
            listener.setblocking(False)
            self._poll.register(number, select.POLLIN)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._has_worked = False
        # Where connections waited at the last look.
        self._waited: set[int] = set()

    def note_work(self) -> None:
        """Go on to look for a while."""
        self._has_worked = True
        if self._timer is None and self._listeners:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def close(self, last: Callable[[socket.socket], None]) -> None:
        """Close the sockets, after a last call for each: what waits at one that all have closed is reset."""
        if self._timer is not None:
            self._timer.cancel()
        for listener in self._listeners.values():
            last(listener)
            listener.close()
        self._listeners.clear()

    def _look(self) -> None:
        waiting = {number for number, _ in self._poll.poll(0)}
        for number in waiting & self._waited:
            self._accept(self._listeners[number])
        self._waited = waiting
        self._timer = None
        if self._has_worked or waiting:
            self._timer = self._loop.call_later(LOOK_S, self._look)
        self._has_worked = False
