"""The most live streams on one core of the server, each on its own connection or many on one."""

import os
import tempfile
from pathlib import Path

import typer

from benchmarks.models.write import write_bundle
from penstock.bench.streams.compiled_streams import checked_stream_kind
from penstock.bench.streams.stream_benchmark import StreamBenchmark, workload_for
from penstock.core.errors import BenchError

MODEL = "murmur"
WITHIN_MS, PERCENTILE = 20.0, 99.0
SECONDS, FIRST, REPEAT = 3.0, 512, 3
OPTIONS = ("--device", "cpu", "--frontends", "0", "--latency-ms", f"{WITHIN_MS:g}")


def streams_per_core(per_connection: int) -> list[float]:
    """Return the most streams that keep the budget, one figure for each repetition.

    The server has the first core of this process, the compiled load generator the others.

    Args:
        per_connection: Streams on one connection.

    Raises:
        BenchError: There is one core alone or no C++ compiler, outputs were wrong, or the generator was full.
    """
    sender = checked_stream_kind("compiled", "websocket")
    server_core, others = split_cores()
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_bundle(MODEL, Path(folder) / MODEL).folder
        benchmark = StreamBenchmark(
            workload=workload_for(
                bundle,
                seconds=SECONDS,
                per_connection=per_connection,
            ),
            bundle=bundle,
            seconds=SECONDS,
            processes=max(1, len(others) // 2),
            cpus=others,
            server_cpus=frozenset((server_core,)),
            options=OPTIONS,
            url=None,
            within_ms=WITHIN_MS,
            percentile=PERCENTILE,
            say=typer.echo,
            sender=sender,
        )
        return [benchmark.find_max(1, FIRST, naive=False).median for _ in range(REPEAT)]


def split_cores() -> tuple[int, frozenset[int]]:
    """Return the core of the server and those of the load generator.

    Raises:
        BenchError: There is one core alone.
    """
    server_core, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise BenchError("this figure needs two cores: one for the server, and one for the load generator.")
    return server_core, frozenset(others)
