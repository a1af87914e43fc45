"""Reservations of the ports that several sockets of one server share.

Front-ends share a port by SO_REUSEPORT, which the kernel allows to any process of the same user: another server with
the same port would get a part of the connections. While a socket listens, the kernel refuses the port to whoever
binds without that option first, as each server does. But sockets of gRPC and of agent checks listen only once the
models are loaded, and the only one may die.

An abstract Unix socket is as exclusive as a port, and in the same network namespace. It is free when its process has
ended, however that ended.
"""

import errno
import os
import socket
from typing import final


@final
class ReservedPorts:
    """The ports that this process holds against other servers."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self, listener: socket.socket) -> None:
        """Reserve the address of a bound socket.

        Raises:
            OSError: Another server has it (`EADDRINUSE`).
        """
        host, port = listener.getsockname()[:2]
        try:
            held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        except OSError:
            # A sandbox without Unix sockets; the kernel still refuses a port at which a server listens.
            return
        try:
            held.bind(f"\0penstock {host} {port}")
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE:
                return
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from None
        self._held.append(held)

    def close(self) -> None:
        """Give all of them back."""
        while self._held:
            self._held.pop().close()
