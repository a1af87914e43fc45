"""WebSocket frames without sockets (RFC 6455, the server's side): bytes in, whole messages out, one at a time.

Messages are taken out one by one, so that who has no room for more leaves the rest where it is. Unmasking, the one
thing here that touches every byte, is done by `websockets` in C.
"""

import base64
import hashlib
from typing import final

from websockets.speedups import apply_mask

from penstock.core.errors import InvalidInput, TooLarge

# Opcodes.
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10

# Close codes, as docs/reference/streams.md explains them.
DONE, GOING_AWAY, BROKEN, UNSUPPORTED, NO_CODE = 1000, 1001, 1002, 1003, 1005
INVALID, POLICY, TOO_BIG, FAILED, RESTART, TRY_LATER, IDLE = 1007, 1008, 1009, 1011, 1012, 1013, 4408
# Added to an HTTP status for which WebSocket has no code.
OF_STATUS = 4000

FIN = 0x80
_MASKED = 0x80
_WHOLE_BINARY = FIN | BINARY
_OPCODES = {CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG}
MOST_CONTROL_BYTES = 125
# Of a close's reason, beside the code.
MOST_REASON_BYTES = MOST_CONTROL_BYTES - 2
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
# The codes that an endpoint may send (section 7.4); those from 3000 on are its own business.
_SENDABLE = {1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014}

Message = tuple[int, bytes]


@final
class FrameReader:
    """Makes messages of what one client sends.

    Args:
        most_bytes: A longer message is refused before it is kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._data: bytes | bytearray = b""
        self._at = 0
        # Of a message in fragments, of which the first says what it is.
        self._parts = bytearray()
        self._kind = 0

    def alone(self, data: bytes) -> bytes | None:
        """What a binary message carries, if these bytes are its frame and nothing else; None says: `feed` them."""
        there = len(data)
        if self._at != len(self._data) or self._kind or there < 8 or data[0] != _WHOLE_BINARY:
            return None
        size, body = data[1] - _MASKED, 6
        if size == 126:
            size, body = data[2] << 8 | data[3], 8
        # Not one of a 64-bit length either; nor one that is not masked, or too long, which `next` refuses.
        if body + size != there or size > self.most_bytes or data[1] == 0xFF:
            return None
        return apply_mask(data[body:], data[body - 4 : body])

    def feed(self, data: bytes) -> None:
        """Take bytes in."""
        if self._at == len(self._data):
            self._data, self._at = data, 0
            return
        if not isinstance(self._data, bytearray) or self._at:
            self._data, self._at = bytearray(memoryview(self._data)[self._at :]), 0
        self._data += data

    def next(self) -> Message | None:
        """The next whole message or control frame, its opcode and what it carries; None until more comes.

        Raises:
            InvalidInput: What came is no WebSocket frame of a client.
            TooLarge: A message is longer than `most_bytes`.
        """
        while True:
            data, at = self._data, self._at
            there = len(data)
            if there < at + 2:
                return None
            first, second = data[at], data[at + 1]
            size, body = second & 0x7F, at + 6
            if size == 126:
                size, body = int.from_bytes(data[at + 2 : at + 4], "big"), at + 8
            elif size == 127:
                size, body = int.from_bytes(data[at + 2 : at + 10], "big"), at + 14
            if first != _WHOLE_BINARY or second < _MASKED or self._kind:
                self._check(first, second)
            if there < body:
                return None
            end = body + size
            if size + len(self._parts) > self.most_bytes and first & 0xF < CLOSE:
                raise TooLarge(
                    f"A message has {size + len(self._parts):,} bytes; at most {self.most_bytes:,} are taken."
                )
            if there < end:
                return None
            self._at = end
            payload = apply_mask(data[body:end], data[body - 4 : body])
            if first == _WHOLE_BINARY:
                return BINARY, payload
            if (message := self._assembled(first, payload)) is not None:
                return message

    def _check(self, first: int, second: int) -> None:
        opcode = first & 0xF
        if first & 0x70 or opcode not in _OPCODES:
            raise InvalidInput(f"A frame begins with {first:#04x}, which no extension or opcode here has.")
        if second < _MASKED:
            raise InvalidInput("A frame is not masked; clients mask every frame (RFC 6455, section 5.1).")
        if opcode >= CLOSE:
            if not first & FIN or second & 0x7F > MOST_CONTROL_BYTES:
                raise InvalidInput("A control frame is cut into fragments or longer than 125 bytes.")
        elif (opcode == CONTINUATION) != bool(self._kind):
            raise InvalidInput("A fragment continues no message, or a message begins within another one.")

    def _assembled(self, first: int, payload: bytes) -> Message | None:
        opcode = first & 0xF
        if opcode >= CLOSE:
            return opcode, payload
        if opcode != CONTINUATION:
            if first & FIN:
                return opcode, payload
            self._kind = opcode
        self._parts += payload
        if not first & FIN:
            return None
        message = self._kind, bytes(self._parts)
        self._kind, self._parts = 0, bytearray()
        return message


def frame(opcode: int, payload: bytes) -> bytes:
    """One whole frame of a server, which masks nothing."""
    size = len(payload)
    if size < 126:
        return bytes((FIN | opcode, size)) + payload
    if size < 1 << 16:
        return bytes((FIN | opcode, 126, size >> 8, size & 0xFF)) + payload
    return bytes((FIN | opcode, 127)) + size.to_bytes(8, "big") + payload


def close_frame(code: int, reason: str) -> bytes:
    """The frame that ends a connection; of a reason, as much as fits."""
    if code == NO_CODE:
        return frame(CLOSE, b"")
    return frame(CLOSE, code.to_bytes(2, "big") + shortened(reason, MOST_REASON_BYTES).encode())


def shortened(text: str, most_bytes: int) -> str:
    """A text, or as much of it as fits into so many bytes of UTF-8 with an ellipsis where it is cut."""
    said = text.encode()
    return text if len(said) <= most_bytes else said[: most_bytes - 3].decode(errors="ignore") + "…"


def close_code(payload: bytes) -> int:
    """The code of a client's close; 1005 where it has none.

    Raises:
        InvalidInput: It is no close.
    """
    if not payload:
        return NO_CODE
    code = int.from_bytes(payload[:2], "big")
    try:
        payload[2:].decode()
    except UnicodeDecodeError:
        code = 0
    if len(payload) < 2 or not (code in _SENDABLE or 3000 <= code < 5000):
        raise InvalidInput(f"A close says {payload[:8]!r}; it takes a code of RFC 6455, section 7.4, and UTF-8.")
    return code


def accept_of(key: str) -> str:
    """What `Sec-WebSocket-Accept` answers to a key."""
    return base64.b64encode(hashlib.sha1(key.encode("latin-1") + _GUID).digest()).decode()
