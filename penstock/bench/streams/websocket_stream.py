"""A sent stream over Penstock's WebSocket. Frames are masked and serialised before the run."""

import json
import os
import struct
from typing import final

from penstock.bench.streams.client_frames import (
    BINARY,
    CLOSE,
    TEXT,
    client_frame,
    end_of_upgrade,
    next_frame,
    upgrade_request,
)
from penstock.bench.streams.sender_socket import ConnectedStream
from penstock.bench.streams.stream_sender import OpenStream, StreamSender, StreamSenderJob
from penstock.core.errors import BenchError

SEQUENCE = struct.Struct("<I")
RESULT = struct.Struct("<II")
START = b'{"type":"start","events":"binary"}'


def stream_path(model: str) -> str:
    """Return the path of a model's streams."""
    return f"/v1/apps/{model}/stream"


def open_websockets(job: StreamSenderJob) -> OpenStream:
    """Serialise the frames of a job, and return a function that opens a stream."""
    mask = os.urandom(4)
    frames = [
        [
            client_frame(BINARY, SEQUENCE.pack(number) + chunk, mask)
            for number, chunk in enumerate(job.workload.chunks(sound))
        ]
        for sound in job.workload.sounds
    ]
    start = client_frame(TEXT, START, mask)
    return lambda sender, index: _WebSocket(sender, index, start, frames)


@final
class _WebSocket(ConnectedStream):
    def __init__(self, sender: StreamSender, index: int, start: bytes, frames: list[list[bytes]]) -> None:
        workload = sender.job.workload
        super().__init__(sender, index, upgrade_request(workload.url, stream_path(workload.model)))
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
            begin, refused = end_of_upgrade(buffer)
            if not begin:
                self._buffer = buffer
                return
            if refused:
                self.rejected(refused)
                return
            self._upgraded, buffer = True, buffer[begin:]
            self.write(self._start)
        self._buffer = self._handle_frames(buffer)

    def _handle_frames(self, buffer: bytes) -> bytes:
        """Handle every complete frame; return the rest."""
        at = 0
        while (found := next_frame(buffer, at)) is not None:
            kind, begin, end = found
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
