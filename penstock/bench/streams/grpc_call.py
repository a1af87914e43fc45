"""The client side of one bidirectional gRPC call on its own HTTP/2 connection, sans-IO.

It exists for load generators: grpcio's client has its own threads and loop between a chunk's due time and its sending,
and would measure itself. It implements only the frames of a single call on a connection (RFC 9113, gRPC over HTTP/2).
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
# Initial and largest flow-control window.
FIRST_WINDOW, LARGEST_WINDOW = 65_535, (1 << 31) - 1
FRAME_HEAD = 9
MESSAGE_HEAD = struct.Struct(">BI")
SETTING = struct.Struct(">HI")
MESSAGE_TRAILER = b"grpc-message"


@final
class GrpcCall:
    """One call.

    Args:
        authority: `"host:port"`.
        path: Path of the method, `"/package.Service/Method"`.

    Attributes:
        first: Bytes to send first.
        end_reason: Why the server ended the call; None while it is open.
    """

    def __init__(self, authority: str, path: str) -> None:
        # No header table, so that the server's headers are literal; a window larger than the results of any run.
        settings = SETTING.pack(HEADER_TABLE_SIZE, 0) + SETTING.pack(INITIAL_WINDOW_SIZE, LARGEST_WINDOW)
        self.first = (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(SETTINGS, 0, CONNECTION, settings)
            + _frame(WINDOW_UPDATE, 0, CONNECTION, (LARGEST_WINDOW - FIRST_WINDOW).to_bytes(4, "big"))
            + _frame(HEADERS, END_HEADERS, CALL, _headers(authority, path))
        )
        self.end_reason: str | None = None
        self._has_settings = False
        self._received = b""
        self._message = b""
        # Flow-control windows of the connection and of the call.
        self._windows = [FIRST_WINDOW, FIRST_WINDOW]
        self._first_window = FIRST_WINDOW
        self._max_frame_bytes = 1 << 14
        self._queued = b""

    def message(self, body: bytes) -> bytes:
        """Queue a message; return the bytes that the flow-control windows allow now."""
        self._queued += MESSAGE_HEAD.pack(0, len(body)) + body
        return self._allowed()

    def feed(self, data: bytes) -> tuple[list[bytes], bytes]:
        """Handle bytes from the server.

        Returns:
            The messages that are complete now, and the bytes to send.

        Raises:
            BenchError: The server does not speak gRPC.
        """
        self._received += data
        received, at = self._received, 0
        reply, messages = b"", list[bytes]()
        while len(received) - at >= FRAME_HEAD:
            size, kind, flags = int.from_bytes(received[at : at + 3], "big"), received[at + 3], received[at + 4]
            end = at + FRAME_HEAD + size
            if not self._has_settings and kind != SETTINGS:
                raise BenchError(f"the server answered {received[:40]!r}; name its gRPC port.")
            self._has_settings = True
            if len(received) < end:
                break
            payload = received[at + FRAME_HEAD : end]
            if kind == DATA:
                self._data_frame(payload, flags, messages)
            else:
                of = int.from_bytes(received[at + 5 : at + 9], "big") & LARGEST_WINDOW
                reply += self._control_frame(kind, flags, of, payload)
            if kind in (DATA, HEADERS) and flags & END_STREAM:
                self.end_reason = self.end_reason or "the server ended the call"
            at = end
        self._received = received[at:]
        return messages, reply

    def _data_frame(self, payload: bytes, flags: int, messages: list[bytes]) -> None:
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

    def _control_frame(self, kind: int, flags: int, of: int, payload: bytes) -> bytes:
        """Handle a frame without data; return the bytes to send."""
        if kind == SETTINGS and not flags & ACK:
            for setting, value in SETTING.iter_unpack(payload):
                if setting == INITIAL_WINDOW_SIZE:
                    self._windows[CALL] += value - self._first_window
                    self._first_window = value
                elif setting == MAX_FRAME_SIZE:
                    self._max_frame_bytes = value
            return _frame(SETTINGS, ACK, CONNECTION, b"") + self._allowed()
        if kind == PING and not flags & ACK:
            return _frame(PING, ACK, CONNECTION, payload)
        if kind == WINDOW_UPDATE:
            self._windows[of] += int.from_bytes(payload, "big")
            return self._allowed()
        if self.end_reason is None:
            if kind == GOAWAY:
                self.end_reason = f"the server goes away {payload[8:].decode(errors='replace')}".rstrip()
            elif kind == RST_STREAM:
                self.end_reason = f"the server reset the call with code {int.from_bytes(payload, 'big')}"
            elif kind == HEADERS and flags & END_STREAM:
                self.end_reason = _status_message(payload)
        return b""

    def _allowed(self) -> bytes:
        """Dequeue as many bytes as the windows allow, in frames."""
        room = min(*self._windows, len(self._queued))
        if room <= 0:
            return b""
        self._windows = [window - room for window in self._windows]
        out, self._queued = self._queued[:room], self._queued[room:]
        limit = self._max_frame_bytes
        return b"".join(_frame(DATA, 0, CALL, out[at : at + limit]) for at in range(0, room, limit))


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


def _status_message(trailers: bytes) -> str:
    """The literal grpc-message of the trailers."""
    _, found, after = trailers.partition(MESSAGE_TRAILER)
    if not found or not after or not 0 < after[0] < 127:
        return "the server ended the call"
    return unquote(after[1 : 1 + after[0]].decode("latin-1"))
