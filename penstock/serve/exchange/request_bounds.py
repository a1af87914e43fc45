"""Bounds of requests that have not come whole: time for a head and a body, and the bytes of all of them together."""

from dataclasses import dataclass, field
from typing import final

from penstock.core.errors import Overloaded, RequestError, TooSlow

# Counted for each connection beside the bytes of its requests: its objects in Python, uvloop and the HTTP parser.
CONNECTION_BYTES = 8_192


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

    def reject_more(self, count: int) -> RequestError | None:
        """Return the rejection of a request that needs so many bytes more; None if there is room."""
        if self.held_bytes + count <= self.max_bytes:
            return None
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
