"""Live streams in real time: how many a server carries, how late its results come, and whether they are right."""

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from penstock.bench.client import Floats, meet
from penstock.bench.load import READY_S
from penstock.bench.stream_player import StreamJob, StreamsSent
from penstock.bench.stream_sender import run_stream_job
from penstock.core.application import Application
from penstock.core.errors import BenchError
from penstock.core.live import Live
from penstock.core.spec import Array, TensorSpec

PERCENTILES = (50, 98, 99, 100)
START_AHEAD_S = 0.5
STRAGGLERS_S = 3.0
# Opening a stream takes a server about this long.
OPEN_S = 0.0005
LONGEST_OPENING_S = 12.0
WARM_UP_S = 2.0
SOUNDS = 4
# A late generator measures itself: past this share of the chunk, its latencies are not the server's.
LATE_SHARE = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What the streams send and must get.

    Args:
        url: The server's, or its `"host:port"`.
        model: What it calls the model.
        input: One chunk.
        sounds: `[s, frames]`, as long as a stream plays.
        period_s: From one chunk to the next.
        protocol: Of `PROTOCOLS`.
        expected: `[s, U, ...]`, what the sounds give offline; None to check nothing.
        tolerance: The largest difference of a right output.
        flop_a_second: What the network multiplies and adds for a second of one stream; 0 where there is no GPU.
    """

    url: str
    model: str
    input: TensorSpec
    sounds: Array
    period_s: float
    protocol: str = "websocket"
    expected: Array | None = None
    tolerance: float = 1e-4
    flop_a_second: float = 0.0

    def at(self, url: str) -> "Played":
        """The same against another server."""
        return replace(self, url=url)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamsMeasured:
    """What became of the chunks that were due while it was measured.

    Args:
        streams: How many were asked for.
        latency_s: Of each result, `[n]`, from when its chunk was due.
        offered: Chunks due.
        lost: Never answered.
        repeated: Results out of their order.
        opened: Streams that were taken in.
        refused: Streams that were not.
        broken: Streams that ended early, by why.
        checked: Streams whose outputs were compared.
        difference: The largest difference of theirs from offline.
        late_s: How late the generator itself sent a chunk at most.
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

    def percentile_ms(self, percent: float) -> float:
        """A percentile of the latency in milliseconds; what was lost was never answered."""
        kept = np.concatenate([self.latency_s, np.full(self.lost, np.inf)])
        return float(np.percentile(kept, percent, method="higher")) * 1e3 if kept.size else float("inf")

    @property
    def whole(self) -> bool:
        """Whether every stream was carried to the end and every chunk answered once."""
        return self.opened == self.streams and not (self.lost or self.repeated or self.broken)


def played_for(
    bundle: Path, *, seconds: float, tolerance: float | None, protocol: str = "websocket", model: str | None = None
) -> Played:
    """What streams of a live application's bundle play for so many measured seconds, and must get.

    Args:
        bundle: The folder.
        seconds: How long is measured.
        protocol: Of `PROTOCOLS`.
        model: What the server calls it; by default the application's name.
        tolerance: The largest difference of a right output; by default the bundle's own.

    Raises:
        BenchError: It is not live.
    """
    import torch

    from penstock.runtime.load import load

    predictor = load(bundle)
    application, live = predictor.application, predictor.application.live
    if live is None:
        raise BenchError(f"{application.name} is not live; measure it by penstock bench serve.")
    period_s = live.chunk_s(application.input)
    sounds = sounds_for(application.input, live, seconds + WARM_UP_S + LONGEST_OPENING_S)
    return Played(
        url="",
        model=model or application.name,
        input=application.input,
        sounds=sounds,
        period_s=period_s,
        protocol=protocol,
        expected=predictor.predict(sounds),
        tolerance=predictor.files.golden.tolerance if tolerance is None else tolerance,
        # Counting takes seconds, and is compared with what a GPU can do.
        flop_a_second=_chunk_flop(application, predictor.module, sounds) / period_s
        if torch.cuda.is_available()
        else 0.0,
    )


def _chunk_flop(application: Application, network: Any, sounds: Array) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    from penstock.runtime.load import streaming_executor
    from penstock.runtime.streamed import streamed

    one = streaming_executor(application, network, slots=1, max_rows=1)
    with FlopCounterMode(display=False) as counted:
        streamed(one, sounds[:1, : application.input.shape[0]])
    return counted.get_total_flops()


def sounds_for(input: TensorSpec, live: Live, seconds: float, count: int = SOUNDS, seed: int = 0) -> Array:
    """`[count, frames]` of noise that comes and goes, of so many whole chunks."""
    chunk = input.shape[0]
    frames = int(np.ceil(seconds * live.rate_hz / chunk)) * chunk
    rng = np.random.default_rng(seed)
    swell = np.abs(np.sin(np.arange(frames) * (2 * np.pi / live.rate_hz)))
    shape = (count, frames, *input.shape[1:])
    noise = rng.normal(0, 3000, shape) * swell.reshape(-1, *[1] * (len(shape) - 2))
    return noise.astype(input.dtype)


