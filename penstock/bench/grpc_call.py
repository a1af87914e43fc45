"""One gRPC call that streams both ways, on an HTTP/2 connection of its own: a client's side, without sockets.

For load generators: grpcio's client has threads and a loop of its own between a chunk's moment and its sending, so that
it would measure itself. Of what a server may do, this understands what a call can meet that is alone on its connection
(RFC 9113, and gRPC over HTTP/2).
"""

import struct
from typing import final
from urllib.parse import unquote

from penstock.core.errors import BenchError

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 0x1
END_HEADERS, PADDED = 0x4, 0x8
HEADER_TABLE_SIZE, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 4, 5
CONNECTION, CALL = 0, 1
# What either side may send before it is granted more, and at most.
FIRST_WINDOW, LARGEST_WINDOW = 65_535, (1 << 31) - 1
FRAME_HEAD = 9
MESSAGE_HEAD = struct.Struct(">BI")
SETTING = struct.Struct(">HI")
MESSAGE_TRAILER = b"grpc-message"


@final
class GrpcCall:
    """A call.

    Args:
        authority: `"host:port"`.
        path: Of the method, `"/package.Service/Method"`.

    Attributes:
        first: What is sent before everything else.
        over: Why the server ended the call; None as long as it goes on.
    """

    def __init__(self, authority: str, path: str) -> None:
        # No table of headers, so that those of the server stand in what it sends; more results than any run has.
        settings = SETTING.pack(HEADER_TABLE_SIZE, 0) + SETTING.pack(INITIAL_WINDOW_SIZE, LARGEST_WINDOW)
        self.first = (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(SETTINGS, 0, CONNECTION, settings)
            + _frame(WINDOW_UPDATE, 0, CONNECTION, (LARGEST_WINDOW - FIRST_WINDOW).to_bytes(4, "big"))
            + _frame(HEADERS, END_HEADERS, CALL, _headers(authority, path))
        )
        self.over: str | None = None
        self._greeted = False
        self._received = b""
        self._message = b""
        # May be sent on the connection, and of the call.
        self._windows = [FIRST_WINDOW, FIRST_WINDOW]
        self._first_window = FIRST_WINDOW
        self._most_bytes = 1 << 14
        self._held = b""

    def message(self, body: bytes) -> bytes:
        """The bytes that go out for a message now; what the server grants no room for goes out later."""
        self._held += MESSAGE_HEAD.pack(0, len(body)) + body
        return self._allowed()

    def feed(self, data: bytes) -> tuple[list[bytes], bytes]:
        """Take what the server sent.

        Returns:
            The messages that are whole now, and what has to be sent.

        Raises:
            BenchError: It speaks no gRPC.
        """
        self._received += data
        received, at = self._received, 0
        said, messages = b"", list[bytes]()
        while len(received) - at >= FRAME_HEAD:
            size, kind, flags = int.from_bytes(received[at : at + 3], "big"), received[at + 3], received[at + 4]
            end = at + FRAME_HEAD + size
            if not self._greeted and kind != SETTINGS:
                raise BenchError(f"the server answered {received[:40]!r}; name its port of gRPC.")
            self._greeted = True
            if len(received) < end:
                break
            payload = received[at + FRAME_HEAD : end]
            if kind == DATA:
                self._data(payload, flags, messages)
            else:
                of = int.from_bytes(received[at + 5 : at + 9], "big") & LARGEST_WINDOW
                said += self._controlled(kind, flags, of, payload)
            if kind in (DATA, HEADERS) and flags & END_STREAM:
                self.over = self.over or "the server ended the call"
            at = end
        self._received = received[at:]
        return messages, said

    def _data(self, payload: bytes, flags: int, messages: list[bytes]) -> None:
        if flags & PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        message, at = self._message + payload, 0
        while len(message) - at >= MESSAGE_HEAD.size:
            end = at + MESSAGE_HEAD.size + MESSAGE_HEAD.unpack_from(message, at)[1]
            if len(message) < end:
                break
            messages.append(message[at + MESSAGE_HEAD.size : end])
            at = end
        self._message = message[at:]

    def _controlled(self, kind: int, flags: int, of: int, payload: bytes) -> bytes:
        """Take a frame that carries no data; gives what has to be sent."""
        if kind == SETTINGS and not flags & ACK:
            for setting, value in SETTING.iter_unpack(payload):
                if setting == INITIAL_WINDOW_SIZE:
                    self._windows[CALL] += value - self._first_window
                    self._first_window = value
                elif setting == MAX_FRAME_SIZE:
                    self._most_bytes = value
            return _frame(SETTINGS, ACK, CONNECTION, b"") + self._allowed()
        if kind == PING and not flags & ACK:
            return _frame(PING, ACK, CONNECTION, payload)
        if kind == WINDOW_UPDATE:
            self._windows[of] += int.from_bytes(payload, "big")
            return self._allowed()
        if self.over is None:
            if kind == GOAWAY:
                self.over = f"the server goes away {payload[8:].decode(errors='replace')}".rstrip()
            elif kind == RST_STREAM:
                self.over = f"the server reset the call with code {int.from_bytes(payload, 'big')}"
            elif kind == HEADERS and flags & END_STREAM:
                self.over = _said(payload)
        return b""

    def _allowed(self) -> bytes:
        """As much of what is held as the server grants room for, in frames."""
        room = min(*self._windows, len(self._held))
        if room <= 0:
            return b""
        self._windows = [window - room for window in self._windows]
        out, self._held = self._held[:room], self._held[room:]
        most = self._most_bytes
        return b"".join(_frame(DATA, 0, CALL, out[at : at + most]) for at in range(0, room, most))


def _frame(kind: int, flags: int, of: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + of.to_bytes(4, "big") + payload


def _headers(authority: str, path: str) -> bytes:
    """A request's headers as HPACK literals (RFC 7541, section 6.2.2), the first two whole from its static table."""
    literals = ((b"\x04", path), (b"\x01", authority), (b"\x0f\x10", "application/grpc"), (b"\0\2te", "trailers"))
    block = b"\x83\x86"  # POST, http
    for name, value in literals:
        assert len(value) < 127, value
        block += name + bytes((len(value),)) + value.encode("ascii")
    return block


def _said(trailers: bytes) -> str:
    """Why a call ended, where it stands in its trailers as it is."""
    _, found, after = trailers.partition(MESSAGE_TRAILER)
    if not found or not after or not 0 < after[0] < 127:
        return "the server ended the call"
    return unquote(after[1 : 1 + after[0]].decode("latin-1"))
