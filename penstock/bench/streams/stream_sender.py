"""One process of the load generator for live streams: chunks in real time over raw sockets.

Each stream sends a chunk at the time of its last sample, independent of the server, and a result's latency counts from
then. Messages are serialised before the run; subclasses of `SentStream` speak one protocol each.
"""

import heapq
import math
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self, final
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from penstock.bench.socket_loop import MAX_WAIT_S, PolledSocket, SocketLoop
from penstock.core.errors import BenchError
from penstock.core.spec import Array, TensorSpec

# n results, s sounds, c chunks of a sound, U frames of outputs

Floats = npt.NDArray[np.float64]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamLoadResult:
    """Outcomes of the chunks that were due during the measurement.

    Args:
        streams: Requested streams.
        latency_s: Latency of each result, `[n]`, from when its chunk was due.
        offered: Chunks due.
        lost: Chunks without a result.
        repeated: Results out of order.
        opened: Admitted streams.
        refused: Rejected streams.
        broken: Streams that ended early, by reason.
        checked: Streams whose outputs were compared.
        difference: Their largest difference from the offline outputs.
        late_s: The largest delay of the generator itself.
        idle: Share of the time in which the generator's cores were idle; NaN where that was not measured.
    """

    streams: int
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
    idle: float = math.nan

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        """Merge the results of several processes."""
        broken: Counter[str] = Counter()
        for part in parts:
            broken.update(part.broken)
        counts = ("streams", "offered", "lost", "repeated", "opened", "refused", "checked")
        return cls(
            **{name: sum(getattr(part, name) for part in parts) for name in counts},
            latency_s=np.concatenate([part.latency_s for part in parts]),
            broken=dict(broken),
            # NaN is kept: Python's max would drop it.
            difference=float(np.max([part.difference for part in parts])),
            late_s=max(part.late_s for part in parts),
        )

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the latency in milliseconds; a lost chunk counts as infinity."""
        kept = np.concatenate([self.latency_s, np.full(self.lost, np.inf)])
        return float(np.percentile(kept, percent, method="higher")) * 1e3 if kept.size else float("inf")

    @property
    def complete(self) -> bool:
        """True if every stream lasted to the end and every chunk has one result."""
        return self.opened == self.streams and not (self.lost or self.repeated or self.broken)


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
    """

    def __init__(self, job: StreamSenderJob, open: OpenStream) -> None:
        super().__init__(*address_of(job.workload.url), job.cpus)
        self.job = job
        self._open = open
        rng = np.random.default_rng(job.seed)
        self.phases_s = (rng.random(job.streams) * job.workload.period_s).tolist()
        self.due: list[tuple[float, int, SentStream]] = []
        self.latency_s: list[float] = []
        self.offered = self.answered = self.repeated = self.refused = self.opened = self.ending = 0
        self.broken: Counter[str] = Counter()
        self.late_s = 0.0
        self.all: list[SentStream] = []

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
        while (now := time.monotonic()) < job.end_s:
            while len(self.all) < job.streams and now >= job.start_s + len(self.all) * opening:
                self.all.append(self._open(self, len(self.all)))
            if self.due and self.due[0][0] <= now:
                self.send_due(now)
            next_s = self.due[0][0] if self.due else now + MAX_WAIT_S
            self.handle_events(min(next_s, job.end_s) - now)
        for stream in self.all:
            if stream.connected:
                stream.finish()
        given_up_s = time.monotonic() + job.stragglers_s
        while (self.answered < self.offered or self.ending) and time.monotonic() < given_up_s:
            self.handle_events(MAX_WAIT_S)

    def send_due(self, now: float) -> None:
        """Send the chunks that are due by now."""
        due, period_s, end_s = self.due, self.job.workload.period_s, self.job.end_s
        while due and due[0][0] <= now:
            due_s, index, stream = due[0]
            if not stream.live or stream.sent == stream.chunks or due_s >= end_s:
                heapq.heappop(due)
                continue
            heapq.heapreplace(due, (due_s + period_s, index, stream))
            self.late_s = max(self.late_s, now - due_s)
            stream.send(due_s)

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
            late_s=self.late_s,
        )


class SentStream(PolledSocket):
    """A stream on its own connection: being opened, live, or closed. Subclasses speak one protocol each.

    Args:
        sender: Its sender.
        index: Its number; it selects the sound.
        first: Bytes sent as soon as the connection is open.

    Attributes:
        which: Index of the sound.
        chunks: Number of chunks of the sound.
        sent: Chunks sent.
        next_result: Number of the chunk whose result is next.
        live: True if chunks may be sent.
        kept: Outputs, if they are compared.
    """

    def __init__(self, sender: StreamSender, index: int, first: bytes) -> None:
        super().__init__(sender, first)
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

    def opened(self) -> None:
        """Do nothing: the first bytes have been sent."""

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
        super().close()

    def difference(self) -> float:
        """Return the largest difference of the outputs from the offline ones; infinity if frames are missing."""
        assert self.kept is not None
        workload = self.sender.job.workload
        assert workload.expected is not None
        expected = workload.expected[self.which]
        given = np.frombuffer(b"".join(self.kept), expected.dtype).reshape(-1, *expected.shape[1:])
        due = self.next_result * len(expected) // self.chunks
        if not due - workload.max_delay_frames <= len(given) <= len(expected):
            return math.inf
        return float(np.abs(given - expected[: len(given)]).max(initial=0.0))
