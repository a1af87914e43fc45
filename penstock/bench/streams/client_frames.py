"""WebSocket frames of the load generator (RFC 6455), without sockets."""

import base64
import os

import numpy as np

from penstock.bench.streams.stream_sender import address_of

TEXT, BINARY, CLOSE = 1, 2, 8
# Entries of several streams are masked by nothing: they are put together when they are due.
NO_MASK = bytes(4)
# Of the server, as it is reported.
MAX_REASON = 200


def upgrade_request(url: str, path: str) -> bytes:
    """Return the request that opens a WebSocket."""
    host, port = address_of(url)
    key = base64.b64encode(os.urandom(16)).decode()
    return (
        f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    ).encode()


def end_of_upgrade(buffer: bytes) -> tuple[int, str]:
    """Return where frames begin after the answer to an upgrade, and why it is refused, if it is; 0 if it is cut."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return 0, ""
    refused = "" if buffer.startswith(b"HTTP/1.1 101 ") else _refusal(buffer[9:end], buffer[end + 4 :])
    return end + 4, refused


def _refusal(head: bytes, body: bytes) -> str:
    """The status, and the server's reason as far as it has come."""
    status = head.split(b"\r\n")[0].decode("latin1")
    reason = body.partition(b'"error"')[2].split(b'"')
    return f"{status}: {reason[1].decode(errors='replace')}"[:MAX_REASON] if len(reason) > 2 else status


def client_head(kind: int, size: int, mask: bytes) -> bytes:
    """Return the head of a client's frame (section 5.2)."""
    if size < 126:
        return bytes((0x80 | kind, 0x80 | size)) + mask
    if size < 1 << 16:
        return bytes((0x80 | kind, 0xFE)) + size.to_bytes(2, "big") + mask
    return bytes((0x80 | kind, 0xFF)) + size.to_bytes(8, "big") + mask


def client_frame(kind: int, body: bytes, mask: bytes) -> bytes:
    """Return a client's frame."""
    masked = np.frombuffer(body, np.uint8) ^ np.resize(np.frombuffer(mask, np.uint8), len(body))
    return client_head(kind, len(body), mask) + masked.tobytes()


def next_frame(buffer: bytes, at: int) -> tuple[int, int, int] | None:
    """Return the kind of a server's frame, and where its body begins and ends; None if it has not come whole."""
    size = len(buffer)
    if size - at < 2:
        return None
    length, begin = buffer[at + 1], at + 2
    if length >= 126:
        begin += 2 if length == 126 else 8
        if size < begin:
            return None
        length = int.from_bytes(buffer[at + 2 : begin], "big")
    end = begin + length
    return None if size < end else (buffer[at] & 15, begin, end)
