"""Quotas of live streams: how many one API key and one client address may hold at once, over all front-ends."""

import ipaddress
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from penstock.core.errors import QuotaExceeded
from penstock.serve.table.client_counts import ClientCounts

LIVE_STREAMS, GRPC_STREAMS = "live streams", "gRPC streams"
# Whoever has one IPv6 address has all of its network.
IPV6_PREFIX = 64


@dataclass(frozen=True, slots=True)
class StreamClient:
    """The client of a stream.

    Args:
        key: Owner of its API key; empty without keys.
        address: Address of its connection; empty if it is not known.
    """

    key: str = ""
    address: str = ""


UNKNOWN = StreamClient()


@dataclass(frozen=True, slots=True)
class _Share:
    holder: str
    limit: int
    option: str


@final
class StreamQuotas:
    """The quotas, for one front-end. Two front-ends that admit in the same instant may both take the last place.

    Args:
        per_key: Streams of one API key's owner, of each kind; None for any number.
        per_address: Streams of one address, of each kind; None for any number.
        counts: The streams of each client.
    """

    def __init__(
        self, per_key: int | None = None, per_address: int | None = None, counts: ClientCounts | None = None
    ) -> None:
        self._per_key, self.per_address = per_key, per_address
        self._counts = counts
        # Streams of gRPC are counted in a thread of their own.
        self._lock = threading.Lock()

    def admit(self, client: StreamClient, kind: str = LIVE_STREAMS) -> None:
        """Count one more stream of a client, until `leave`.

        Raises:
            QuotaExceeded: The client holds as many as it may.
        """
        with self._lock:
            self.reject_excess(client, kind)
            self._add(client, kind, 1)

    def leave(self, client: StreamClient, kind: str = LIVE_STREAMS) -> None:
        """Give a stream's place back."""
        with self._lock:
            self._add(client, kind, -1)

    def reject_excess(
        self, client: StreamClient, kind: str = LIVE_STREAMS, replaced: StreamClient | None = None
    ) -> None:
        """Check that a client may open one more stream.

        Args:
            client: The client.
            kind: Kind of the stream.
            replaced: Client of a stream that ends in its place; None if none does.

        Raises:
            QuotaExceeded: It holds as many as it may.
        """
        if self._counts is None:
            return
        freed = [] if replaced is None else [share.holder for share in self._shares(replaced)]
        for share in self._shares(client):
            if share.holder not in freed and (count := self._counts.of(f"{kind} {share.holder}")) >= share.limit:
                raise QuotaExceeded(
                    f"{share.holder} has {count:,} {kind} open, and {share.option} allows {share.limit:,}; end one of "
                    f"them first."
                )

    def _add(self, client: StreamClient, kind: str, count: int) -> None:
        if self._counts is not None:
            for share in self._shares(client):
                self._counts.add(f"{kind} {share.holder}", count)

    def _shares(self, client: StreamClient) -> Iterator[_Share]:
        if self._per_key is not None and client.key:
            yield _Share(f"The key of {client.key!r}", self._per_key, "--max-streams-per-key")
        if self.per_address is not None and client.address:
            yield _Share(f"Address {address_block(client.address)}", self.per_address, "--max-streams-per-address")


def address_block(address: str) -> str:
    """The part of an address that is counted: an IPv4 address, or the /64 network of an IPv6 one."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if isinstance(ip, ipaddress.IPv4Address) or ip.is_loopback:
        return str(ip)
    return str(ipaddress.ip_network((ip, IPV6_PREFIX), strict=False))
