"""The interface of a client's connection, for every protocol."""

import asyncio
from collections.abc import Callable
from typing import Protocol

# Maximum pipelined requests; beyond it the socket is not read until some are answered.
PIPELINED = 16
# Bytes of unread answers under TLS beyond which the client's requests are not read.
UNREAD_BYTES = 1 << 20


class Peer(Protocol):
    """A client's connection."""

    def sweep(self, now_s: float, idle_timeout_s: float, request_timeout_s: float) -> None:
        """Close the connection if its client is inactive, see `LimitSettings`; called about once a second."""

    def close_after_next(self) -> None:
        """Close the connection after its next answer."""

    def close_when_idle(self) -> None:
        """Close the connection once all requests that began are answered."""

    def abort(self) -> None:
        """Close the connection at once."""


# Takes over a connection: its transport, the bytes after the last request, and the open connections to join.
Take = Callable[[asyncio.Transport, bytes, set[Peer]], None]
