"""Connections of sent streams: one of a stream alone, or one that several share."""

from abc import abstractmethod
from typing import Protocol, final

from penstock.bench.socket_loop import PolledSocket
from penstock.bench.streams.stream_sender import SentStream, StreamSender


class ConnectedStream(SentStream):
    """A stream on its own connection.

    Args:
        sender: Its sender.
        index: Its number; it selects the sound.
        first: Bytes sent as soon as the connection is open.
    """

    def __init__(self, sender: StreamSender, index: int, first: bytes) -> None:
        super().__init__(sender, index)
        self._connection = SenderSocket(sender, first, self)

    @property
    def connected(self) -> bool:
        """True until its connection is closed."""
        return self._connection.connected

    @abstractmethod
    def received(self, data: bytes) -> None:
        """Handle bytes from the server."""

    def write(self, data: bytes) -> None:
        """Send bytes."""
        self._connection.write(data)

    def close_connection(self) -> None:
        """Close its connection."""
        self._connection.close()


class StreamUser(Protocol):
    """The reader of a connection of one stream or of several."""

    def received(self, data: bytes) -> None:
        """Handle bytes from the server."""

    def lost(self, reason: str) -> None:
        """Handle that the connection could not be opened or has ended; close it."""


@final
class SenderSocket(PolledSocket):
    """A connection of one stream or of several.

    Args:
        sender: Its sender.
        first: Bytes sent as soon as it is open.
        user: Takes what comes.
    """

    def __init__(self, sender: StreamSender, first: bytes, user: StreamUser) -> None:
        super().__init__(sender, first)
        self._user = user

    def opened(self) -> None:
        """Do nothing: the first bytes have been sent."""

    def received(self, data: bytes) -> None:
        """Handle bytes from the server."""
        self._user.received(data)

    def lost(self, reason: str) -> None:
        """Handle that the connection could not be opened or has ended."""
        self._user.lost(reason)
