"""A load of live streams in real time: latency of results, rejected and broken streams, and checked outputs."""

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.bench.compiled_program import SenderKind
from penstock.bench.core_load import CoreLoad
from penstock.bench.load.sender import sender_pool
from penstock.bench.streams.compiled_streams import (
    checked_stream_kind,
    compiled_result,
    running_streams,
    stream_program,
)
from penstock.bench.streams.shared_websocket import open_shared
from penstock.bench.streams.stream_result import StreamLoadResult
from penstock.bench.streams.stream_sender import StreamSenderJob, StreamWorkload, send_streams
from penstock.bench.streams.websocket_stream import open_websockets
from penstock.core.errors import BenchError
from penstock.core.spec import Array, TensorSpec
from penstock.core.streams.live import Live

PERCENTILES = (50, 98, 99, 100)
PROTOCOLS = ("websocket", "grpc")
START_AHEAD_S = 0.5
STRAGGLERS_S = 3.0
# A server takes about this long to open a stream.
OPEN_S = 0.0005
MAX_OPENING_S = 12.0
WARM_UP_S = 2.0
SOUNDS = 4
# With less, the delays of the load generator are part of a figure; likewise where it sends chunks later than this share
# of the budget, or than the compiled sender may gather them.
MIN_IDLE = 0.2
MAX_LATE = 0.05
LEAST_LATE_MS = 0.5
LATE_PERCENT = 99.0


def bundle_workload(
    bundle: Path, *, seconds: float, tolerance: float | None, protocol: str = "websocket", model: str | None = None
) -> StreamWorkload:
    """Make a workload with expected outputs from a live application's bundle.

    Args:
        bundle: The bundle's folder.
        seconds: Duration of the measurement.
        protocol: One of `PROTOCOLS`.
        model: The model's name on the server; by default the application's name.
        tolerance: The largest difference of a right output; by default the bundle's own.

    Raises:
        BenchError: The application is not live.
    """
    from penstock.runtime.load import load

    predictor = load(bundle)
    application, live = predictor.application, predictor.application.live
    if live is None:
        raise BenchError(f"{application.name} is not live; measure it by penstock bench serve.")
    sounds = sounds_for(application.input_tensor, live, seconds + WARM_UP_S + MAX_OPENING_S)
    return StreamWorkload(
        url="",
        model=model or application.name,
        input=application.input_tensor,
        sounds=sounds,
        period_s=live.chunk_s(application.input_tensor),
        protocol=protocol,
        expected=predictor.predict(sounds),
        tolerance=predictor.files.golden.tolerance if tolerance is None else tolerance,
        # A stream's last chunk gives all delayed frames, so there are no more than one output has; as many again for
        # windows that reach over its beginning.
        max_delay_frames=2 * application.output_tensor.shape[0],
    )


def sounds_for(input: TensorSpec, live: Live, seconds: float, count: int = SOUNDS, seed: int = 0) -> Array:
    """Return noise of varying loudness, `[count, frames]`, in whole chunks."""
    chunk = input.shape[0]
    frames = int(np.ceil(seconds * live.rate_hz / chunk)) * chunk
    rng = np.random.default_rng(seed)
    swell = np.abs(np.sin(np.arange(frames) * (2 * np.pi / live.rate_hz)))
    shape = (count, frames, *input.shape[1:])
    noise = rng.normal(0, 3000, shape) * swell.reshape(-1, *[1] * (len(shape) - 2))
    return noise.astype(input.dtype)


