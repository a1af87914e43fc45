"""A played stream over Penstock's WebSocket. Frames are masked and put together before the run."""

import base64
import json
import os
import struct
from typing import final

import numpy as np

from penstock.bench.stream_player import Open, Player, Stream, StreamJob
from penstock.core.errors import BenchError

TEXT, BINARY, CLOSE = 1, 2, 8
SEQUENCE = struct.Struct("<I")
RESULT = struct.Struct("<II")
START = b'{"type":"start","events":"binary"}'


def open_websockets(job: StreamJob) -> Open:
    """Put a job's frames together, and give what opens a stream."""
    mask = os.urandom(4)
    frames = [
        [_frame(BINARY, SEQUENCE.pack(number) + chunk, mask) for number, chunk in enumerate(job.chunks(sound))]
        for sound in job.sounds
    ]
    start = _frame(TEXT, START, mask)
    return lambda player, index: _WebSocket(player, index, start, frames)


@final
class _WebSocket(Stream):
    def __init__(self, player: Player, index: int, start: bytes, frames: list[list[bytes]]) -> None:
        job = player.job
        key = base64.b64encode(os.urandom(16)).decode()
        upgrade = (
            f"GET /v1/apps/{job.model}/stream HTTP/1.1\r\nHost: {job.host}:{job.port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        super().__init__(player, index, upgrade.encode())
        self._start = start
        self._frames = frames[self.which]
        self._buffer = b""
        self._upgraded = False

    def say(self, number: int) -> None:
        self.write(self._frames[number])

    def finish(self) -> None:
        # Who hangs up has ended.
        pass

    def received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        if not self._upgraded:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                self._buffer = buffer
                return
            if not buffer.startswith(b"HTTP/1.1 101 "):
                self.refused(buffer[9:end].split(b"\r\n")[0].decode("latin1"))
                return
            self._upgraded, buffer = True, buffer[end + 4 :]
            self.write(self._start)
        self._buffer = self._taken(buffer)

    def _taken(self, buffer: bytes) -> bytes:
        """Handle every whole frame; gives what is left."""
        at, size = 0, len(buffer)
        while size - at >= 2:
            length, begin = buffer[at + 1], at + 2
            if length >= 126:
                wide = 2 if length == 126 else 8
                begin += wide
                length = int.from_bytes(buffer[at + 2 : begin], "big") if size >= begin else size
            end = begin + length
            if size < end:
                break
            kind = buffer[at] & 15
            if kind == BINARY:
                number, _ = RESULT.unpack_from(buffer, begin)
                self.result(number, buffer[begin + RESULT.size : end])
            elif kind == TEXT:
                self._told(json.loads(buffer[begin:end]))
            elif kind == CLOSE:
                self.over(f"{int.from_bytes(buffer[begin : begin + 2], 'big')} {buffer[begin + 2 : end].decode()}")
                return b""
            at = end
        return buffer[at:]

    def _told(self, message: dict[str, str]) -> None:
        if message["type"] != "ready":
            raise BenchError(f"a stream was told {message}; is this a Penstock server?")
        self.player.opened += 1
        self.begin()


def _frame(kind: int, body: bytes, mask: bytes) -> bytes:
    """A client's frame (RFC 6455, section 5.2)."""
    size = len(body)
    head = bytes((0x80 | size,)) if size < 126 else bytes((0xFE,)) + size.to_bytes(2, "big")
    masked = np.frombuffer(body, np.uint8) ^ np.resize(np.frombuffer(mask, np.uint8), size)
    return bytes((0x80 | kind,)) + head + mask + masked.tobytes()
