"""Bounds of requests that have not come whole: time for a head and a body, and the bytes of all of them together."""

from dataclasses import dataclass, field
from typing import Protocol, final

from penstock.core.errors import Overloaded, RequestError, TooSlow

# Counted for each connection beside the bytes of its requests: its objects in Python, uvloop and the HTTP parser.
CONNECTION_BYTES = 10_240
# A request that has not come whole after this time is rejected where a newer one needs its room, so that slow clients
# cannot take all of it from the others. So many of them are rejected for one.
OLD_NS, MAX_REJECTED = 1_000_000_000, 16


class Unfinished(Protocol):
    """A connection with a request that has not come whole."""

    def reject(self, error: RequestError) -> None:
        """Reject the request, and give back its bytes."""


@final
@dataclass(slots=True, kw_only=True)
class RequestBounds:
    """Bounds of one process, which all of its connections share.

    Args:
        head_timeout_s: From the first byte of a head to its last.
        body_timeout_s: From the end of the head to the last byte of the body.
        max_bytes: Bytes of all requests that have not come whole or wait for those before them, and of connections.

    Attributes:
        held_bytes: Their number now.
    """

    head_timeout_s: float = 10.0
    body_timeout_s: float = 120.0
    max_bytes: int = 256 << 20
    held_bytes: int = field(default=0, init=False)
    # Since when, the oldest first.
    _unfinished: dict[Unfinished, int] = field(default_factory=dict[Unfinished, int], init=False)

    def begin(self, connection: Unfinished, now_ns: int) -> None:
        """Note that a request has begun to come."""
        self._unfinished.setdefault(connection, now_ns)

    def end(self, connection: Unfinished) -> None:
        """Note that it is whole, rejected or gone."""
        self._unfinished.pop(connection, None)

    def make_room(self, count: int, connection: Unfinished, now_ns: int) -> RequestError | None:
        """Reject old requests if a newer one needs so many bytes more than there are.

        Returns:
            The rejection of the newer one, if that is not enough.
        """
        for _ in range(MAX_REJECTED):
            if self.held_bytes + count <= self.max_bytes:
                return None
            oldest, begun_ns = next(iter(self._unfinished.items()), (connection, now_ns))
            if oldest is connection or now_ns - begun_ns < OLD_NS:
                break
            self.end(oldest)
            oldest.reject(self._full())
        return None if self.held_bytes + count <= self.max_bytes else self._full()

    def _full(self) -> RequestError:
        return Overloaded(
            f"Requests that have not come whole hold {self.held_bytes:,} of {self.max_bytes:,} bytes; come back later."
        )

    def reject_slow(self, age_s: float, *, in_body: bool) -> RequestError | None:
        """Return the rejection of a request whose head or body has come for so long; None if it may go on."""
        limit_s = self.body_timeout_s if in_body else self.head_timeout_s
        if age_s <= limit_s:
            return None
        part = "body" if in_body else "head"
        return TooSlow(f"The {part} of the request was not whole after {age_s:.0f} s; send it within {limit_s:g} s.")


@final
@dataclass(slots=True, eq=False)
class HeldBytes:
    """Bytes of `RequestBounds` that one WebSocket connection holds.

    The connection is given to each call: kept here, it would be a cycle.

    Args:
        bounds: The bounds.

    Attributes:
        count: The bytes.
    """

    bounds: RequestBounds
    count: int = field(default=0, init=False)

    def hold(self, count: int, connection: Unfinished) -> None:
        """Hold so many bytes from now on; none beside those of the connection itself if nothing is unfinished."""
        if count <= CONNECTION_BYTES:
            self.bounds.end(connection)
        self.bounds.held_bytes += count - self.count
        self.count = count

    def take(self, count: int, connection: Unfinished, now_ns: int) -> RequestError | None:
        """Hold so many bytes if there is room for them.

        Returns:
            The rejection if there is none, even when older requests were rejected.
        """
        if count > CONNECTION_BYTES:
            self.bounds.begin(connection, now_ns)
            rejection = self.bounds.make_room(count - self.count, connection, now_ns)
            if rejection is not None:
                return rejection
        self.hold(count, connection)
        return None
