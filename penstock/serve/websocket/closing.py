"""Close codes and reasons of a WebSocket, and the connection of a page whose stream was rejected."""

import asyncio
import logging
from collections.abc import Callable
from typing import final

from websockets.frames import CloseCode

from penstock.core import errors
from penstock.core.errors import RequestError
from penstock.core.wording.shown import shortened
from penstock.serve.exchange.peer import Peer
from penstock.serve.websocket import frames

log = logging.getLogger(__name__)

# Added to an HTTP status for which WebSocket has no code.
STATUS_OFFSET = 4000
# Close code of a stream that timed out, after HTTP's 408.
IDLE = STATUS_OFFSET + 408
# Time for a client to close its side after the server's close.
LINGER_S = 2.0
# Bytes that a rejected client may still send: a start, as long as it does not know of the rejection.
MAX_REJECTED_BYTES = 4_096

_CODES: tuple[tuple[type[RequestError], int], ...] = (
    (errors.TooLarge, CloseCode.MESSAGE_TOO_BIG),
    (errors.UnsupportedContent, CloseCode.UNSUPPORTED_DATA),
    (errors.DeadlineImpossible, CloseCode.POLICY_VIOLATION),
    (errors.InvalidInput, CloseCode.INVALID_DATA),
    (errors.Overloaded, CloseCode.TRY_AGAIN_LATER),
)


def code_of(error: RequestError) -> int:
    """The close code of an error: WebSocket's own, otherwise 4000 and the HTTP status."""
    otherwise = CloseCode.INTERNAL_ERROR if error.status >= 500 else STATUS_OFFSET + error.status
    return next((code for kind, code in _CODES if isinstance(error, kind)), otherwise)


def reason_of(error: RequestError) -> str:
    """The reason of a close; the retry time at its end is never cut."""
    if not isinstance(error, errors.Overloaded):
        return shortened(str(error), frames.MAX_REASON_BYTES)
    retry = f" Retry after {max(1, round(error.retry_after_s))} s."
    return shortened(str(error), frames.MAX_REASON_BYTES - len(retry)) + retry


@final
class RejectedConnection(asyncio.Protocol):
    """A WebSocket that is opened only to close with the reason of a rejection: browsers show pages no HTTP response.

    Args:
        error: The reason.
        transport: The connection's.
        peers: All connections of the server; this one adds and removes itself.
        clock_s: A monotonic clock in seconds.
    """

    def __init__(
        self, error: RequestError, transport: asyncio.Transport, peers: set[Peer], clock_s: Callable[[], float]
    ) -> None:
        self._transport = transport
        self._peers = peers
        self._reader = frames.FrameReader(MAX_REJECTED_BYTES)
        self._received_bytes = 0
        self._closed_s = clock_s()
        code, reason = code_of(error), reason_of(error)
        log.info("a page gets no stream: %d %s", code, reason)
        peers.add(self)
        transport.write(frames.close_frame(code, reason))

    def data_received(self, data: bytes) -> None:
        """Wait for the client's close, and drop everything else.

        Closing earlier would reset the connection, and the client might never read the reason. A client that sends
        more than a start is closed at once: it needed no key to get here.
        """
        self._received_bytes += len(data)
        if self._received_bytes > MAX_REJECTED_BYTES:
            self._transport.close()
            return
        self._reader.feed(data)
        try:
            while (message := self._reader.next()) is not None:
                if message[0] == frames.CLOSE:
                    self._transport.close()
                    return
        except RequestError:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the server's."""
        self._peers.discard(self)

    def sweep(self, now_s: float, idle_timeout_s: float, request_timeout_s: float) -> None:
        """Enforce the time to close, see `Peer`."""
        if now_s - self._closed_s > LINGER_S:
            self.abort()

    def close_after_next(self) -> None:
        """Do nothing: it is closing."""

    def close_when_idle(self) -> None:
        """Do nothing: it is closing."""

    def abort(self) -> None:
        """End the connection at once."""
        self._transport.abort()
