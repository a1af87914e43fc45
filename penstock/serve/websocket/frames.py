"""WebSocket frames without sockets (RFC 6455, the server's side): bytes in, whole messages out, one at a time.

Messages are taken out one by one, so that a caller without room leaves the rest in the buffer. `websockets` unmasks in
C: no other step touches every byte.
"""

from struct import Struct
from typing import final

import numpy as np
from websockets.exceptions import ProtocolError
from websockets.frames import Close, CloseCode
from websockets.speedups import apply_mask

from penstock.core.errors import InvalidInput, TooLarge
from penstock.core.wording.shown import shortened

# Opcodes.
CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10

FIN = 0x80
_MASKED = 0x80
_WHOLE_BINARY = FIN | BINARY
_OPCODES = {CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG}
MAX_CONTROL_BYTES = 125
# A close's reason, beside its code.
MAX_REASON_BYTES = MAX_CONTROL_BYTES - 2

# Heads of frames without a mask, by the size of their payload.
_SMALL, _MEDIUM, _LARGE = Struct("!BB"), Struct("!BBH"), Struct("!BBQ")

Message = tuple[int, bytes]
# In place of a message: a part of one.
FRAGMENT: Message = (CONTINUATION, b"")


@final
class FrameReader:
    """Parses the messages of one client.

    Args:
        max_bytes: Longest message; a longer one is rejected before it is buffered.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._data: bytes | bytearray = b""
        self._at = 0
        # A message in fragments so far, and its opcode.
        self._parts = bytearray()
        self._kind = 0

    def next_alone(self, data: bytes) -> bytes | None:
        """Parse bytes that are one whole binary message; return None for any others, to be given to `feed`."""
        there = len(data)
        if self._at != len(self._data) or self._kind or there < 8 or data[0] != _WHOLE_BINARY:
            return None
        size, body = data[1] - _MASKED, 6
        if size == 126:
            size, body = data[2] << 8 | data[3], 8
            if size < 126:
                return None
        # Frames with a 64-bit length are left to `next`, and so are those that it rejects.
        if body + size != there or size > self.max_bytes or data[1] == 0xFF:
            return None
        return apply_mask(data[body:], data[body - 4 : body])

    def next_joined(self, least: int) -> tuple[bytes, int] | None:
        """Take binary messages of one size that come next, if there are so many of them: joined, and their size.

        Sizes that are no whole number of 4 bytes are left to `next`, and so is all that it rejects.
        """
        data, at = self._data, self._at
        there = len(data) - at
        if there < least * 8 or data[at] != _WHOLE_BINARY or self._kind:
            return None
        size, body = data[at + 1] - _MASKED, 6
        if size == 126:
            size, body = data[at + 2] << 8 | data[at + 3], 8
            if size < 126:
                return None
        if size <= 0 or size % 4 or size > self.max_bytes or data[at + 1] == 0xFF or there < least * (body + size):
            return None
        count = there // (body + size)
        frames_BT = np.frombuffer(data, np.uint8, count * (body + size), at).reshape(count, -1)
        equal_B = (frames_BT[:, : body - 4] == frames_BT[0, : body - 4]).all(axis=1)
        if not equal_B.all():
            count = int(equal_B.argmin())
            if count < least:
                return None
        masks_BT, payloads_BT = frames_BT[:count, body - 4 : body], frames_BT[:count, body:]
        joined = np.ascontiguousarray(payloads_BT).view(np.uint32) ^ np.ascontiguousarray(masks_BT).view(np.uint32)
        self._at = at + count * (body + size)
        return joined.tobytes(), size

    def feed(self, data: bytes) -> None:
        """Buffer bytes."""
        if self._at == len(self._data):
            self._data, self._at = data, 0
            return
        if not isinstance(self._data, bytearray) or self._at:
            self._data, self._at = bytearray(memoryview(self._data)[self._at :]), 0
        self._data += data

    @property
    def held_bytes(self) -> int:
        """Bytes of messages that are partly read, or not taken yet."""
        return len(self._data) - self._at + len(self._parts)

    def next(self) -> Message | None:
        """Take the next whole message or control frame, its opcode and payload; None until more bytes come.

        A fragment that does not end its message gives `FRAGMENT`: each call takes one frame, so that a caller can bound
        the frames that it takes in one iteration of the event loop.

        Raises:
            InvalidInput: The bytes are no WebSocket frame of a client.
            TooLarge: A message is longer than `max_bytes`.
        """
        data, at = self._data, self._at
        there = len(data)
        if there < at + 2:
            return None
        first, second = data[at], data[at + 1]
        size, body = second & 0x7F, at + 6
        # A length that is cut off here is checked once it is whole.
        if size == 126:
            size, body = int.from_bytes(data[at + 2 : at + 4], "big"), at + 8
            if there >= body and size < 126:
                raise _too_wide(size)
        elif size == 127:
            size, body = int.from_bytes(data[at + 2 : at + 10], "big"), at + 14
            if there >= body and size < 1 << 16:
                raise _too_wide(size)
        if first != _WHOLE_BINARY or second < _MASKED or self._kind:
            self._check(first, second)
        if there < body:
            return None
        end = body + size
        if size + len(self._parts) > self.max_bytes and first & 0xF < CLOSE:
            raise TooLarge(f"A message has {size + len(self._parts):,} bytes; at most {self.max_bytes:,} are taken.")
        if there < end:
            return None
        self._at = end
        payload = apply_mask(data[body:end], data[body - 4 : body])
        if first == _WHOLE_BINARY:
            return BINARY, payload
        return self._assembled(first, payload)

    def _check(self, first: int, second: int) -> None:
        opcode = first & 0xF
        if first & 0x70 or opcode not in _OPCODES:
            raise InvalidInput(f"A frame begins with {first:#04x}, which no extension or opcode here has.")
        if second < _MASKED:
            raise InvalidInput("A frame is not masked; clients mask every frame (RFC 6455, section 5.1).")
        if opcode >= CLOSE:
            if not first & FIN or second & 0x7F > MAX_CONTROL_BYTES:
                raise InvalidInput("A control frame is cut into fragments or longer than 125 bytes.")
        elif (opcode == CONTINUATION) != bool(self._kind):
            raise InvalidInput("A fragment continues no message, or a message begins within another one.")

    def _assembled(self, first: int, payload: bytes) -> Message:
        opcode = first & 0xF
        if opcode >= CLOSE:
            return opcode, payload
        if opcode != CONTINUATION:
            if first & FIN:
                return opcode, payload
            self._kind = opcode
        self._parts += payload
        if not first & FIN:
            return FRAGMENT
        message = self._kind, bytes(self._parts)
        self._kind, self._parts = 0, bytearray()
        return message


def _too_wide(size: int) -> InvalidInput:
    return InvalidInput(f"A length of {size:,} is not written in the fewest bytes (RFC 6455, section 5.2).")


def frame_head(opcode: int, size: int) -> bytes:
    """Head of a whole frame of a server with a payload of so many bytes, without a mask."""
    if size < 126:
        return _SMALL.pack(FIN | opcode, size)
    if size < 1 << 16:
        return _MEDIUM.pack(FIN | opcode, 126, size)
    return _LARGE.pack(FIN | opcode, 127, size)


def frame(opcode: int, payload: bytes) -> bytes:
    """One whole frame of a server, without a mask."""
    return frame_head(opcode, len(payload)) + payload


def close_frame(code: int, reason: str) -> bytes:
    """The frame that ends a connection, with as much of the reason as fits; without both for code 1005."""
    if code == CloseCode.NO_STATUS_RCVD:
        return frame(CLOSE, b"")
    return frame(CLOSE, code.to_bytes(2, "big") + shortened(reason, MAX_REASON_BYTES).encode())


def close_code(payload: bytes) -> int:
    """The code of a client's close frame; 1005 if it has none.

    Raises:
        InvalidInput: RFC 6455, section 7.4, does not allow it.
    """
    try:
        close = Close.parse(payload)
        if payload:
            close.check()
    except (ProtocolError, UnicodeDecodeError):
        raise InvalidInput(
            f"A close says {payload[:8]!r}; it takes a code of RFC 6455, section 7.4, and UTF-8."
        ) from None
    return close.code
