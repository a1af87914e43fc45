"""Live streams of one GPU: latency at many of them, and what a chunk costs the front-ends."""

import os
import tempfile
from functools import cache
from pathlib import Path

from benchmarks.models.write import write_bundle
from penstock.bench.process_usage import worker_pids
from penstock.bench.server_process import ServerProcess, cpu_seconds, running_server
from penstock.bench.streams.compiled_streams import checked_stream_kind
from penstock.bench.streams.stream_benchmark import StreamBenchmark, workload_for
from penstock.bench.streams.stream_generator import describe
from penstock.core.errors import BenchError

MODEL = "speech"
STREAMS, REPEAT, SECONDS = 10_000, 3, 8.0
PERCENTILE, WITHIN_MS = 98.0, 50.0
# bf16 against the golden answers of fp32.
TOLERANCE = 0.1
# Of the cores, those that send.
SENDING = 4


def p98_ms() -> list[float]:
    """Return the 98th percentile of the latency, for each repetition.

    Raises:
        BenchError: A stream was not carried whole, or the generator's cores were idle for less than a fifth.
    """
    return [latency_ms for latency_ms, _ in _measured()]


def frontend_us() -> list[float]:
    """Return the processor time of all front-ends for a chunk in microseconds, for each repetition.

    Raises:
        BenchError: See `p98_ms`.
    """
    return [cost_us for _, cost_us in _measured()]


@cache
def _measured() -> tuple[tuple[float, float], ...]:
    """Measure once for both figures of a run."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 * SENDING:
        raise BenchError(f"{2 * SENDING} cores are needed; this process has {len(cores)}.")
    serving, sending = frozenset(cores[:-SENDING]), frozenset(cores[-SENDING:])
    # An engine has a core of its own.
    options = ("--device", "cuda", "--precision", "bf16", "--frontends", str(len(serving) - 2))
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_bundle(MODEL, Path(folder) / MODEL).folder
        benchmark = StreamBenchmark(
            workload=workload_for(
                bundle,
                seconds=SECONDS,
                tolerance=TOLERANCE,
            ),
            bundle=bundle,
            seconds=SECONDS,
            processes=SENDING,
            cpus=sending,
            server_cpus=serving,
            options=options,
            url=None,
            within_ms=WITHIN_MS,
            percentile=PERCENTILE,
            say=lambda said: print(said, flush=True),
            sender=checked_stream_kind("compiled", "websocket"),
        )
        with running_server(bundle, options, cpus=serving) as server:
            return tuple(_once(benchmark, server) for _ in range(REPEAT))


def _once(benchmark: StreamBenchmark, server: ServerProcess) -> tuple[float, float]:
    roles = worker_pids(server.process.pid).items()
    front_ends = [process for role, process in roles if role.startswith("front-end")]
    result = benchmark.measure(server, STREAMS, lambda: sum(map(cpu_seconds, front_ends)))
    if not result.complete:
        raise BenchError(f"not every stream was carried: {describe(result)}")
    benchmark.kept.append(result)
    benchmark.check_generator()
    cost_us = result.counted * 1e6 / result.offered
    print(f"{cost_us:.1f} us of the front-ends a chunk", flush=True)
    return result.percentile_ms(PERCENTILE), cost_us