def measure_streams(
    workload: StreamWorkload,
    streams: int,
    *,
    seconds: float,
    warm_up_s: float = WARM_UP_S,
    processes: int = 1,
    cpus: frozenset[int] | None = None,
    seed: int = 0,
    sender: SenderKind = "python",
    counter: Callable[[], float] | None = None,
) -> StreamLoadResult:
    """Send streams to a server in real time.

    Args:
        workload: Signals and expected outputs.
        streams: Number of streams, each with a random phase.
        seconds: Duration of the measurement.
        warm_up_s: Duration of all streams before it.
        processes: Processes that send.
        cpus: Their cores; None for any.
        seed: Seed of the phases.
        sender: `"python"`, `"compiled"`, or `"auto"`: compiled where a C++ compiler is installed and can send these.
        counter: Read at the begin and at the end of the measurement; the result has the difference.

    Raises:
        BenchError: Outputs were wrong.
    """
    open_s = min(max(1.0, OPEN_S * streams), MAX_OPENING_S)
    program = stream_program(checked_stream_kind(sender, workload.protocol))
    with ExitStack() as stack:
        pool = stack.enter_context(sender_pool(processes)) if program is None else None
        start_s = time.monotonic() + START_AHEAD_S
        measured_from_s = start_s + open_s + warm_up_s
        jobs = [
            StreamSenderJob(
                workload=workload,
                streams=streams // processes + (process < streams % processes),
                start_s=start_s,
                open_s=open_s,
                measured_from_s=measured_from_s,
                end_s=measured_from_s + seconds,
                stragglers_s=STRAGGLERS_S,
                seed=seed * 1000 + process,
                cpus=cpus,
                check_every=max(1, streams // processes // 8),
            )
            for process in range(min(processes, streams))
        ]
        if program is not None:
            running = [(job, stack.enter_context(running_streams(program, job))) for job in jobs]
            parts = (compiled_result(job, process) for job, process in running)
        else:
            assert pool is not None
            parts = pool.map(send_job, jobs)
        time.sleep(max(0.0, measured_from_s - time.monotonic()))
        load, count = CoreLoad(cpus), counter() if counter else 0.0
        time.sleep(max(0.0, measured_from_s + seconds - time.monotonic()))
        idle, counted = load.idle_share(), counter() - count if counter else 0.0
        result = replace(StreamLoadResult.merge(list(parts)), idle=idle, counted=counted)
    if not result.difference <= workload.tolerance:
        raise BenchError(
            f"outputs of {result.checked:,} streams differ from the offline ones by up to {result.difference:.3g}, "
            f"allowed is {workload.tolerance:.3g}; a wrong answer has no speed."
        )
    return result


def send_job(job: StreamSenderJob) -> StreamLoadResult:
    """Send the streams of a job in this process."""
    if job.workload.protocol == "websocket":
        return send_streams(job, open_websockets if job.workload.per_connection == 1 else open_shared)
    # Imported only here, because WebSockets do not need the packages of penstock-nn[grpc].
    from penstock.bench.streams.grpc_stream import open_sequences

    return send_streams(job, open_sequences)


def find_max_streams(
    measure: Callable[[int], StreamLoadResult], *, budget_ms: float, percent: float, first: int, limit: int
) -> int:
    """Search the largest number of complete streams with a latency percentile within a budget, to within 4%.

    Args:
        measure: Measures a number of streams.
        budget_ms: The budget in milliseconds.
        percent: The percentile.
        first: The first number to try.
        limit: The largest number to try.

    Returns:
        The number, 0 if even a hundredth of `first` fails.
    """
    low, high = 0, limit + 1
    count = min(first, limit)
    while count > low and high - low > max(1, 0.04 * high) and high >= first / 100:
        trial = measure(count)
        kept = trial.complete and trial.percentile_ms(percent) <= budget_ms
        low, high = (count, high) if kept else (low, count)
        count = min(2 * low, limit) if high > limit else (low + high) // 2
    return low


def describe(result: StreamLoadResult) -> str:
    """Describe a result in one sentence."""
    times = ", ".join(f"p{percent:g} {result.percentile_ms(percent):.1f}" for percent in PERCENTILES)
    faults = [
        f"{count:,} {what}"
        for what, count in (
            ("not opened", result.streams - result.opened),
            ("refused", result.refused),
            ("chunks lost", result.lost),
            ("out of order", result.repeated),
            *(Counter(result.broken).most_common(2)),
        )
        if count
    ]
    own = [] if math.isnan(result.cpu_s) else [f"it sent {result.late_ms(LATE_PERCENT):.2f} ms late (p99)"]
    if result.idle < MIN_IDLE:
        own.insert(0, f"the generator's cores were idle for {result.idle:.0%} alone: its own delays may be in this")
    elif result.idle >= MIN_IDLE:
        own.insert(0, f"the generator's cores were idle for {result.idle:.0%}")
    faults += own
    return f"{result.streams:,} streams: {times} ms" + (f"; {', '.join(faults)}" if faults else "")
