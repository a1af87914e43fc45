"""`penstock bench streams`: live streams in real time against a server."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.documented import documented
from penstock.core.errors import BenchError


@documented
def streams(
    bundle: Annotated[Path | None, typer.Argument()] = None,
    protocol: str = "websocket",
    url: str | None = None,
    model: str | None = None,
    rate_hz: float | None = None,
    frames: int | None = None,
    server: str = "",
    count: list[int] | None = None,
    find: bool = False,
    within_ms: float = 50.0,
    percentile: float = 98.0,
    seconds: float = 10.0,
    repeat: int = 1,
    processes: int = 1,
    cpu: str | None = None,
    server_cpu: str | None = None,
    tolerance: float | None = None,
    naive: bool = False,
    plot: Path | None = None,
    sameness: bool = False,
    id: str | None = None,
    record: Path | None = None,
) -> None:
    """Send live streams in real time, each on its own connection with a random phase, and time every result.

    With a bundle, the outputs are compared with those of the network over the whole signals.

    Args:
        bundle: A live application's bundle; its network gives the expected outputs.
        protocol: websocket, or grpc: sequences of the Open Inference Protocol, on any server.
        url: Address of a running server, HOST:PORT; by default one is started.
        model: Name of the model on the server at --url.
        rate_hz: Without a bundle: frames a second.
        frames: Without a bundle: frames a chunk.
        server: Options of the server that is started, in one string.
        count: Number of streams; may be given several times.
        find: Search the most streams that keep the budget.
        within_ms: Latency budget, from a chunk's last sample to its result.
        percentile: Percentile of the latency that must keep it.
        seconds: Duration of each measurement.
        repeat: Repetitions.
        processes: Processes that send.
        cpu: Cores that send, 1 or 1,2.
        server_cpu: Cores of the server that is started.
        tolerance: Tolerance of outputs; by default the bundle's.
        naive: Compare with the same server at one stream a step.
        plot: File for a plot of latency over streams.
        sameness: Record the outputs' largest difference, not the latency.
        id: Id of the recorded measurement.
        record: Append the measurement to this file of JSON lines.
    """
    import shlex
    from dataclasses import replace

    from penstock.bench.load.generator import parse_cores
    from penstock.bench.measurement import append
    from penstock.bench.streams.stream_benchmark import StreamBenchmark, workload_for

    if not find and not count:
        raise BenchError("give the number of streams by --count, or --find the most.")
    if naive and (url or not find):
        raise BenchError("--naive compares the most that two servers carry; give it with --find and without --url.")
    if sameness and bundle is None:
        raise BenchError("--sameness compares outputs with those of a bundle's network; name the bundle.")
    benchmark = StreamBenchmark(
        workload=workload_for(
            bundle,
            protocol=protocol,
            url=url,
            model=model,
            rate_hz=rate_hz,
            frames=frames,
            seconds=seconds,
            tolerance=tolerance,
        ),
        bundle=bundle,
        seconds=seconds,
        processes=processes,
        cpus=parse_cores(cpu),
        server_cpus=parse_cores(server_cpu),
        options=tuple(shlex.split(server)),
        url=url,
        within_ms=within_ms,
        percentile=percentile,
        say=typer.echo,
    )
    if find:
        line = benchmark.find_max(repeat, (count or [64])[0], naive=naive)
    else:
        line = benchmark.measure_at(count or [], repeat, sameness)
    if plot is not None:
        typer.echo(f"Curve: {benchmark.draw(plot)}")
    if record is not None:
        benchmark.check_idle()
        append(replace(line, id=id), record)
