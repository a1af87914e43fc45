"""Sent streams that share Penstock's WebSocket connections. Chunks that are due together go out together."""

import json
from typing import final

from penstock.bench.streams.client_frames import (
    BINARY,
    CLOSE,
    NO_MASK,
    TEXT,
    client_head,
    end_of_upgrade,
    next_frame,
    upgrade_request,
)
from penstock.bench.streams.sender_socket import SenderSocket
from penstock.bench.streams.stream_sender import OpenStream, SentStream, StreamSender, StreamSenderJob
from penstock.bench.streams.websocket_stream import RESULT, SEQUENCE
from penstock.core.errors import BenchError
from penstock.core.streams.stream_entries import HEAD, PATH, entry_of


def open_shared(job: StreamSenderJob) -> OpenStream:
    """Serialise the chunks of a job, and return a function that opens a stream on the newest connection."""
    messages = [
        [SEQUENCE.pack(number) + chunk for number, chunk in enumerate(job.workload.chunks(sound))]
        for sound in job.workload.sounds
    ]
    connections: list[_SharedConnection] = []

    def open_one(sender: StreamSender, index: int) -> SentStream:
        if index % job.workload.per_connection == 0:
            connections.append(_SharedConnection(sender, min(job.workload.per_connection, job.streams - index)))
        return _SharedStream(sender, index, connections[-1], messages)

    return open_one


def shared_start(model: str) -> bytes:
    """Return the message that begins a stream of a model."""
    return json.dumps({"type": "start", "app": model, "events": "binary"}).encode()


@final
class _SharedConnection:
    """A connection, and the streams on it by id: so many in all."""

    def __init__(self, sender: StreamSender, most: int) -> None:
        self._sender, self._most = sender, most
        self._streams: dict[int, _SharedStream] = {}
        self._next_id = 0
        self._entries: list[bytes] = []
        self._buffer = b""
        self._upgraded = False
        self._socket = SenderSocket(sender, upgrade_request(sender.job.workload.url, PATH), self)

    def join(self, stream: "_SharedStream") -> int:
        """Begin a stream; return its id."""
        stream_id, self._next_id = self._next_id, self._next_id + 1
        self._streams[stream_id] = stream
        self.add(entry_of(stream_id, TEXT, shared_start(self._sender.job.workload.model)))
        return stream_id

    def has(self, stream_id: int) -> bool:
        """True while a stream is open."""
        return stream_id in self._streams and self._socket.connected

    def leave(self, stream_id: int) -> None:
        """Forget a stream; the connection is closed with the last one."""
        del self._streams[stream_id]
        if not self._streams and self._next_id == self._most:
            self._socket.close()

    def add(self, entry: bytes) -> None:
        """Send an entry, with the others that are due now."""
        if not self._entries:
            self._sender.unsent.append(self._flush)
        self._entries.append(entry)

    def received(self, data: bytes) -> None:
        """Handle bytes from the server."""
        buffer = self._buffer + data if self._buffer else data
        if not self._upgraded:
            begin, refused = end_of_upgrade(buffer)
            if not begin:
                self._buffer = buffer
                return
            if refused:
                self.lost(refused)
                return
            self._upgraded, buffer = True, buffer[begin:]
            self._flush()
        at = 0
        while (found := next_frame(buffer, at)) is not None:
            kind, begin, end = found
            if kind == BINARY:
                self._handle_entries(buffer, begin, end)
            elif kind == CLOSE:
                self.lost(f"{int.from_bytes(buffer[begin : begin + 2], 'big')} {buffer[begin + 2 : end].decode()}")
                return
            at = end
        self._buffer = buffer[at:]

    def lost(self, reason: str) -> None:
        """Handle that the connection could not be opened or has ended."""
        for stream in list(self._streams.values()):
            stream.lost(reason)
        self._socket.close()

    def _handle_entries(self, buffer: bytes, at: int, end: int) -> None:
        streams = self._streams
        while at < end:
            stream_id, kind, size = HEAD.unpack_from(buffer, at)
            begin = at + HEAD.size
            at = begin + size
            stream = streams.get(stream_id)
            if stream is None:
                continue
            if kind == BINARY:
                number, _ = RESULT.unpack_from(buffer, begin)
                stream.result(number, buffer[begin + RESULT.size : at])
            elif kind == TEXT:
                stream.handle_message(json.loads(buffer[begin:at]))
            else:
                stream.ended(int.from_bytes(buffer[begin : begin + 2], "big"), buffer[begin + 2 : at].decode())

    def _flush(self) -> None:
        if self._upgraded and self._entries and self._socket.connected:
            size = sum(map(len, self._entries))
            self._socket.write(b"".join((client_head(BINARY, size, NO_MASK), *self._entries)))
            self._entries = []


@final
class _SharedStream(SentStream):
    def __init__(
        self, sender: StreamSender, index: int, connection: _SharedConnection, messages: list[list[bytes]]
    ) -> None:
        super().__init__(sender, index)
        self._connection = connection
        self._messages = messages[self.which]
        self._id = connection.join(self)

    @property
    def connected(self) -> bool:
        return self._connection.has(self._id)

    def send_chunk(self, number: int) -> None:
        self._connection.add(entry_of(self._id, BINARY, self._messages[number]))

    def finish(self) -> None:
        pass  # closing the connection ends the stream

    def close_connection(self) -> None:
        if self.connected:
            self._connection.leave(self._id)

    def handle_message(self, message: dict[str, str]) -> None:
        """Handle a message of the server that is no result."""
        if message["type"] != "ready":
            raise BenchError(f"the server sent {message} where a stream begins; is this a Penstock server?")
        self.sender.opened += 1
        self.begin()

    def ended(self, code: int, reason: str) -> None:
        """Handle the end of the stream."""
        if self.live:
            self.lost(f"{code} {reason}")
        else:
            self.rejected(reason)
