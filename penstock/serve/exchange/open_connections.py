"""The connections of a front-end, and which of them makes room for a new one when there are too many."""

import socket
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, Protocol, TypeVar, cast, final

from penstock.core.errors import Overloaded
from penstock.serve.exchange.request_bounds import OLD_NS

# A connection that has done nothing for less time than this never makes room: its request may be on its way.
YOUNG_NS = 100_000_000
# Shortest wait for one that is too young.
MIN_WAIT_S = 0.001
# Addresses that are examined for one new connection, and connections of each.
ADDRESSES, EXAMINED = 8, 16
# Closed connections that the order of an address may keep, beside as many as are open.
CLOSED = 16


def all_in_use(max_connections: int) -> Overloaded:
    """The refusal of a request over a connection beyond the limit."""
    return Overloaded(f"This server has all of its {max_connections:,} connections; come back later.")


# A connection, of any kind: some never make room.
Connected = TypeVar("Connected")


class Evictable(Protocol):
    """A connection that may make room."""

    def unused(self) -> tuple[int, bool] | None:
        """Tell since when the connection has no whole request, in ns, and whether one has begun to come.

        Returns:
            None if a request waits or is being answered, or the server does not read.
        """
        ...


@dataclass(slots=True, eq=False)
class _Accepted:
    """A connection that may make room; None once it is closed."""

    connection: Evictable | None
    client: socket.socket | None
    address: "_Address"


@dataclass(slots=True, eq=False)
class _Address:
    name: str
    connections: int = 0
    # A heap by the time since which each is unused at the earliest. Closed ones leave it later.
    order: list[tuple[int, int, _Accepted]] = field(default_factory=list[tuple[int, int, _Accepted]])


