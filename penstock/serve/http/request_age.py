"""Request age, from TCP_INFO.

An event loop that runs batches, or reads a thousand sockets in one poll, reads a request long after it arrived. Linux
records when a TCP connection last received data (`tcpi_last_data_recv`, see tcp(7)), to the resolution of its tick.
"""

import socket
import struct
import time
from collections.abc import Callable
from typing import final

# Upper bound of the age of a connection's newest bytes, in nanoseconds.
RequestAge = Callable[[], int]

# The upper bound where the kernel gives none.
UNKNOWN_NS = 1 << 62
# From <linux/time.h>; its resolution is the kernel's tick.
_CLOCK_MONOTONIC_COARSE = 6
# Offset of the field in `struct tcp_info` of <linux/tcp.h>, and a length that includes it.
_LAST_DATA_RECV = 52
_INFO_BYTES = 56
_AGE = struct.Struct("=I")


@final
class TcpAge:
    """Age of the newest bytes of a TCP connection.

    Args:
        client: Its socket.
        tick_ns: The kernel's tick.
    """

    __slots__ = ("_getsockopt", "_tick_ns")

    def __init__(self, client: socket.socket, tick_ns: int) -> None:
        self._getsockopt, self._tick_ns = client.getsockopt, tick_ns

    def __call__(self) -> int:
        """Return an upper bound, in nanoseconds."""
        try:
            info = self._getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:
            return UNKNOWN_NS
        (age_ms,) = _AGE.unpack_from(info, _LAST_DATA_RECV)
        return age_ms * 1_000_000 + self._tick_ns


def request_age(client: socket.socket) -> RequestAge:
    """Make a function that returns the age of the newest bytes of a connection."""
    if client.family not in (socket.AF_INET, socket.AF_INET6):
        return lambda: UNKNOWN_NS
    # Both ends of the interval are truncated to ticks.
    return TcpAge(client, int(time.clock_getres(_CLOCK_MONOTONIC_COARSE) * 1e9))
