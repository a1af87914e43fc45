"""The tickets of a model's live streams: what all of them share."""

import math
import random
from dataclasses import dataclass
from typing import final

from penstock.serve.streams.session_tickets import SessionTickets
from penstock.serve.streams.tickets import TicketScope, TicketSealer

# Of the time between two tickets, the first one comes after this share at the earliest. The rest is random, so that
# streams that began together ask at different times.
EARLIEST = 0.25


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StreamTickets:
    """Makes the tickets of streams.

    Args:
        sealer: Seals them.
        application: Name of the application.
        version_hash: Hash of the weights and of the sources that answer.
        precision: See `TicketScope`.
        max_bytes: Bytes of what one holds at most.
        interval_s: Signal between two tickets of a stream, in seconds.
        rate_hz: Frames of the signal a second.
    """

    sealer: TicketSealer
    application: str
    version_hash: str
    precision: str
    max_bytes: int
    interval_s: float
    rate_hz: float

    def of_stream(self, client: str) -> SessionTickets:
        """Make those of one stream, of the client with an API key of this name."""
        scope = TicketScope(
            application=self.application, version_hash=self.version_hash, precision=self.precision, client=client
        )
        every_frames = max(1, math.ceil(self.interval_s * self.rate_hz))
        first_frames = math.ceil(every_frames * random.uniform(EARLIEST, 1))
        return SessionTickets(
            self.sealer,
            scope,
            max_bytes=self.max_bytes,
            first_frames=first_frames,
            every_frames=every_frames,
        )
