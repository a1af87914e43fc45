"""Keys and tickets of servers that tests play."""

from collections.abc import Callable

from penstock.serve.streams.session_tickets import max_ticket_bytes
from penstock.serve.streams.stream_tickets import StreamTickets
from penstock.serve.streams.tickets import TicketKeys, TicketScope, TicketSealer
from tests.support.streams import SOUND, STATE_BYTES

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
NOW_S = 1_700_000_000.0
SCOPE = TicketScope(application="sums", version_hash="a" * 64, precision="float32", client="me")


def sealer_with(*keys: bytes, now_s: Callable[[], float] = lambda: NOW_S) -> TicketSealer:
    return TicketSealer(TicketKeys(keys or (KEY,)), now_s)


def tickets_each(interval_s: float, *, keys: tuple[bytes, ...] = (KEY,), version_hash: str = "a" * 64) -> StreamTickets:
    """Tickets of one server of running sums, with one for each so many seconds of the signal."""
    return StreamTickets(
        sealer=sealer_with(*keys),
        application="sums",
        version_hash=version_hash,
        precision="float32",
        max_bytes=max_ticket_bytes(SOUND, 1000, STATE_BYTES),
        interval_s=interval_s,
        rate_hz=1000,
    )
