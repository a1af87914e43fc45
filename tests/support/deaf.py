"""A client of live streams that sends without end and reads nothing."""

import socket
import time

from websockets.frames import Frame, Opcode

PINGS = 300_000


def deaf_client(host: str, port: int, upgrade: bytes, start: bytes) -> socket.socket:
    """Open a WebSocket whose client reads the answers to its upgrade and its start, and nothing else.

    A machine that is busy refuses streams for a while: the upgrade, or the start by a close. What comes after a close
    is read and dropped, so that such a client could send without end.

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
        if answer.startswith(b"HTTP/1.1 101 ") and _opcode(deaf, answer) is not Opcode.CLOSE:
            return deaf
        deaf.close()
        time.sleep(0.2)
    raise AssertionError(answer)


def _opcode(deaf: socket.socket, answer: bytes) -> Opcode:
    """Return the kind of the first frame after the head of the answer."""
    while not (rest := answer.partition(b"\r\n\r\n")[2]):
        part = deaf.recv(1024)
        assert part, "the connection ended before the first frame"
        answer += part
    return Opcode(rest[0] & 15)


def send_pings(deaf: socket.socket) -> None:
    """Send pings until the server ends the connection, for a minute, or until it takes none for 20 s.

    The buffers of the kernel hold 36 MB where `tcp_rmem` allows 32. Where the server closed the stream for another
    reason, it reads on for seconds before it ends the connection.

    Raises:
        ConnectionError: The server ended it: reset or broken pipe, as the kernel has it.
    """
    pings = Frame(Opcode.PING, b"p" * 125).serialize(mask=True) * PINGS
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        deaf.sendall(pings)
