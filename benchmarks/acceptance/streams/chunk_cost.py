"""Processor time of the server for a chunk of live streams, at a number of streams that it carries."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.acceptance.streams.core_capacity import MODEL, OPTIONS, WITHIN_MS, split_cores
from benchmarks.models.write import write_bundle
from penstock.bench.server_process import ServerProcess, cpu_seconds, running_server
from penstock.bench.streams.compiled_streams import checked_stream_kind
from penstock.bench.streams.stream_benchmark import StreamBenchmark, workload_for
from penstock.bench.streams.stream_generator import describe
from penstock.core.errors import BenchError

STREAMS = 384

Say = Callable[[str], None]


def chunk_us(repeat: int, seconds: float, say: Say, bundle: Path | None = None, per_connection: int = 1) -> list[float]:
    """Return the user and system time of the server for a chunk in microseconds, for each repetition.

    The server has the first core of this process, the compiled load generator the others.

    Args:
        repeat: Repetitions, each with all streams opened anew.
        seconds: Duration of each.
        say: Called with a sentence for each repetition.
        bundle: The live application's bundle; None for `murmur`.
        per_connection: Streams on one connection.

    Raises:
        BenchError: There is one core alone or no C++ compiler, not every chunk was answered rightly, or the generator
            was full.
    """
    sender = checked_stream_kind("compiled", "websocket")
    server_core, others = split_cores()
    with tempfile.TemporaryDirectory() as folder:
        served = bundle or write_bundle(MODEL, Path(folder) / MODEL).folder
        workload = workload_for(
            served,
            seconds=seconds,
            per_connection=per_connection,
        )
        benchmark = StreamBenchmark(
            workload=workload,
            bundle=served,
            seconds=seconds,
            processes=1,
            cpus=others,
            server_cpus=frozenset((server_core,)),
            options=OPTIONS,
            url=None,
            within_ms=WITHIN_MS,
            percentile=99.0,
            say=say,
            sender=sender,
        )
        with running_server(served, OPTIONS, cpus=frozenset((server_core,))) as server:
            return [_chunk_us(benchmark, server, say) for _ in range(repeat)]


def _chunk_us(benchmark: StreamBenchmark, server: ServerProcess, say: Say) -> float:
    result = benchmark.measure(server, STREAMS, lambda: cpu_seconds(server.process.pid))
    if not result.complete:
        raise BenchError(f"not every stream was carried: {describe(result)}")
    benchmark.kept.append(result)
    benchmark.check_generator()
    cost_us = result.counted * 1e6 / result.offered
    say(f"{cost_us:.1f} us a chunk; the server's core was busy for {result.counted / benchmark.seconds:.0%}")
    return cost_us
