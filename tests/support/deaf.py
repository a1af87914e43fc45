"""A client of live streams that sends without end and reads nothing."""

import socket
import time

from websockets.frames import Frame, Opcode

PINGS = 300_000


def deaf_client(host: str, port: int, upgrade: bytes, start: bytes) -> socket.socket:
    """Open a WebSocket whose client reads the answer to its upgrade and nothing else.

    A machine that is busy refuses streams for a while.

    Args:
        host: The server's.
        port: The server's.
        upgrade: The head of the request.
        start: The frames that follow at once.
    """
    end_s, answer = time.monotonic() + 20, b""
    while time.monotonic() < end_s:
        deaf = socket.socket()
        # Before it connects: a window that shrinks later has the kernel drop what acknowledges, and all stands still.
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.settimeout(20)
        deaf.connect((host, port))
        deaf.sendall(upgrade + start)
        answer = deaf.recv(1024)
        if answer.startswith(b"HTTP/1.1 101 "):
            return deaf
        deaf.close()
        time.sleep(0.2)
    raise AssertionError(answer)


def send_pings(deaf: socket.socket) -> None:
    """Send pings until the server ends the connection; give up after what no buffers hold.

    The buffers of the kernel hold 36 MB where `tcp_rmem` allows 32, which may be more than one round of these.

    Raises:
        ConnectionError: The server ended it: reset or broken pipe, as the kernel has it.
    """
    pings = Frame(Opcode.PING, b"p" * 125).serialize(mask=True) * PINGS
    for _ in range(10):
        deaf.sendall(pings)
