"""File descriptors: how many connections a front-end may have under the limit of its process."""

import logging
import resource
import sys
from dataclasses import replace

from penstock.serve.exchange.reserved_places import PLACES
from penstock.serve.settings import LimitSettings, NetworkSettings, Settings

log = logging.getLogger(__name__)

# Descriptors of a front-end beside its connections: the libraries' files, the tables and the listening sockets.
FILES = 128
# A connection of gRPC is joined to one of the library, which has both ends of that in the same process.
PER_GRPC_CONNECTION = 3
# Fewer connections than this are worth a warning; other limits are logged with `--verbose`.
WARN_BELOW = 1_000


def raise_limit() -> int:
    """Raise the limit of this process, and of those that it starts, to the hard limit; returns it.

    A connection takes one descriptor, and the usual soft limit is 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """Return the limit of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def within_limit(settings: Settings, descriptors: int) -> Settings:
    """Lower `max_connections` to what the descriptors of a process leave room for, and log that.

    Without a free descriptor no connection can be accepted: idle ones would not make room, and health probes would get
    no answer.

    Args:
        settings: The server's settings.
        descriptors: Limit of each process.
    """
    network, given = settings.network, settings.limits
    limits = replace(given, max_connections=max(1, min(given.max_connections, _for_connections(network, descriptors))))
    grpc = grpc_limits(settings, descriptors).max_connections if network.grpc_port is not None else None
    if min(limits.max_connections, grpc or limits.max_connections) < given.max_connections:
        few = limits.max_connections < WARN_BELOW
        log.log(
            logging.WARNING if few else logging.INFO,
            "a process may have %d open files, so that a front-end has at most %d connections%s, not %d; raise the "
            "hard limit (ulimit -Hn, or LimitNOFILE= of systemd)",
            descriptors,
            limits.max_connections,
            "" if grpc is None else f", and {grpc} of gRPC",
            given.max_connections,
        )
    return replace(settings, limits=limits)


def grpc_limits(settings: Settings, descriptors: int) -> LimitSettings:
    """Lower `max_connections` to the connections of gRPC that the descriptors of a process leave room for."""
    room = _for_connections(settings.network, descriptors) // PER_GRPC_CONNECTION
    return replace(settings.limits, max_connections=max(1, min(settings.limits.max_connections, room)))


def _for_connections(network: NetworkSettings, descriptors: int) -> int:
    """Return the descriptors for connections of HTTP; with gRPC, as many are for its connections."""
    has_grpc = network.grpc_port is not None
    # Beyond the limit: those of HTTP, those that have made room, and those of gRPC.
    reserved = FILES + 2 * PLACES + PER_GRPC_CONNECTION * PLACES * has_grpc
    return max(descriptors - reserved, descriptors // 4) // (1 + has_grpc)
