"""Clients on the server's own machine, and the users that they run as."""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

# Set by proxies, whose clients may be anywhere.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"


@final
@dataclass(frozen=True, slots=True)
class Connected:
    """The two ends of a client's connection.

    Args:
        address: The client's address, without brackets.
        port: The client's port.
        server_port: The server's port.
        forwarded: A proxy sent the request.
    """

    address: str
    port: int
    server_port: int
    forwarded: bool = False

    @classmethod
    def over_http(cls, transport: Any, headers: Mapping[str, str]) -> Self | None:
        """Return the ends of the connection of an HTTP request; None if they are not known."""
        peer = transport and transport.get_extra_info("peername")
        own = transport and transport.get_extra_info("sockname")
        if not isinstance(peer, tuple) or not isinstance(own, tuple):
            return None
        return cls(str(peer[0]), int(peer[1]), int(own[1]), any(name in headers for name in _FORWARDED))

    @classmethod
    def over_grpc(cls, client: tuple[str, int] | None, server_port: int, metadata: Mapping[str, Any]) -> Self | None:
        """Return the ends of a gRPC call's connection, from its client's address and port; None if not known."""
        if client is None:
            return None
        return cls(*client, server_port, any(name in metadata for name in _FORWARDED))

    @property
    def is_local(self) -> bool:
        """Tell whether the client is on this machine: its address is a loopback address, and no proxy is between."""
        return not self.forwarded and _ip(self.address).is_loopback

    def user(self) -> int | None:
        """Return the id of the user whose process holds the client's end, from the kernel; None if it is not there."""
        ip = _ip(self.address)
        for table in _TABLES:
            try:
                lines = table.read_text().splitlines()[1:]
            except OSError:
                continue
            for line in lines:
                # The client's end: its own address first, then the server's.
                _, local, remote, state, _, _, _, user, *_ = line.split()
                host, _, port = local.partition(":")
                if (
                    int(port, 16) == self.port
                    and int(remote.rpartition(":")[2], 16) == self.server_port
                    and state == _ESTABLISHED
                    and _ip_of_kernel(host) == ip
                ):
                    return int(user)
        return None


def address_of(transport: Any) -> str:
    """Return the client's address of a connection; empty if it is not known."""
    peer = transport and transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    ip = ipaddress.ip_address(text.partition("%")[0])
    return getattr(ip, "ipv4_mapped", None) or ip


def _ip_of_kernel(digits: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    # Words of 32 bits in the processor's order; x86-64 is little-endian.
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    return _ip(str(ipaddress.ip_address(b"".join(words))))