@final
class OpenConnections(set[Connected], Generic[Connected]):
    """The connections that count against the limit of a front-end.

    Those that may make room are kept by address, and addresses by the number of their connections. A request changes
    nothing here: an eviction looks at the connections that were unused for longest, and puts back those that were used
    since. It looks at a bounded number.

    Args:
        has_bytes: Tells whether unread bytes wait in a socket.
    """

    def __init__(self, has_bytes: Callable[[socket.socket], bool]) -> None:
        super().__init__()
        self._has_bytes = has_bytes
        # When one makes room that the last `evict` found too young; 0 if it found none.
        self._room_ns = 0
        # Accepted, but not connected yet.
        self._connecting: set[object] = set()
        self._accepted: dict[object, _Accepted] = {}
        self._addresses: dict[str, _Address] = {}
        self._numbers = count()
        # The addresses with so many connections, and the numbers in order: n numbers need n² / 2 connections.
        self._by_count: dict[int, OrderedDict[_Address, None]] = {}
        self._counts: list[int] = []

    @property
    def count(self) -> int:
        """Number of connections, with those that are not connected yet."""
        return len(self) + len(self._connecting)

    def accept(self, connection: Evictable, client: socket.socket, name: str, now_ns: int) -> None:
        """Count a connection that was accepted from an address; `add` follows when it is connected."""
        self._connecting.add(connection)
        address = self._addresses.get(name)
        if address is None:
            address = self._addresses[name] = _Address(name)
        accepted = self._accepted[connection] = _Accepted(connection, client, address)
        heappush(address.order, (now_ns, next(self._numbers), accepted))
        self._change_count(address, 1)

    def add(self, connection: Connected, /) -> None:
        """Add a connection."""
        self._connecting.discard(connection)
        super().add(connection)

    def discard(self, connection: object, /) -> None:
        """Remove a connection, if it is there."""
        self._connecting.discard(connection)
        super().discard(connection)
        if (accepted := self._accepted.pop(connection, None)) is not None:
            address, accepted.connection, accepted.client = accepted.address, None, None
            self._change_count(address, -1)
            if not address.connections:
                del self._addresses[address.name]
            elif len(address.order) > 2 * address.connections + CLOSED:
                address.order = [each for each in address.order if each[2].connection is not None]
                heapify(address.order)

    def evict(self, now_ns: int) -> tuple[Evictable, socket.socket] | None:
        """Remove the connection that makes room for a new one; None if each is in use, or too young.

        It is of the address that has most connections, and of these the one unused for longest, as far as they were
        examined. A request that began to come less than `OLD_NS` ago goes only where there is nothing else.
        """
        self._room_ns = 0
        first_begun: _Accepted | None = None
        for address in self._largest():
            found, begun = self._longest_unused(address, now_ns)
            if found is not None:
                return self._removed(found)
            first_begun = first_begun or begun
        return None if first_begun is None else self._removed(first_begun)

    def wait_s(self, now_ns: int) -> float:
        """Compute the time until one makes room that the last `evict` found too young, in s; 0 if it found none."""
        return max(MIN_WAIT_S, (self._room_ns - now_ns) / 1e9) if self._room_ns else 0.0

    def _largest(self) -> list[_Address]:
        """The addresses with most connections; of those with equally many, the ones examined longest ago."""
        found: list[_Address] = []
        for connections in reversed(self._counts):
            same = self._by_count[connections]
            for _ in range(min(len(same), ADDRESSES - len(found))):
                address = next(iter(same))
                same.move_to_end(address)
                found.append(address)
        return found

    def _longest_unused(self, address: _Address, now_ns: int) -> tuple[_Accepted | None, _Accepted | None]:
        """The connection of an address that makes room, and the one that does where there is no such connection."""
        order, put_back = address.order, list[tuple[int, int, _Accepted]]()
        # Those that were used since they were noted are put back, and one of them is found where nothing else is.
        found: tuple[int, _Accepted] | None = None
        begun: tuple[int, _Accepted] | None = None
        for _ in range(EXAMINED):
            while order and order[0][2].connection is None:
                heappop(order)
            if not order:
                break
            noted_ns, number, accepted = order[0]
            unused = _connection(accepted).unused()
            since_ns, has_begun = unused or (now_ns, False)
            used = since_ns > noted_ns
            if used:
                heapreplace(order, (since_ns, number, accepted))
            if now_ns - (last_ns := max(noted_ns, since_ns)) < YOUNG_NS:
                if unused is not None:
                    self._room_ns = min(self._room_ns or last_ns + YOUNG_NS, last_ns + YOUNG_NS)
                if used:
                    continue
                break  # and so are the others
            slow = has_begun and now_ns - since_ns >= OLD_NS
            if not has_begun and self._has_bytes(cast(socket.socket, accepted.client)):
                # Its request has come, and was not read yet. Who dribbles could always have sent more of one.
                if not used:
                    heapreplace(order, (now_ns, number, accepted))
            elif has_begun and not slow:
                begun = min(begun or (since_ns, accepted), (since_ns, accepted), key=_since_ns)
                if not used:
                    put_back.append(heappop(order))
            else:
                found = min(found or (since_ns, accepted), (since_ns, accepted), key=_since_ns)
                if not used:
                    break
        for each in put_back:
            heappush(order, each)
        return found and found[1], begun and begun[1]

    def _removed(self, accepted: _Accepted) -> tuple[Evictable, socket.socket]:
        connection, client = _connection(accepted), cast(socket.socket, accepted.client)
        self.discard(connection)
        return connection, client

    def _change_count(self, address: _Address, change: int) -> None:
        """Sort an address in by the number of its connections."""
        before = address.connections
        after = address.connections = before + change
        if before:
            same = self._by_count[before]
            del same[address]
            if not same:
                del self._by_count[before]
                del self._counts[bisect_left(self._counts, before)]
        if after:
            if after not in self._by_count:
                self._by_count[after] = OrderedDict()
                insort(self._counts, after)
            self._by_count[after][address] = None


def _connection(accepted: _Accepted) -> Evictable:
    assert accepted.connection is not None, accepted
    return accepted.connection


def _since_ns(unused: tuple[int, _Accepted]) -> int:
    return unused[0]


def has_bytes(client: socket.socket) -> bool:
    """Tell whether bytes that were not read wait in a socket."""
    try:
        return bool(client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:  # there are none, or it is closed
        return False
