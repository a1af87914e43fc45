"""How a WebSocket says why it is closed, on a stream and where there is none."""

import asyncio
import logging
from collections.abc import Callable
from typing import final

from penstock.core.errors import (
    DeadlineImpossible,
    InvalidInput,
    Overloaded,
    RequestError,
    TooLarge,
    UnsupportedContent,
)
from penstock.serve.connection import Peer
from penstock.serve.frames import (
    CLOSE,
    FAILED,
    INVALID,
    MOST_REASON_BYTES,
    OF_STATUS,
    POLICY,
    TOO_BIG,
    TRY_LATER,
    UNSUPPORTED,
    FrameReader,
    close_frame,
    shortened,
)

log = logging.getLogger(__name__)

# How long a client may take to close its side, once it is told.
LINGER_S = 2.0
# Of what a client says before it hears that there is no stream: a start.
MOST_UNHEARD_BYTES = 4_096

_CODES: tuple[tuple[type[RequestError], int], ...] = (
    (TooLarge, TOO_BIG),
    (UnsupportedContent, UNSUPPORTED),
    (DeadlineImpossible, POLICY),
    (InvalidInput, INVALID),
    (Overloaded, TRY_LATER),
)


def code_of(error: RequestError) -> int:
    """The close code that says what was the matter: WebSocket's own, or where it has none 4000 and the HTTP status."""
    otherwise = FAILED if error.status >= 500 else OF_STATUS + error.status
    return next((code for kind, code in _CODES if isinstance(error, kind)), otherwise)


def reason_of(error: RequestError) -> str:
    """The sentence of a close, in which the time to come back is never what is cut."""
    if not isinstance(error, Overloaded):
        return shortened(str(error), MOST_REASON_BYTES)
    retry = f" Retry after {max(1, round(error.retry_after_s))} s."
    return shortened(str(error), MOST_REASON_BYTES - len(retry)) + retry


@final
class NoStream(asyncio.Protocol):
    """A WebSocket that was opened for a page alone, which learns from its close why there is no stream.

    Args:
        error: Why.
        transport: The client's, taken over.
        peers: All of the server's; this one adds and removes itself.
        clock_s: A monotonic clock in seconds.
    """

    def __init__(
        self, error: RequestError, transport: asyncio.Transport, peers: set[Peer], clock_s: Callable[[], float]
    ) -> None:
        self._transport = transport
        self._peers = peers
        self._reader = FrameReader(MOST_UNHEARD_BYTES)
        self._unheard_bytes = 0
        self._told_s = clock_s()
        code, reason = code_of(error), reason_of(error)
        log.info("a page gets no stream: %d %s", code, reason)
        peers.add(self)
        transport.write(close_frame(code, reason))

    def data_received(self, data: bytes) -> None:
        """asyncio's: the client sent something, of which only its own close is waited for.

        To hang up before would reset the connection, and the client might never read why. Who goes on sending though
        has no claim to that: nobody had to show a key to get here.
        """
        self._unheard_bytes += len(data)
        if self._unheard_bytes > MOST_UNHEARD_BYTES:
            self._transport.close()
            return
        self._reader.feed(data)
        try:
            while (message := self._reader.next()) is not None:
                if message[0] == CLOSE:
                    self._transport.close()
                    return
        except RequestError:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's: the client is gone."""
        self._peers.discard(self)

    def sweep(self, now_s: float, idle_s: float, begun_s: float) -> None:
        """`Peer`'s."""
        if now_s - self._told_s > LINGER_S:
            self.abort()

    def allow(self, max_body_bytes: int) -> None:
        """`Peer`'s: nothing here is as long as a body."""

    def close_after_next(self) -> None:
        """`Peer`'s: it is closing."""

    def close_when_idle(self) -> None:
        """`Peer`'s: it is closing."""

    def abort(self) -> None:
        """`Peer`'s: end at once."""
        self._transport.abort()
