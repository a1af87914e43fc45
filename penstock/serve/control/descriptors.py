"""File descriptors: how many connections a front-end may have under the limit of its process."""

import logging
import resource
import sys
from dataclasses import replace

from penstock.serve.settings import LimitSettings, Settings

log = logging.getLogger(__name__)

# Descriptors beside the connections: the libraries' files, the tables, the listening sockets, and the connections
# beyond the limit that are kept at once.
OTHERS = 256
# A connection of gRPC is joined to one of the library, which has both ends of that in the same process.
OF_GRPC = 3
# Fewer connections than this are worth a warning.
FEW = 1_000


def raise_limit() -> int:
    """Raise the limit of this process, and of those that it starts, as far as it may be; returns it.

    A connection takes one descriptor, and the usual soft limit is 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return limit()


def limit() -> int:
    """Return the limit of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def within_limit(settings: Settings, descriptors: int) -> Settings:
    """Lower `max_connections` to what the descriptors of a process leave room for.

    Without one, a new connection could not be accepted, so that none would make room for it, and health probes would
    get no answer.

    Args:
        settings: The server's settings.
        descriptors: Limit of each process.
    """
    grpc, most = settings.network.grpc_port is not None, settings.limits.max_connections
    room = room_within(descriptors) // (1 + grpc)
    if room < min(most, FEW):
        log.warning(
            "a process may have %d open files, so that a front-end has at most %d connections, not %d; raise the hard "
            "limit (ulimit -Hn, or LimitNOFILE= of systemd)",
            descriptors,
            room,
            most,
        )
    return replace(settings, limits=replace(settings.limits, max_connections=max(1, min(most, room))))


def of_grpc(limits: LimitSettings, descriptors: int) -> LimitSettings:
    """Lower `max_connections` to the connections of gRPC that half of the descriptors of a process leave room for."""
    room = room_within(descriptors) // 2 // OF_GRPC
    return replace(limits, max_connections=max(1, min(limits.max_connections, room)))


def room_within(descriptors: int) -> int:
    """Return how many descriptors of a process are left for connections."""
    return max(descriptors - OTHERS, descriptors // 4)
