"""A server of live streams with faults, as its model's name says, on their own connections or on shared ones."""

import json
import socket
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from itertools import count
from struct import Struct

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from penstock.core.streams.stream_entries import BINARY, CLOSE, HEAD, PATH, TEXT, close_payload, entry_of

NUMBER, RESULT = Struct("<I"), Struct("<II")
WINDOW = 2


class OddStreams:
    """Answers chunks of int16 with their samples as float32.

    Attributes:
        taken: Chunks that came, by connection and stream.
        pongs: Pings that were answered.
    """

    def __init__(self) -> None:
        self.taken: Counter[tuple[int, int]] = Counter()
        self.pongs = 0
        self._numbers = count()
        self._held: dict[tuple[int, int], bytes] = {}

    def refuse(self, connection: ServerConnection, request: Request) -> Response | None:
        """Refuse an upgrade."""
        if "refusing" in request.path:
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, json.dumps({"error": "come back later"}))
        return None

    def handle(self, connection: ServerConnection) -> None:
        """Serve a connection."""
        assert connection.request is not None
        handle = self._shared if connection.request.path == PATH else self._alone
        with suppress(ConnectionClosed):
            handle(connection, connection.request.path)

    def _alone(self, connection: ServerConnection, path: str) -> None:
        kind, of = path.split("/")[3], (next(self._numbers), 0)
        assert json.loads(connection.recv())["events"] == "binary"
        connection.send(ready())
        for message in connection:
            assert isinstance(message, bytes)
            for opcode, answer in self._answers(kind, of, message):
                if opcode == CLOSE:
                    connection.close(int.from_bytes(answer[:2], "big"), answer[2:].decode())
                    return
                if kind == "pinging":
                    self.pongs += connection.ping().wait(5)
                # In fragments, which no Penstock server sends.
                connection.send([answer] if kind == "fragmenting" else answer)

    def _shared(self, connection: ServerConnection, path: str) -> None:
        kinds, of = dict[int, str](), next(self._numbers)
        for message in connection:
            assert isinstance(message, bytes)
            answers, at = list[bytes](), 0
            while at < len(message):
                stream, opcode, size = HEAD.unpack_from(message, at)
                payload = message[at + HEAD.size : at + HEAD.size + size]
                at += HEAD.size + size
                if opcode == TEXT:
                    kinds[stream] = json.loads(payload)["app"]
                    if kinds[stream] == "refusing":
                        answers.append(entry_of(stream, CLOSE, close_payload(1013, "come back later")))
                    else:
                        answers.append(entry_of(stream, TEXT, ready().encode()))
                else:
                    replies = self._answers(kinds[stream], (of, stream), payload)
                    answers += [entry_of(stream, *reply) for reply in replies]
            if "cutting" in kinds.values():
                answers.append(b"short")
            if answers:
                connection.send(b"".join(answers))

    def _answers(self, kind: str, of: tuple[int, int], chunk: bytes) -> list[tuple[int, bytes]]:
        number = NUMBER.unpack_from(chunk)[0]
        assert number == self.taken[of]
        self.taken[of] += 1
        if kind == "delaying":
            # Each is answered when the next one comes.
            chunk, self._held[of] = self._held.get(of, b""), chunk
            if not chunk:
                return []
            number -= 1
        samples = np.frombuffer(chunk[NUMBER.size :], "<i2").astype("<f4")
        if kind == "closing" and number == 2:
            return [(CLOSE, close_payload(1011, "it is closing"))]
        if kind == "silent" or (kind == "losing" and number % 2):
            return []
        told = number + (kind == "misnumbering" and number == 3)
        frames = len(samples) + (kind == "miscounting")
        result = RESULT.pack(told, frames) + (samples + (kind == "wrong")).tobytes()
        return [(BINARY, result)] * (2 if kind == "repeating" else 1)


def ready() -> str:
    """The answer to a start; its chunks are so long that the window is as it says."""
    return json.dumps({"type": "ready", "window": WINDOW, "chunk_ms": 1000.0})


@contextmanager
def odd_streams() -> Generator[tuple[OddStreams, int]]:
    """Serve until the block ends; yields the server and its port."""
    odd = OddStreams()
    # So small that large chunks are written in parts.
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with serve(odd.handle, sock=listener, process_request=odd.refuse, compression=None, max_size=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield odd, server.socket.getsockname()[1]
        finally:
            server.shutdown()
            thread.join()
