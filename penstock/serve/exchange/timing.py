"""Queue and compute time of a request, for the response header Server-Timing (W3C Server Timing, section 3)."""

from dataclasses import dataclass, replace
from typing import final

from penstock.core.errors import InvalidInput
from penstock.serve.exchange.request import Head
from penstock.serve.exchange.response import Response

TIMING_HEADER = "penstock-timing"
SERVER_TIMING = "Server-Timing"


@final
@dataclass(slots=True)
class Timing:
    """The times of a request; of several rows, the longest of each.

    Args:
        queue_ns: From the arrival to the start of its batch.
        compute_ns: Time of its batch; 0 until a row was computed.
    """

    queue_ns: int = 0
    compute_ns: int = 0

    def add(self, queue_ns: int, compute_ns: int) -> None:
        """Add a row."""
        self.queue_ns = max(self.queue_ns, queue_ns)
        self.compute_ns = max(self.compute_ns, compute_ns)

    def added_to(self, response: Response) -> Response:
        """Return a response with the header, in milliseconds; without it if nothing was measured."""
        if not self.compute_ns:
            return response
        times = f"queue;dur={self.queue_ns / 1e6:.3f}, compute;dur={self.compute_ns / 1e6:.3f}"
        return replace(response, headers=(*response.headers, (SERVER_TIMING, times)))


def is_timed(head: Head) -> bool:
    """True if the head asks for the times.

    Raises:
        InvalidInput: Its header is neither 0 nor 1.
    """
    text = head.headers.get(TIMING_HEADER, "0")
    if text not in ("0", "1"):
        raise InvalidInput(f"Penstock-Timing is {text[:80]!r}; it must be 1, for the header {SERVER_TIMING}, or 0.")
    return text == "1"
