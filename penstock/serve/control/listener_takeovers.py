"""Takeovers of listeners: a front-end accepts the connections of another one that cannot."""

import socket
from collections.abc import Sequence
from typing import final

from penstock.serve.control.child import ChildProcess
from penstock.serve.messages import ReleaseListener, TakeOverListener


@final
class ListenerTakeovers:
    """Has a front-end accept the connections of another one that is dead, starts or is stalled.

    Args:
        frontends: The front-ends.
        sockets: The listening socket of each.
    """

    def __init__(self, frontends: Sequence[ChildProcess], sockets: Sequence[socket.socket]) -> None:
        self._frontends = frontends
        self._sockets = sockets
        # The front-end that accepts the connections of another one, by the index of that one.
        self._acting: dict[int, ChildProcess] = {}

    def arrange(self) -> None:
        """Begin the takeovers that are needed, and end those that are not needed any more."""
        accepting = [child for child in self._frontends if child.answers]
        if not accepting:
            return
        for index, child in enumerate(self._frontends):
            acting = self._acting.get(index)
            if child in accepting and acting is not None:
                acting.send(ReleaseListener(index=index))
                del self._acting[index]
            elif child not in accepting and acting is None:
                accepting[0].send(TakeOverListener(index=index), (self._sockets[index].fileno(),))
                self._acting[index] = accepting[0]

    def end(self, child: ChildProcess) -> None:
        """End the takeovers by a front-end that is dead or stalled itself."""
        for index, acting in list(self._acting.items()):
            if acting is child:
                del self._acting[index]
                child.send(ReleaseListener(index=index))
