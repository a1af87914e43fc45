"""One process of the load generator for live streams: chunks in real time over raw sockets.

Each stream sends a chunk at the time of its last sample, independent of the server, and a result's latency counts from
then. Messages are serialised before the run; subclasses of `SentStream` speak one protocol each.
"""

import heapq
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final
from urllib.parse import urlsplit

import numpy as np

from penstock.bench.socket_loop import MAX_WAIT_S, SocketLoop
from penstock.bench.streams.stream_result import Floats, StreamLoadResult
from penstock.core.errors import BenchError
from penstock.core.spec import Array, TensorSpec

# s sounds, c chunks of a sound, U frames of outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamWorkload:
    """Signals of the streams and their expected outputs.

    Args:
        url: The server's URL or `"host:port"`.
        model: Name of the model.
        input: Spec of one chunk.
        sounds: `[s, c * chunk]`, signals that the streams send in turn, as long as a stream lasts.
        period_s: Time from one chunk to the next.
        protocol: One of `PROTOCOLS`.
        per_connection: Streams on one connection.
        expected: `[s, U, ...]`, offline outputs of the sounds; None to check nothing.
        tolerance: The largest difference of a right output.
        max_delay_frames: Frames that the outputs of the chunks so far may lack, because a network with lookahead gives
            them later.
    """

    url: str
    model: str
    input: TensorSpec
    sounds: Array
    period_s: float
    protocol: str = "websocket"
    per_connection: int = 1
    expected: Array | None = None
    tolerance: float = 1e-4
    max_delay_frames: int = 0

    def at(self, url: str) -> "StreamWorkload":
        """Return the same workload for another server."""
        return replace(self, url=url)

    def chunks(self, sound: Array) -> list[bytes]:
        """Return the bytes of the chunks of a sound."""
        frames = self.input.shape[0]
        return [sound[start : start + frames].tobytes() for start in range(0, len(sound), frames)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSenderJob:
    """One process's share of the streams. Times are on the machine's monotonic clock, in seconds.

    Args:
        workload: Server, signals and expected outputs.
        streams: Number of streams.
        start_s: Time at which the first stream is opened.
        open_s: Interval in which all streams are opened.
        measured_from_s: Chunks due from here on count.
        end_s: No chunk is due from here on.
        stragglers_s: Wait for the last results.
        check_every: One of this many streams has its outputs compared.
        seed: Seed of the phases.
        cpus: The cores of the process.
    """

    workload: StreamWorkload
    streams: int
    start_s: float
    open_s: float
    measured_from_s: float
    end_s: float
    stragglers_s: float
    check_every: int
    seed: int
    cpus: frozenset[int] | None

    def phases_s(self) -> Floats:
        """Return the random phase of each stream in a period, `[streams]`."""
        return np.random.default_rng(self.seed).random(self.streams) * self.workload.period_s


def address_of(url: str) -> tuple[str, int]:
    """Return the host and port of a URL or of `"host:port"`.

    Raises:
        BenchError: It has none.
    """
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        host, port = parts.hostname, parts.port or (80 if parts.scheme == "http" else None)
    except ValueError:
        host = port = None
    if host is None or port is None:
        raise BenchError(f"--url is {url!r}; it must be HOST:PORT, or http://HOST:PORT.")
    return host, port


# Opens the stream of a sender with an index, in one protocol.
OpenStream = Callable[["StreamSender", int], "SentStream"]


def send_streams(job: StreamSenderJob, opener: Callable[[StreamSenderJob], OpenStream]) -> StreamLoadResult:
    """Send the streams of a job in this process.

    Args:
        job: The job.
        opener: Serialises the chunks, and returns a function that opens a stream.

    Raises:
        BenchError: The server cannot be reached, or does not speak the protocol.
    """
    return StreamSender(job, opener(job)).run()


@final
class StreamSender(SocketLoop):
    """Sends the streams of a job by the clock.

    Args:
        job: The job.
        open: Opens a stream.

    Attributes:
        due: A heap of the due times of each stream's next chunk.
        ending: Streams that wait for the answer to their end.
        unsent: Writes of chunks that streams on one connection send together.
    """

    def __init__(self, job: StreamSenderJob, open: OpenStream) -> None:
        super().__init__(*address_of(job.workload.url), job.cpus)
        self.job = job
        self._open = open
        self.phases_s: list[float] = job.phases_s().tolist()
        self.due: list[tuple[float, int, SentStream]] = []
        self.latency_s: list[float] = []
        self.offered = self.answered = self.repeated = self.refused = self.opened = self.ending = 0
        self.broken: Counter[str] = Counter()
        self.late_s: list[float] = []
        self.cpu_s = math.nan
        self.all: list[SentStream] = []
        self.unsent: list[Callable[[], None]] = []

    def run(self) -> StreamLoadResult:
        """Open the streams one after the other, send their chunks, and wait for the last results."""
        try:
            self._send_all()
        finally:
            self.close()
        return self._sum()

    def _send_all(self) -> None:
        job = self.job
        time.sleep(max(0.0, job.start_s - time.monotonic()))
        opening = job.open_s / job.streams
        used_s = math.nan
        while (now := time.monotonic()) < job.end_s:
            if math.isnan(used_s) and now >= job.measured_from_s:
                used_s = time.process_time()
            while len(self.all) < job.streams and now >= job.start_s + len(self.all) * opening:
                self.all.append(self._open(self, len(self.all)))
                self.flush()
            if self.due and self.due[0][0] <= now:
                self.send_due(now)
            next_s = self.due[0][0] if self.due else now + MAX_WAIT_S
            self.handle_events(min(next_s, job.end_s) - now)
        self.cpu_s = time.process_time() - used_s
        # What is due before the end goes out before a stream ends, and nothing behind its end.
        self.send_due(time.monotonic())
        self.due.clear()
        for stream in self.all:
            if stream.connected:
                stream.finish()
        given_up_s = time.monotonic() + job.stragglers_s
        while (self.answered < self.offered or self.ending) and time.monotonic() < given_up_s:
            self.handle_events(MAX_WAIT_S)

    def send_due(self, now: float) -> None:
        """Send the chunks that are due by now."""
        due, period_s, end_s = self.due, self.job.workload.period_s, self.job.end_s
        measured_from_s = self.job.measured_from_s
        while due and due[0][0] <= now:
            due_s, index, stream = due[0]
            if not stream.live or stream.sent == stream.chunks or due_s >= end_s:
                heapq.heappop(due)
                continue
            heapq.heapreplace(due, (due_s + period_s, index, stream))
            if due_s >= measured_from_s:
                self.late_s.append(now - due_s)
            stream.send(due_s)
        self.flush()

    def flush(self) -> None:
        """Write what streams on one connection send together."""
        unsent, self.unsent = self.unsent, []
        for write in unsent:
            write()

    def _sum(self) -> StreamLoadResult:
        differences = [stream.difference() for stream in self.all if stream.kept is not None]
        return StreamLoadResult(
            streams=self.job.streams,
            latency_s=np.array(self.latency_s),
            offered=self.offered,
            lost=self.offered - self.answered,
            repeated=self.repeated,
            opened=self.opened,
            refused=self.refused,
            broken=dict(self.broken),
            checked=len(differences),
            difference=float(np.max(differences, initial=0.0)),
            late_s=np.array(self.late_s),
            cpu_s=self.cpu_s,
        )


class SentStream(ABC):
    """A stream: being opened, live, or closed. Subclasses speak one protocol each.

    Args:
        sender: Its sender.
        index: Its number; it selects the sound.

    Attributes:
        which: Index of the sound.
        chunks: Number of chunks of the sound.
        sent: Chunks sent.
        next_result: Number of the chunk whose result is next.
        live: True if chunks may be sent.
        kept: Outputs, if they are compared.
    """

    def __init__(self, sender: StreamSender, index: int) -> None:
        job = sender.job
        self.sender = sender
        self.which = index % len(job.workload.sounds)
        self.chunks = job.workload.sounds.shape[1] // job.workload.input.shape[0]
        self.sent = 0
        self.live = False
        checks = job.workload.expected is not None and index % job.check_every == 0
        self.kept: list[bytes] | None = [] if checks else None
        self._index = index
        self._due_s: dict[int, float] = {}
        self.next_result = 0

    @property
    @abstractmethod
    def connected(self) -> bool:
        """True until its connection, or its part of one, is closed."""

    @abstractmethod
    def close_connection(self) -> None:
        """Close its connection, or its part of one."""

    @abstractmethod
    def send_chunk(self, number: int) -> None:
        """Write the chunk of this number."""

    @abstractmethod
    def finish(self) -> None:
        """End the stream after its last chunk; count it in `sender.ending` if the server answers the end."""

    def send(self, due_s: float) -> None:
        """Send the next chunk."""
        sender = self.sender
        if due_s >= sender.job.measured_from_s:
            sender.offered += 1
            self._due_s[self.sent] = due_s
        number = self.sent
        self.sent += 1
        self.send_chunk(number)

    def begin(self) -> None:
        """Schedule the chunks from now on, at the stream's phase."""
        self.live = True
        sender = self.sender
        heapq.heappush(sender.due, (time.monotonic() + sender.phases_s[self._index], self._index, self))

    def result(self, number: int, output: bytes) -> None:
        """Record the result of a chunk."""
        sender = self.sender
        if number != self.next_result:
            sender.repeated += 1
        self.next_result = number + 1
        due_s = self._due_s.pop(number, None)
        now = time.monotonic()
        if due_s is not None:
            sender.latency_s.append(now - due_s)
            sender.answered += 1
        if self.kept is not None:
            self.kept.append(output)
        # Between results, because a poll may bring hundreds: chunks due meanwhile would go out in a burst.
        if sender.due and sender.due[0][0] <= now:
            sender.send_due(now)

    def rejected(self, reason: str) -> None:
        """Record that the server does not admit the stream."""
        self.sender.refused += 1
        self.lost(reason)

    def lost(self, reason: str) -> None:
        """Record that the stream ended early."""
        if self.connected:
            self.sender.broken[reason] += 1
            self.close()

    def close(self) -> None:
        """Close the connection."""
        self.live = False
        self.close_connection()

    def difference(self) -> float:
        """Return the largest difference of the outputs from the offline ones; infinity if frames are missing."""
        assert self.kept is not None
        return output_difference(self.sender.job.workload, self._index, self.next_result, b"".join(self.kept))


def output_difference(workload: StreamWorkload, index: int, results: int, outputs: bytes) -> float:
    """Return the largest difference of a stream's outputs from the offline ones; infinity if frames are missing.

    Args:
        workload: The workload, with expected outputs.
        index: Number of the stream.
        results: Number of its results.
        outputs: Their bytes, one after the other.
    """
    assert workload.expected is not None
    expected = workload.expected[index % len(workload.sounds)]
    chunks = workload.sounds.shape[1] // workload.input.shape[0]
    given = np.frombuffer(outputs, expected.dtype).reshape(-1, *expected.shape[1:])
    due = results * len(expected) // chunks
    if not due - workload.max_delay_frames <= len(given) <= len(expected):
        return math.inf
    return float(np.abs(given - expected[: len(given)]).max(initial=0.0))
