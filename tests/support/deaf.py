"""A client of live streams that sends without end and reads nothing."""

import socket

from websockets.frames import Frame, Opcode

PINGS = 300_000


def send_pings(deaf: socket.socket) -> None:
    """Send pings until the server ends the connection; give up after what no buffers hold.

    The buffers of the kernel hold 36 MB where `tcp_rmem` allows 32, which may be more than one round of these.

    Raises:
        ConnectionError: The server ended it: reset or broken pipe, as the kernel has it.
    """
    pings = Frame(Opcode.PING, b"p" * 125).serialize(mask=True) * PINGS
    for _ in range(10):
        deaf.sendall(pings)
