"""HTTP/2 frames as no gRPC library sends them, over a real socket."""

import socket
import time
from contextlib import suppress
from typing import Self, final

from penstock.bench.streams.grpc_call import (
    ACK,
    CONNECTION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW,
    FRAME_HEAD,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MESSAGE_HEAD,
    PING,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
MAX_FRAME = 1 << 14
SETTLE = b"settled?"


def frame(kind: int, payload: bytes = b"", flags: int = 0, of: int = CONNECTION) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + of.to_bytes(4, "big") + payload


def head(path: str, of: int, more: bytes = b"", *, flags: int = END_HEADERS) -> bytes:
    """Headers of a call as HPACK literals, and more fields after them."""
    block = b"\x83\x86"  # POST, http
    for name, value in ((b"\x04", path), (b"\x01", "a"), (b"\x0f\x10", "application/grpc"), (b"\0\2te", "trailers")):
        block += name + bytes((len(value),)) + value.encode()
    return frame(HEADERS, block + more, flags, of)


def begun(length: int, payload: bytes = b"", *, compressed: bool = False) -> bytes:
    """The head of a message, and the bytes that follow it."""
    return MESSAGE_HEAD.pack(compressed, length) + payload


@final
class Http2Client:
    """One connection, which has sent its preface and obeys the windows of its server."""

    def __init__(self, port: int, timeout_s: float = 20.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        # What is sent on several connections comes in that order.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(PREFACE + frame(SETTINGS))
        self.closed = False
        # Trailers of the calls that ended, or what reset them.
        self.ended: dict[int, bytes] = {}
        # All bytes that came.
        self.received = b""
        self._left = b""
        self._settled = False
        self._first_window = FIRST_WINDOW
        self._windows = {CONNECTION: FIRST_WINDOW}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def open(self, path: str, of: int, more: bytes = b"") -> None:
        self._windows[of] = self._first_window
        self.send(head(path, of, more))

    def send_data(self, left: dict[int, bytes], seconds: float) -> dict[int, bytes]:
        """Send bytes of calls as the windows allow, for so many seconds at most; returns what is left."""
        end_s = time.monotonic() + seconds
        left = dict(left)
        while any(left.values()) and time.monotonic() < end_s and not self.closed:
            for of, payload in left.items():
                count = min(len(payload), self._windows[CONNECTION], self._windows[of], MAX_FRAME)
                if count > 0 and of not in self.ended:
                    self.send(frame(DATA, payload[:count], 0, of))
                    self._windows[CONNECTION] -= count
                    self._windows[of] -= count
                    left[of] = payload[count:]
            self.read(0.001)
        return left

    def read(self, seconds: float) -> None:
        """Handle the frames that come within so many seconds."""
        end_s = time.monotonic() + seconds
        while not self.closed and (left_s := end_s - time.monotonic()) > 0 and self.read_once(left_s):
            pass

    def read_once(self, within_s: float) -> bool:
        """Handle what comes next; returns whether anything came, the end of the connection included."""
        self.socket.settimeout(max(within_s, 0.001))
        try:
            part = self.socket.recv(1 << 16)
        except TimeoutError:
            return False
        except ConnectionError:
            part = b""
        finally:
            self.socket.settimeout(20)
        self.closed = not part
        self.received += part
        self._left += part
        with suppress(ConnectionError):
            self._frames()
        return True

    def settle(self, within_s: float = 20.0) -> None:
        """Wait until the server has read all that was sent; its settings are acknowledged by then.

        So nothing has to be acknowledged within a header block, where no other frame may be.
        """
        end_s = time.monotonic() + within_s
        self._settled = False
        self.send(frame(PING, SETTLE))
        while not self._settled:
            assert time.monotonic() < end_s, f"no answer to a PING after {within_s:g} s"
            assert not self.closed, "the connection was closed"
            self.read_once(end_s - time.monotonic())

    def until_ended(self, of: int, within_s: float) -> bytes:
        """Wait for the end of a call; returns its trailers, or what reset it."""
        end_s = time.monotonic() + within_s
        while of not in self.ended:
            assert time.monotonic() < end_s, f"call {of} is open after {within_s:g} s"
            assert not self.closed, "the connection was closed"
            self.read(0.05)
        return self.ended[of]

    def _frames(self) -> None:
        received = self._left
        while len(received) >= FRAME_HEAD and len(received) >= FRAME_HEAD + int.from_bytes(received[:3], "big"):
            end = FRAME_HEAD + int.from_bytes(received[:3], "big")
            kind, flags, of = received[3], received[4], int.from_bytes(received[5:9], "big")
            self._handle(kind, flags, of, received[FRAME_HEAD:end])
            received = received[end:]
        self._left = received

    def _handle(self, kind: int, flags: int, of: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for setting, value in SETTING.iter_unpack(payload):
                if setting == INITIAL_WINDOW_SIZE:
                    grown, self._first_window = value - self._first_window, value
                    self._windows = {each: room + (grown if each else 0) for each, room in self._windows.items()}
            self.send(frame(SETTINGS, flags=ACK))
        elif kind == PING and flags & ACK:
            self._settled |= payload == SETTLE
        elif kind == PING:
            self.send(frame(PING, payload, ACK))
        elif kind == WINDOW_UPDATE:
            self._windows[of] = self._windows.get(of, self._first_window) + int.from_bytes(payload, "big")
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.ended.setdefault(of, payload)
