"""A client's side of a connection that many live streams share, without sockets."""

from collections import deque
from collections.abc import Callable
from typing import Any, cast, final

import orjson
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, ProtocolError
from websockets.frames import Close, CloseCode

from penstock.client.kept_messages import FLUSH
from penstock.client.retry import Answer
from penstock.client.stream import StreamOptions, StreamProtocol
from penstock.client.web_socket import RETRY
from penstock.core.errors import InvalidInput
from penstock.core.streams.stream_entries import BINARY, CLOSE, TEXT, EntryReader, close_payload, entry_of

_STATUS = {
    CloseCode.GOING_AWAY: 503,
    CloseCode.UNSUPPORTED_DATA: 415,
    CloseCode.INVALID_DATA: 400,
    CloseCode.PROTOCOL_ERROR: 400,
    CloseCode.POLICY_VIOLATION: 504,
    CloseCode.MESSAGE_TOO_BIG: 413,
    CloseCode.SERVICE_RESTART: 503,
    CloseCode.TRY_AGAIN_LATER: 503,
}


@final
class StreamPart:
    """One stream's part of a shared connection.

    Args:
        stream_id: Its id there.
        notify: Called when something has come.

    Attributes:
        inbox: Messages that were not taken yet.
        unanswered: Messages of samples and flushes without a result.
        protocol: The stream's protocol, once it is ready.
        error: Why nothing more comes; None while it is open.
    """

    __slots__ = ("error", "inbox", "notify", "protocol", "stream_id", "unanswered")

    def __init__(self, stream_id: int, notify: Callable[[], None]) -> None:
        self.stream_id, self.notify = stream_id, notify
        self.inbox: deque[str | bytes] = deque()
        self.unanswered = 0
        self.protocol: StreamProtocol | None = None
        self.error: ConnectionClosed | None = None

    @property
    def has_room(self) -> bool:
        """True if another message may be sent now."""
        return self.protocol is None or self.unanswered < self.protocol.window

    def start(self, name: str, options: StreamOptions) -> bytes:
        """The entry that opens the stream."""
        return self.entry(orjson.dumps({"app": name} | orjson.loads(options.start())).decode())

    def entry(self, message: str | bytes) -> bytes:
        """The entry of a message; counts it."""
        if isinstance(message, str):
            self.unanswered += message == FLUSH
            return entry_of(self.stream_id, TEXT, message.encode())
        self.unanswered += 1
        return entry_of(self.stream_id, BINARY, message)

    def cancel(self) -> bytes:
        """The entry that closes the stream."""
        return entry_of(self.stream_id, CLOSE, close_payload(CloseCode.NORMAL_CLOSURE, ""))

    def receive(self, kind: int, payload: bytes) -> None:
        """Take an entry of the server.

        Raises:
            InvalidInput: It cannot be read.
        """
        if kind == CLOSE:
            self.error = ConnectionClosedError(_close_of(payload), None)
        elif kind == BINARY:
            self.unanswered -= 1
            self.inbox.append(payload)
        else:
            self.unanswered -= _is_result(payload)
            self.inbox.append(payload.decode())
        self.notify()

    def lose(self, error: ConnectionClosed) -> None:
        """Note that nothing more comes."""
        self.error = error
        self.notify()

    def raise_error(self) -> None:
        """Raise the reason why nothing more comes, if there is one."""
        if self.error is not None:
            raise ConnectionClosedError(self.error.rcvd, self.error.sent, self.error.rcvd_then_sent)


@final
class SharedParts:
    """The parts of one connection.

    Attributes:
        lost: Why the connection is gone; None while it is open.
    """

    def __init__(self) -> None:
        self._next_id = 0
        self._open: dict[int, StreamPart] = {}
        self._entries = EntryReader()
        self.lost: ConnectionClosed | None = None

    def begin(self, notify: Callable[[], None]) -> StreamPart:
        """Add a part with the next id; starts are sent in the order of the ids.

        Raises:
            ConnectionClosed: The connection is gone.
        """
        part = StreamPart(self._next_id, notify)
        part.error = self.lost
        part.raise_error()
        self._next_id += 1
        self._open[part.stream_id] = part
        return part

    def forget(self, part: StreamPart) -> bool:
        """Drop what still comes for a part; returns whether it was open."""
        return self._open.pop(part.stream_id, None) is not None

    def receive(self, message: str | bytes) -> None:
        """Take a message of the server.

        Raises:
            InvalidInput: It holds no entries, or one that cannot be read.
        """
        self._entries.feed(message if isinstance(message, bytes) else message.encode())
        while (entry := self._entries.next()) is not None:
            stream_id, kind, payload = entry
            part = self._open.get(stream_id)
            if part is not None:
                part.receive(kind, payload)
                if kind == CLOSE:
                    del self._open[stream_id]

    def lose(self, error: ConnectionClosed) -> None:
        """Note that the connection is gone."""
        self.lost = error
        parts, self._open = self._open, {}
        for part in parts.values():
            part.lose(error)


def _close_of(payload: bytes) -> Close:
    try:
        return Close.parse(payload)
    except (ProtocolError, UnicodeDecodeError):
        raise InvalidInput(f"The server ended a stream with {payload[:8]!r}, which is no close.") from None


def _is_result(payload: bytes) -> bool:
    try:
        fields = orjson.loads(payload)
    except orjson.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        raise InvalidInput(f"The server sent {payload[:60]!r}, which is no object of JSON.")
    return cast(dict[str, Any], fields).get("type") == "result"


def answer_of_close(error: ConnectionClosed) -> Answer:
    """The answer to a start, as an HTTP response, from the end of its stream.

    Raises:
        ConnectionClosed: The connection broke.
    """
    close = error.rcvd
    if close is None:
        raise error
    retry = RETRY.search(close.reason)
    headers = {} if retry is None else {"retry-after": retry[1]}
    status = _STATUS.get(CloseCode(close.code)) if close.code in list(CloseCode) else close.code - 4000
    return Answer(status or 500, headers, orjson.dumps({"error": close.reason}))
