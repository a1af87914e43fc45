"""The sockets of a server: of HTTP, gRPC and agent checks, one for each front-end, on ports that these share."""

import socket
from contextlib import ExitStack
from dataclasses import replace

from penstock.core.errors import ServeError
from penstock.serve.exchange.reserved_ports import ReservedPorts
from penstock.serve.settings import NetworkSettings

BACKLOG = 1024
# Uses of further ports, and their options.
_GRPC, _AGENT = (" for gRPC", "--grpc-port"), (" for agent checks", "--agent-port")


def listeners(host: str, port: int, count: int, reserved: ReservedPorts) -> list[socket.socket]:
    """Bind a socket for each front-end; the kernel distributes connections over those that listen.

    Args:
        host: The address.
        port: The port; 0 for a free one.
        count: Front-ends.
        reserved: Holds the port, where they share it.

    Raises:
        ServeError: The address is not available.
    """
    if count == 1:
        return [_bound(host, port)]
    # Bound without SO_REUSEPORT first, which would silently share the port of another server.
    with _bound(host, port, reserved=reserved) as first:
        port = first.getsockname()[1]
    return [_bound(host, port, shared=True) for _ in range(count)]


def with_free_ports(network: NetworkSettings, reserved: ReservedPorts) -> NetworkSettings:
    """Choose the ports of gRPC and of agent checks, which all front-ends share.

    Args:
        network: The settings.
        reserved: Holds the ports: nothing listens there until the models are loaded.

    Raises:
        ServeError: One is taken. A socket of `grpc_listener` or `agent_listener` shares it, so that this is found here
            and only here.
    """
    ports = {
        "grpc_port": _free(network.host, network.grpc_port, *_GRPC, reserved),
        "agent_port": _free(network.host, network.agent_port, *_AGENT, reserved),
    }
    return replace(network, **ports)


def _free(host: str, port: int | None, use: str, option: str, reserved: ReservedPorts) -> int | None:
    if port is None:
        return None
    with _bound(host, port, use, option, reserved=reserved) as probe:
        return probe.getsockname()[1]


def grpc_listener(network: NetworkSettings, port: int) -> socket.socket:
    """Bind a socket of gRPC for one front-end, on the port that all front-ends share.

    Raises:
        ServeError: The address is not available.
    """
    return _bound(network.host, port, *_GRPC, shared=True)


def agent_listener(network: NetworkSettings, port: int) -> socket.socket:
    """Bind a socket of agent checks for one front-end, on the port that all front-ends share.

    Raises:
        ServeError: The address is not available.
    """
    return _bound(network.host, port, *_AGENT, shared=True)


def url_of(listener: socket.socket, tls: bool) -> str:
    """URL of the server for a client on this machine."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}/"


def _bound(
    host: str,
    port: int,
    use: str = "",
    option: str = "--port",
    *,
    shared: bool = False,
    reserved: ReservedPorts | None = None,
) -> socket.socket:
    with ExitStack() as on_error:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = on_error.enter_context(socket.socket(family))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((host, port))
            if reserved is not None:
                reserved.take(listener)
        except (OSError, UnicodeError) as error:
            # A name such as `a..b` cannot be looked up.
            reason = error.strerror if isinstance(error, OSError) else "it is no name of a host"
            raise ServeError(
                f"cannot listen{use} on {host}:{port} ({reason}); choose another --host or {option}."
            ) from None
        on_error.pop_all()
    return listener
