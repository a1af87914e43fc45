"""Pauses of the connections of live streams, in both directions, and the bytes that the client has not read."""

import asyncio
from collections.abc import Callable

from penstock.serve.exchange.peer import Peer
from penstock.serve.websocket.live_stream import StreamOwner


class PausedConnection(StreamOwner):
    """A connection that may be paused, after the upgrade from HTTP; a protocol of asyncio, see `CompleteConnection`.

    Args:
        clock_s: A monotonic clock in seconds.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._transport: asyncio.Transport | None = None
        self._peers: set[Peer] = set()
        self._reading_paused = self._writing_paused = False
        # Bytes that the client had not read at the last sweep, and when their number changed.
        self._unread_bytes, self._moved_s = 0, clock_s()

    def eof_received(self) -> None:
        """Have the connection closed: the client sends nothing more."""

    def pause_writing(self) -> None:
        """Note that the client does not read fast enough."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        self._writing_paused = False

    def _count_unread(self, transport: asyncio.Transport, now_s: float) -> int:
        """Return the bytes that the client has not read, and note when their number changes."""
        unread = transport.get_write_buffer_size()
        if unread != self._unread_bytes:
            self._unread_bytes, self._moved_s = unread, now_s
        return unread

    def _pause(self) -> None:
        if not self._reading_paused and self._transport is not None and not self._transport.is_closing():
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._reading_paused and self._transport is not None and not self._transport.is_closing():
            self._reading_paused = False
            self._transport.resume_reading()