def measure_streams(
    played: Played,
    streams: int,
    *,
    seconds: float,
    warm_up_s: float = WARM_UP_S,
    processes: int = 1,
    cpus: frozenset[int] | None = None,
    seed: int = 0,
) -> StreamsMeasured:
    """Play so many streams against a server.

    Args:
        played: What they send.
        streams: How many, each with a phase of its own.
        seconds: How long is measured.
        warm_up_s: How long they all play before that.
        processes: Processes that send.
        cpus: The cores on which they run; None for any.
        seed: Of the phases.

    Raises:
        BenchError: Outputs were wrong, or the generator itself was late.
    """
    context = multiprocessing.get_context("spawn")
    everybody = context.Barrier(processes + 1)
    open_s = min(max(1.0, OPEN_S * streams), LONGEST_OPENING_S)
    with ProcessPoolExecutor(processes, context, initializer=meet, initargs=(everybody,)) as pool:
        for _ in range(processes):
            pool.submit(abs, 0)  # a process is started when there is something to do
        everybody.wait(READY_S)
        start_s = time.monotonic() + START_AHEAD_S
        measured_from_s = start_s + open_s + warm_up_s
        jobs = [
            _job(
                played,
                streams=streams // processes + (process < streams % processes),
                start_s=start_s,
                open_s=open_s,
                measured_from_s=measured_from_s,
                end_s=measured_from_s + seconds,
                seed=seed * 1000 + process,
                cpus=cpus,
                check_every=max(1, streams // processes // 8),
            )
            for process in range(min(processes, streams))
        ]
        sent = list(pool.map(partial(run_stream_job, protocol=played.protocol), jobs))
    measured = _summed(streams, sent)
    if not measured.difference <= played.tolerance:
        raise BenchError(
            f"outputs of {measured.checked:,} streams differ from the offline ones by up to {measured.difference:.3g}, "
            f"allowed is {played.tolerance:.3g}; a wrong answer has no speed."
        )
    return measured


def most_streams(
    play: Callable[[int], StreamsMeasured],
    *,
    budget_ms: float,
    percent: float,
    first: int,
    most: int,
    say: Callable[[str], None],
) -> tuple[int, list[StreamsMeasured]]:
    """The most streams that are carried whole with a percentile of the latency within a budget, to within 4%.

    Args:
        play: Measures so many streams.
        budget_ms: The budget in milliseconds.
        percent: The percentile.
        first: Where to begin.
        most: No more than so many are tried.
        say: Called with a sentence after each trial.

    Returns:
        How many, 0 where not even a hundredth of the first is carried, and every trial.
    """
    low, high, trials = 0, most + 1, list[StreamsMeasured]()
    count = min(first, most)
    while count > low and high - low > max(1, 0.04 * high):
        trial = play(count)
        trials.append(trial)
        kept = trial.whole and trial.percentile_ms(percent) <= budget_ms
        say(described(trial))
        low, high = (count, high) if kept else (low, count)
        if high < first / 100:
            break
        count = min(2 * low, most) if high > most else (low + high) // 2
        if low == most:
            break
    return low, trials


def described(measured: StreamsMeasured) -> str:
    """One sentence."""
    times = ", ".join(f"p{percent:g} {measured.percentile_ms(percent):.1f}" for percent in PERCENTILES)
    faults = [
        f"{count:,} {what}"
        for what, count in (
            ("refused", measured.refused),
            ("chunks lost", measured.lost),
            ("out of order", measured.repeated),
            *(Counter(measured.broken).most_common(2)),
        )
        if count
    ]
    return f"{measured.streams:,} streams: {times} ms" + (f"; {', '.join(faults)}" if faults else "")


def address_of(url: str) -> tuple[str, int]:
    """The host and port of a URL or of `"host:port"`.

    Raises:
        BenchError: It names none.
    """
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        host, port = parts.hostname, parts.port or (80 if parts.scheme == "http" else None)
    except ValueError:
        host = port = None
    if host is None or port is None:
        raise BenchError(f"--url is {url!r}; it must be HOST:PORT, or http://HOST:PORT.")
    return host, port


def _job(played: Played, **fields: object) -> StreamJob:
    host, port = address_of(played.url)
    return StreamJob(
        host=host,
        port=port,
        model=played.model,
        input=played.input,
        sounds=played.sounds,
        period_s=played.period_s,
        stragglers_s=STRAGGLERS_S,
        expected=played.expected,
        **fields,  # pyright: ignore[reportArgumentType]
    )


def _summed(streams: int, parts: list[StreamsSent]) -> StreamsMeasured:
    broken: Counter[str] = Counter()
    for part in parts:
        broken.update(part.broken)
    return StreamsMeasured(
        streams=streams,
        latency_s=np.concatenate([part.latency_s for part in parts]),
        offered=sum(part.offered for part in parts),
        lost=sum(part.lost for part in parts),
        repeated=sum(part.repeated for part in parts),
        opened=sum(part.opened for part in parts),
        refused=sum(part.refused for part in parts),
        broken=dict(broken),
        checked=sum(part.checked for part in parts),
        difference=max(part.difference for part in parts),
        late_s=max(part.late_s for part in parts),
    )
