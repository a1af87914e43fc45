"""One process of the streams' load generator: live streams in real time over raw sockets, nothing decided meanwhile.

Each stream sends a chunk when its last sample would have been heard, whatever the server does, and a result's latency
counts from that moment. Frames are masked and put together before the run.
"""

import base64
import errno
import gc
import heapq
import json
import math
import os
import select
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import BenchError
from penstock.core.spec import Array

# n results, s sounds, c chunks of a sound, U frames of outputs

Floats = npt.NDArray[np.float64]

NEAR_S = 0.001
LONGEST_WAIT_S = 0.01
AT_ONCE = 256
READ_BYTES = 1 << 16
CONNECT_S = 5.0
TEXT, BINARY, CLOSE, PING = 1, 2, 8, 9
SEQUENCE = struct.Struct("<I")
RESULT = struct.Struct("<II")
START = {"type": "start", "events": "binary"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamJob:
    """What one process sends. Times are on the machine's monotonic clock, in seconds.

    Args:
        host: The server's address.
        port: Its port.
        path: Of the application's streams.
        streams: How many.
        sounds: `[s, c * chunk]`, what the streams play in turn, from its beginning.
        chunk: Frames of a chunk.
        period_s: From one chunk to the next.
        start_s: When the first stream is opened.
        open_s: The last one is opened so long after the first.
        measured_from_s: Chunks due from here on count.
        end_s: No chunk is due from here on.
        stragglers_s: How long the last results are waited for.
        check_every: Of so many streams, one has its outputs compared.
        expected: `[s, U, ...]`, what the sounds give offline; None to check nothing.
        seed: Of the phases.
        cpus: The cores on which the process runs.
    """

    host: str
    port: int
    path: str
    streams: int
    sounds: Array
    chunk: int
    period_s: float
    start_s: float
    open_s: float
    measured_from_s: float
    end_s: float
    stragglers_s: float
    check_every: int
    expected: Array | None
    seed: int
    cpus: frozenset[int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamsSent:
    """What became of one process's chunks; see `penstock.bench.streams.StreamsMeasured`."""

    latency_s: Floats
    offered: int
    lost: int
    repeated: int
    opened: int
    refused: int
    broken: dict[str, int]
    checked: int
    difference: float
    late_s: float


def run_stream_job(job: StreamJob) -> StreamsSent:
    """Play a job's streams in this process."""
    if job.cpus is not None:
        os.sched_setaffinity(0, job.cpus)
    gc.disable()
    with select.epoll() as poll:
        return _Player(job, poll).run()


@final
class _Player:
    def __init__(self, job: StreamJob, poll: select.epoll) -> None:
        self.job = job
        self.poll = poll
        self.mask = os.urandom(4)
        self.frames = [self._frames(sound) for sound in job.sounds]
        try:
            with socket.create_connection((job.host, job.port), timeout=CONNECT_S) as first:
                self.family, self.address = first.family, first.getpeername()
        except OSError as error:
            raise BenchError(f"{job.host}:{job.port} cannot be reached ({error}).") from None
        rng = np.random.default_rng(job.seed)
        self.phases_s = (rng.random(job.streams) * job.period_s).tolist()
        self.due: list[tuple[float, int, _Stream]] = []
        self.by_number: dict[int, _Stream] = {}
        self.latency_s: list[float] = []
        self.offered = self.answered = self.repeated = self.refused = self.opened = 0
        self.broken: Counter[str] = Counter()
        self.late_s = 0.0
        self.all: list[_Stream] = []

    def run(self) -> StreamsSent:
        job = self.job
        time.sleep(max(0.0, job.start_s - time.monotonic()))
        opening = job.open_s / job.streams
        while (now := time.monotonic()) < job.end_s:
            while len(self.all) < job.streams and now >= job.start_s + len(self.all) * opening:
                self.all.append(_Stream(self, len(self.all)))
            if self.due and self.due[0][0] <= now:
                self.send_due(now)
            next_s = self.due[0][0] if self.due else now + LONGEST_WAIT_S
            self._poll(min(next_s, job.end_s) - now)
        given_up_s = time.monotonic() + job.stragglers_s
        while self.answered < self.offered and time.monotonic() < given_up_s:
            self._poll(LONGEST_WAIT_S)
        for stream in list(self.by_number.values()):
            stream.close()
        return self._sum()

    def send_due(self, now: float) -> None:
        """Send the chunks that are due by now."""
        due, period_s, end_s = self.due, self.job.period_s, self.job.end_s
        while due and due[0][0] <= now:
            due_s, index, stream = due[0]
            if not stream.live or stream.sent == len(stream.frames) or due_s >= end_s:
                heapq.heappop(due)
                continue
            heapq.heapreplace(due, (due_s + period_s, index, stream))
            self.late_s = max(self.late_s, now - due_s)
            stream.send(due_s)

    def _poll(self, wait_s: float) -> None:
        for number, events in self.poll.poll(min(wait_s - NEAR_S, LONGEST_WAIT_S) if wait_s > NEAR_S else 0, AT_ONCE):
            stream = self.by_number.get(number)
            if stream is not None:
                stream.heard(events)

    def _frames(self, sound: Array) -> list[bytes]:
        """Every chunk of a sound as a masked frame, behind its head: sequence number and samples."""
        mask = np.frombuffer(self.mask, np.uint8)
        frames: list[bytes] = []
        for number, start in enumerate(range(0, len(sound), self.job.chunk)):
            body = SEQUENCE.pack(number) + sound[start : start + self.job.chunk].tobytes()
            masked = np.frombuffer(body, np.uint8) ^ np.resize(mask, len(body))
            frames.append(head(BINARY, len(body), self.mask) + masked.tobytes())
        return frames

    def _sum(self) -> StreamsSent:
        differences = [stream.difference() for stream in self.all if stream.kept is not None]
        return StreamsSent(
            latency_s=np.array(self.latency_s),
            offered=self.offered,
            lost=self.offered - self.answered,
            repeated=self.repeated,
            opened=self.opened,
            refused=self.refused,
            broken=dict(self.broken),
            checked=len(differences),
            difference=max(differences, default=0.0),
            late_s=self.late_s,
        )


@final
class _Stream:
    """A stream: being opened, live, or over."""

    def __init__(self, player: _Player, index: int) -> None:
        self._player = player
        self._index = index
        self._which = index % len(player.frames)
        self._buffer = b""
        self._unsent = b""
        self._due_s: dict[int, float] = {}
        self._next_result = 0
        self._upgraded = False
        self.frames = player.frames[self._which]
        self.sent = 0
        self.live = False
        checks = player.job.expected is not None and index % player.job.check_every == 0
        self.kept: list[bytes] | None = [] if checks else None
        self._socket = socket.socket(player.family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reason = self._socket.connect_ex(player.address)
        if reason not in (0, errno.EINPROGRESS):
            raise BenchError(f"no connection to {player.address} can be opened ({os.strerror(reason)}).")
        player.by_number[self._socket.fileno()] = self
        player.poll.register(self._socket, select.EPOLLIN)
        job = player.job
        key = base64.b64encode(os.urandom(16)).decode()
        self._unsent = (
            f"GET {job.path} HTTP/1.1\r\nHost: {job.host}:{job.port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
        ).encode()
        player.poll.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)

    def send(self, due_s: float) -> None:
        """Send the next chunk."""
        player = self._player
        if due_s >= player.job.measured_from_s:
            player.offered += 1
            self._due_s[self.sent] = due_s
        self._write(self.frames[self.sent])
        self.sent += 1

    def heard(self, events: int) -> None:
        """The socket has something to say."""
        if events & select.EPOLLOUT and self._unsent:
            unsent, self._unsent = self._unsent, b""
            self._player.poll.modify(self._socket, select.EPOLLIN)
            self._write(unsent)
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._over(error.strerror or str(error))
                return
            if data:
                self._received(data)
            else:
                self._over("the server hung up")

    def close(self) -> None:
        """Hang up."""
        self.live = False
        del self._player.by_number[self._socket.fileno()]
        self._socket.close()

    def difference(self) -> float:
        """How far the outputs are from the offline ones."""
        assert self.kept is not None
        assert self._player.job.expected is not None
        expected = self._player.job.expected[self._which]
        given = np.frombuffer(b"".join(self.kept), expected.dtype).reshape(-1, *expected.shape[1:])
        if len(given) > len(expected):
            return math.inf
        return float(np.abs(given - expected[: len(given)]).max(initial=0.0))

    def _over(self, why: str) -> None:
        self._player.broken[why] += 1
        self.close()

    def _write(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._over(error.strerror or str(error))
            return
        if sent < len(data):
            self._unsent = data[sent:]
            self._player.poll.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)

    def _received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        if not self._upgraded:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                self._buffer = buffer
                return
            if not buffer.startswith(b"HTTP/1.1 101 "):
                self._player.refused += 1
                self._over(buffer[9:end].split(b"\r\n")[0].decode("latin1"))
                return
            self._upgraded, buffer = True, buffer[end + 4 :]
            text = json.dumps(START).encode()
            mask = self._player.mask
            masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(text))
            self._write(head(TEXT, len(text), mask) + masked)
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
                self._result(buffer, begin, end)
            elif kind == TEXT:
                self._told(json.loads(buffer[begin:end]))
            elif kind == CLOSE:
                self._over(f"{int.from_bytes(buffer[begin : begin + 2], 'big')} {buffer[begin + 2 : end].decode()}")
                return b""
            at = end
        return buffer[at:]

    def _told(self, message: dict[str, str]) -> None:
        if message["type"] != "ready":
            raise BenchError(f"a stream was told {message}; is this a Penstock server?")
        player = self._player
        self.live = True
        player.opened += 1
        first_s = time.monotonic() + player.phases_s[self._index]
        heapq.heappush(player.due, (first_s, self._index, self))

    def _result(self, buffer: bytes, begin: int, end: int) -> None:
        player = self._player
        number, _ = RESULT.unpack_from(buffer, begin)
        if number != self._next_result:
            player.repeated += 1
        self._next_result = number + 1
        due_s = self._due_s.pop(number, None)
        now = time.monotonic()
        if due_s is not None:
            player.latency_s.append(now - due_s)
            player.answered += 1
        if self.kept is not None:
            self.kept.append(buffer[begin + RESULT.size : end])
        # Between the results, of which a poll may bring hundreds: what is due meanwhile would go out in a burst.
        if player.due and player.due[0][0] <= now:
            player.send_due(now)


def head(kind: int, length: int, mask: bytes) -> bytes:
    """The head of a client's frame (RFC 6455, section 5.2)."""
    if length < 126:
        return bytes((0x80 | kind, 0x80 | length)) + mask
    return bytes((0x80 | kind, 0xFE)) + length.to_bytes(2, "big") + mask
