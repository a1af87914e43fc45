"""One process of the streams' load generator: live streams in real time over raw sockets, nothing decided meanwhile.

Each stream sends a chunk when its last sample would have been heard, whatever the server does, and a result's latency
counts from that moment. What is sent is put together before the run; how it is said is a `Stream`'s, of one protocol.
"""

import errno
import gc
import heapq
import math
import os
import select
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import BenchError
from penstock.core.spec import Array, TensorSpec

# n results, s sounds, c chunks of a sound, U frames of outputs

Floats = npt.NDArray[np.float64]

NEAR_S = 0.001
LONGEST_WAIT_S = 0.01
AT_ONCE = 256
READ_BYTES = 1 << 16
CONNECT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamJob:
    """What one process sends. Times are on the machine's monotonic clock, in seconds.

    Args:
        host: The server's address.
        port: Its port.
        model: What it calls the model.
        input: One chunk.
        streams: How many.
        sounds: `[s, c * chunk]`, what the streams play in turn, from its beginning.
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
    model: str
    input: TensorSpec
    streams: int
    sounds: Array
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

    def chunks(self, sound: Array) -> list[bytes]:
        """The chunks of a sound, as their bytes."""
        frames = self.input.shape[0]
        return [sound[start : start + frames].tobytes() for start in range(0, len(sound), frames)]


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


# Makes the stream of a player and an index, in one protocol.
Open = Callable[["Player", int], "Stream"]


def play(job: StreamJob, opener: Callable[[StreamJob], Open]) -> StreamsSent:
    """Play a job's streams in this process.

    Args:
        job: What is played.
        opener: Puts together what is sent, and gives what opens a stream.

    Raises:
        BenchError: The server cannot be reached, or is no server of the protocol.
    """
    if job.cpus is not None:
        os.sched_setaffinity(0, job.cpus)
    gc.disable()
    with select.epoll() as poll:
        return Player(job, poll, opener(job)).run()


@final
class Player:
    """Plays a job's streams by the clock.

    Args:
        job: What is played.
        poll: Of their sockets.
        open: Opens a stream.

    Attributes:
        due: When the next chunk of each stream is due, as a heap.
        leaving: Streams that wait for the answer to their end.
    """

    def __init__(self, job: StreamJob, poll: select.epoll, open: Open) -> None:
        self.job = job
        self.poll = poll
        self._open = open
        try:
            with socket.create_connection((job.host, job.port), timeout=CONNECT_S) as first:
                self.family, self.address = first.family, first.getpeername()
        except OSError as error:
            raise BenchError(f"{job.host}:{job.port} cannot be reached ({error}).") from None
        rng = np.random.default_rng(job.seed)
        self.phases_s = (rng.random(job.streams) * job.period_s).tolist()
        self.due: list[tuple[float, int, Stream]] = []
        self.by_number: dict[int, Stream] = {}
        self.latency_s: list[float] = []
        self.offered = self.answered = self.repeated = self.refused = self.opened = self.leaving = 0
        self.broken: Counter[str] = Counter()
        self.late_s = 0.0
        self.all: list[Stream] = []

    def run(self) -> StreamsSent:
        """Open the streams one after the other, play them, and wait for the last results."""
        try:
            self._play()
        finally:
            for stream in list(self.by_number.values()):
                stream.close()
        return self._sum()

    def _play(self) -> None:
        job = self.job
        time.sleep(max(0.0, job.start_s - time.monotonic()))
        opening = job.open_s / job.streams
        while (now := time.monotonic()) < job.end_s:
            while len(self.all) < job.streams and now >= job.start_s + len(self.all) * opening:
                self.all.append(self._open(self, len(self.all)))
            if self.due and self.due[0][0] <= now:
                self.send_due(now)
            next_s = self.due[0][0] if self.due else now + LONGEST_WAIT_S
            self._poll(min(next_s, job.end_s) - now)
        for stream in list(self.by_number.values()):
            stream.finish()
        given_up_s = time.monotonic() + job.stragglers_s
        while (self.answered < self.offered or self.leaving) and time.monotonic() < given_up_s:
            self._poll(LONGEST_WAIT_S)

    def send_due(self, now: float) -> None:
        """Send the chunks that are due by now."""
        due, period_s, end_s = self.due, self.job.period_s, self.job.end_s
        while due and due[0][0] <= now:
            due_s, index, stream = due[0]
            if not stream.live or stream.sent == stream.chunks or due_s >= end_s:
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


class Stream(ABC):
    """A stream on a connection of its own: being opened, live, or over. What is said on it is its protocol's.

    Args:
        player: Whose it is.
        index: Which of the player's; it says what the stream plays.
        first: What is sent as soon as there is a connection.

    Attributes:
        which: Of the sounds.
        chunks: How many chunks that one has.
        sent: How many were sent.
        next_result: The number of the chunk whose result comes next.
        live: Whether chunks may be sent.
        kept: What came of the chunks, where it is compared.
    """

    def __init__(self, player: Player, index: int, first: bytes) -> None:
        job = player.job
        self.player = player
        self.which = index % len(job.sounds)
        self.chunks = len(job.sounds[self.which]) // job.input.shape[0]
        self.sent = 0
        self.live = False
        checks = job.expected is not None and index % job.check_every == 0
        self.kept: list[bytes] | None = [] if checks else None
        self._index = index
        self._unsent = first
        self._due_s: dict[int, float] = {}
        self.next_result = 0
        self._socket = socket.socket(player.family, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reason = self._socket.connect_ex(player.address)
        if reason not in (0, errno.EINPROGRESS):
            raise BenchError(f"no connection to {player.address} can be opened ({os.strerror(reason)}).")
        player.by_number[self._socket.fileno()] = self
        player.poll.register(self._socket, select.EPOLLIN | select.EPOLLOUT)

    @property
    def connected(self) -> bool:
        """Whether nobody hung up so far."""
        return self._socket.fileno() >= 0

    @abstractmethod
    def say(self, number: int) -> None:
        """Write the chunk of this number."""

    @abstractmethod
    def received(self, data: bytes) -> None:
        """Take what the server said."""

    @abstractmethod
    def finish(self) -> None:
        """No more chunks are due; the server may be told, and `player.leaving` says that its answer is waited for."""

    def send(self, due_s: float) -> None:
        """Send the next chunk."""
        player = self.player
        if due_s >= player.job.measured_from_s:
            player.offered += 1
            self._due_s[self.sent] = due_s
        number = self.sent
        self.sent += 1
        self.say(number)

    def heard(self, events: int) -> None:
        """The socket has something to say."""
        if events & select.EPOLLOUT and self._unsent:
            unsent, self._unsent = self._unsent, b""
            self.player.poll.modify(self._socket, select.EPOLLIN)
            self.write(unsent)
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self.over(error.strerror or str(error))
                return
            if data:
                self.received(data)
            else:
                self.over("the server hung up")

    def begin(self) -> None:
        """Chunks are due from now on, at the stream's phase."""
        self.live = True
        player = self.player
        heapq.heappush(player.due, (time.monotonic() + player.phases_s[self._index], self._index, self))

    def result(self, number: int, output: bytes) -> None:
        """Take what came of a chunk."""
        player = self.player
        if number != self.next_result:
            player.repeated += 1
        self.next_result = number + 1
        due_s = self._due_s.pop(number, None)
        now = time.monotonic()
        if due_s is not None:
            player.latency_s.append(now - due_s)
            player.answered += 1
        if self.kept is not None:
            self.kept.append(output)
        # Between the results, of which a poll may bring hundreds: what is due meanwhile would go out in a burst.
        if player.due and player.due[0][0] <= now:
            player.send_due(now)

    def refused(self, why: str) -> None:
        """The server does not take the stream in."""
        self.player.refused += 1
        self.over(why)

    def over(self, why: str) -> None:
        """The stream ended early."""
        if self.connected:
            self.player.broken[why] += 1
            self.close()

    def close(self) -> None:
        """Hang up."""
        self.live = False
        if self.connected:
            del self.player.by_number[self._socket.fileno()]
            self._socket.close()

    def write(self, data: bytes) -> None:
        """Send bytes, at once or as the socket takes them."""
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.over(error.strerror or str(error))
            return
        if sent < len(data):
            self._unsent = data[sent:]
            self.player.poll.modify(self._socket, select.EPOLLIN | select.EPOLLOUT)

    def difference(self) -> float:
        """How far the outputs are from the offline ones."""
        assert self.kept is not None
        assert self.player.job.expected is not None
        expected = self.player.job.expected[self.which]
        given = np.frombuffer(b"".join(self.kept), expected.dtype).reshape(-1, *expected.shape[1:])
        if len(given) > len(expected):
            return math.inf
        return float(np.abs(given - expected[: len(given)]).max(initial=0.0))
