"""Raw sockets in one plain loop over `epoll`, shared by the senders of requests and of streams.

The transports of an event loop take as long for a request as a fast server does.
"""

import errno
import gc
import os
import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Collection

from penstock.core.errors import BenchError

# epoll waits in whole milliseconds; below this the loop polls without waiting.
NEAR_S = 0.001
MAX_WAIT_S = 0.01
# Maximum events of one poll; due messages are sent between polls.
AT_ONCE = 256
READ_BYTES = 1 << 16
CONNECT_S = 5.0
READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR


class SocketLoop:
    """Polls the sockets of one server.

    Args:
        host: The server's address.
        port: Its port.
        cpus: The cores of this process; None to leave them.

    Attributes:
        family: The address family of the server.
        address: The first of its addresses that accepts.
        poll: The poll of all sockets.
        by_number: The open sockets by file descriptor.

    Raises:
        BenchError: The server cannot be reached.
    """

    def __init__(self, host: str, port: int, cpus: Collection[int] | None) -> None:
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        gc.disable()
        try:
            with socket.create_connection((host, port), timeout=CONNECT_S) as first:
                self.family, self.address = first.family, first.getpeername()
        except OSError as error:
            raise BenchError(f"{host}:{port} cannot be reached ({error}).") from None
        self.poll = select.epoll()
        self.by_number: dict[int, PolledSocket] = {}

    def handle_events(self, wait_s: float) -> None:
        """Wait until an event or the time, whichever is first, and handle the events."""
        by_number = self.by_number
        for number, events in self.poll.poll(min(wait_s - NEAR_S, MAX_WAIT_S) if wait_s > NEAR_S else 0, AT_ONCE):
            connection = by_number.get(number)
            if connection is not None:
                connection.handle(events)

    def close(self) -> None:
        """Close every socket and the poll."""
        for connection in list(self.by_number.values()):
            connection.close()
        self.poll.close()


class PolledSocket(ABC):
    """A connection that is being opened or is open. Subclasses speak one protocol each.

    Args:
        loop: Its loop.
        first: Bytes sent as soon as the connection is open.

    Attributes:
        opening: True until the connection is open.
    """

    def __init__(self, loop: SocketLoop, first: bytes = b"") -> None:
        self.opening = True
        self._loop = loop
        self._unsent = first
        self._socket = socket.socket(loop.family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reason = self._socket.connect_ex(loop.address)
        if reason not in (0, errno.EINPROGRESS):
            # No route or no free port: a fault of the measuring machine.
            raise BenchError(f"no connection to {loop.address} can be opened ({os.strerror(reason)}).")
        loop.by_number[self._socket.fileno()] = self
        loop.poll.register(self._socket, select.EPOLLOUT)

    @abstractmethod
    def received(self, data: bytes) -> None:
        """Handle bytes from the server."""

    @abstractmethod
    def lost(self, reason: str) -> None:
        """Handle that the connection could not be opened or has ended; close it."""

    @abstractmethod
    def opened(self) -> None:
        """Handle the opened connection; bytes written earlier have been sent."""

    @property
    def connected(self) -> bool:
        """True until the connection is closed."""
        return self._socket.fileno() >= 0

    def handle(self, events: int) -> None:
        """Handle the events of the socket."""
        if events & READABLE and not self.opening:
            # First: a server may answer and close before it has read everything.
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self.lost(error.strerror or str(error))
                return
            if data:
                self.received(data)
            else:
                self.lost("the server closed the connection")
        elif self.opening:
            if reason := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.lost(os.strerror(reason))
                return
            self.opening = False
            self._flush()
            if self.connected:
                self.opened()
        else:
            self._flush()

    def write(self, data: bytes) -> None:
        """Send bytes now, or when the socket is writable."""
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.lost(error.strerror or str(error))
            return
        if sent < len(data):
            self._unsent = data[sent:]
            self._loop.poll.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)

    def close(self) -> None:
        """Close the connection."""
        if self.connected:
            del self._loop.by_number[self._socket.fileno()]
            self._socket.close()

    def _flush(self) -> None:
        self._loop.poll.modify(self._socket, select.EPOLLIN)
        unsent, self._unsent = self._unsent, b""
        if unsent:
            self.write(unsent)
