"""A sent stream over Penstock's WebSocket. Frames are masked and serialised before the run."""

import base64
import json
import os
import struct
from typing import final

import numpy as np

from penstock.bench.streams.stream_sender import OpenStream, SentStream, StreamSender, StreamSenderJob, address_of
from penstock.core.errors import BenchError

TEXT, BINARY, CLOSE = 1, 2, 8
SEQUENCE = struct.Struct("<I")
RESULT = struct.Struct("<II")
START = b'{"type":"start","events":"binary"}'


def open_websockets(job: StreamSenderJob) -> OpenStream:
    """Serialise the frames of a job, and return a function that opens a stream."""
    mask = os.urandom(4)
    frames = [
        [_frame(BINARY, SEQUENCE.pack(number) + chunk, mask) for number, chunk in enumerate(job.workload.chunks(sound))]
        for sound in job.workload.sounds
    ]
    start = _frame(TEXT, START, mask)
    return lambda sender, index: _WebSocket(sender, index, start, frames)


@final
class _WebSocket(SentStream):
    def __init__(self, sender: StreamSender, index: int, start: bytes, frames: list[list[bytes]]) -> None:
        workload = sender.job.workload
        host, port = address_of(workload.url)
        key = base64.b64encode(os.urandom(16)).decode()
        upgrade = (
            f"GET /v1/apps/{workload.model}/stream HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        super().__init__(sender, index, upgrade.encode())
        self._start = start
        self._frames = frames[self.which]
        self._buffer = b""
        self._upgraded = False

    def send_chunk(self, number: int) -> None:
        self.write(self._frames[number])

    def finish(self) -> None:
        pass  # closing the connection ends the stream

    def received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        if not self._upgraded:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                self._buffer = buffer
                return
            if not buffer.startswith(b"HTTP/1.1 101 "):
                self.rejected(buffer[9:end].split(b"\r\n")[0].decode("latin1"))
                return
            self._upgraded, buffer = True, buffer[end + 4 :]
            self.write(self._start)
        self._buffer = self._handle_frames(buffer)

    def _handle_frames(self, buffer: bytes) -> bytes:
        """Handle every complete frame; return the rest."""
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
                self._handle_message(json.loads(buffer[begin:end]))
            elif kind == CLOSE:
                self.lost(f"{int.from_bytes(buffer[begin : begin + 2], 'big')} {buffer[begin + 2 : end].decode()}")
                return b""
            at = end
        return buffer[at:]

    def _handle_message(self, message: dict[str, str]) -> None:
        if message["type"] != "ready":
            raise BenchError(f"the server sent {message} where a stream begins; is this a Penstock server?")
        self.sender.opened += 1
        self.begin()


def _frame(kind: int, body: bytes, mask: bytes) -> bytes:
    """Return a client's frame (RFC 6455, section 5.2)."""
    size = len(body)
    head = bytes((0x80 | size,)) if size < 126 else bytes((0xFE,)) + size.to_bytes(2, "big")
    masked = np.frombuffer(body, np.uint8) ^ np.resize(np.frombuffer(mask, np.uint8), size)
    return bytes((0x80 | kind,)) + head + mask + masked.tobytes()
