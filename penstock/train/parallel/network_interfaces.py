"""Choice of the network interface that leads to the other training machines."""

import fcntl
import socket
import struct
from pathlib import Path

from penstock.core.errors import TrainError

_FIRST_IPV4_OF = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_LOOPBACK = ("127.", "::1", "::ffff:127.")


def interface_towards(address: str, port: int) -> str:
    """Find the interface that leads to rank 0, also on rank 0's own machine.

    By default gloo takes the interface of the host name, which often is the loopback.

    Args:
        address: The address where rank 0 listens.
        port: The port there.

    Returns:
        The name of the interface, `eth0` for example.

    Raises:
        TrainError: There is no route, or only one over the loopback.
    """
    advice = "give an address by which all machines reach the first one (torchrun's --master-addr or --local-addr)"
    try:
        own = _own_address(address, port)
    except OSError as error:
        raise TrainError(
            f"there is no way from this machine to {address}, where the first process listens "
            f"({error.strerror or error}); {advice}."
        ) from None
    if own.startswith(_LOOPBACK):
        raise TrainError(
            f"the first process's address is {address}, which here is this machine alone ({own}), and no other machine "
            f"comes there; {advice}, or name the interface in GLOO_SOCKET_IFNAME."
        )
    found = [name for _, name in socket.if_nameindex() if own in _addresses(name)]
    if not found:
        raise TrainError(
            f"this machine reaches the first process by its address {own}, which is the first of no interface; "
            f"name the interface in GLOO_SOCKET_IFNAME."
        )
    return found[0]


def _own_address(address: str, port: int) -> str:
    """Find the source address of packets to another machine; nothing is sent."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sender:
        sender.connect(place)
        return sender.getsockname()[0].partition("%")[0]


def _addresses(interface: str) -> list[str]:
    """List the first IPv4 address of an interface, and all its IPv6 addresses."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked.fileno(), _FIRST_IPV4_OF, struct.pack("16s24x", interface.encode()))
            found.append(socket.inet_ntoa(answer[20:24]))
        except OSError:
            # No IPv4 address.
            pass
    for line in _IPV6_ADDRESSES.read_text().splitlines() if _IPV6_ADDRESSES.exists() else []:
        digits, *_, name = line.split()
        if name == interface:
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
