"""For how long a request has been there, as the kernel saw it.

A loop that runs batches, or reads a thousand sockets in one poll, learns of a request long after it came. TCP's own
record of when data was last received (`tcpi_last_data_recv` of Linux' `TCP_INFO`, see tcp(7)) says how long, to a tick.
"""

import socket
import struct
import sys
import time
from collections.abc import Callable

# In nanoseconds, at most; the longest time there is where the kernel does not say.
Heard = Callable[[], int]

UNKNOWN_NS = 1 << 62
# Of <linux/time.h>; its resolution is the kernel's tick.
_CLOCK_MONOTONIC_COARSE = 6
# Of <linux/tcp.h>, where `struct tcp_info` has it, and a length that reaches as far.
_LAST_DATA_RECV = 52
_INFO_BYTES = 56


def heard(client: socket.socket) -> Heard:
    """What says how long ago the last bytes of a TCP connection came, at most."""
    if not sys.platform.startswith("linux") or client.family not in (socket.AF_INET, socket.AF_INET6):
        return lambda: UNKNOWN_NS
    # The record is in the kernel's ticks, and both its ends may be cut off.
    tick_ns = int(time.clock_getres(_CLOCK_MONOTONIC_COARSE) * 1e9)

    def ago_ns() -> int:
        try:
            info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:
            return UNKNOWN_NS
        if len(info) < _INFO_BYTES:
            return UNKNOWN_NS
        (ago_ms,) = struct.unpack_from("=I", info, _LAST_DATA_RECV)
        return ago_ms * 1_000_000 + tick_ns

    return ago_ns
