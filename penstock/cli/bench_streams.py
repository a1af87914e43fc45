"""`penstock bench streams`: live streams in real time against a server."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.core.errors import BenchError


def streams(
    bundle: Annotated[
        Path | None, typer.Argument(help="A live application's bundle; its network gives the expected outputs.")
    ] = None,
    protocol: Annotated[
        str, typer.Option(help="websocket, or grpc: sequences of the Open Inference Protocol, on any server.")
    ] = "websocket",
    url: Annotated[
        str | None, typer.Option(help="Address of a running server, HOST:PORT; by default one is started.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model on the server at --url.")] = None,
    rate_hz: Annotated[float | None, typer.Option(help="Without a bundle: frames a second.")] = None,
    frames: Annotated[int | None, typer.Option(help="Without a bundle: frames a chunk.")] = None,
    server: Annotated[str, typer.Option(help="Options of the server that is started, in one string.")] = "",
    count: Annotated[list[int] | None, typer.Option(help="Number of streams; may be given several times.")] = None,
    find: Annotated[bool, typer.Option(help="Search the most streams that keep the budget.")] = False,
    within_ms: Annotated[float, typer.Option(help="Latency budget, from a chunk's last sample to its result.")] = 50.0,
    percentile: Annotated[float, typer.Option(help="Percentile of the latency that must keep it.")] = 98.0,
    seconds: Annotated[float, typer.Option(help="Duration of each measurement.")] = 10.0,
    repeat: Annotated[int, typer.Option(help="Repetitions.")] = 1,
    processes: Annotated[int, typer.Option(help="Processes that send.")] = 1,
    cpu: Annotated[str | None, typer.Option(help="Cores that send, 1 or 1,2.")] = None,
    server_cpu: Annotated[str | None, typer.Option(help="Cores of the server that is started.")] = None,
    tolerance: Annotated[float | None, typer.Option(help="Tolerance of outputs; by default the bundle's.")] = None,
    naive: Annotated[bool, typer.Option(help="Compare with the same server at one stream a step.")] = False,
    plot: Annotated[Path | None, typer.Option(help="File for a plot of latency over streams.")] = None,
    sameness: Annotated[bool, typer.Option(help="Record the outputs' largest difference, not the latency.")] = False,
    id: Annotated[str | None, typer.Option(help="Id of the recorded measurement.")] = None,
    record: Annotated[Path | None, typer.Option(help="Append the measurement to this file of JSON lines.")] = None,
) -> None:
    """Send live streams in real time, each on its own connection with a random phase, and time every result.

    With a bundle, the outputs are compared with those of the network over the whole signals.
    """
    import shlex

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
        values = benchmark.find_max(repeat, (count or [64])[0], naive=naive)
    else:
        values = benchmark.measure_at(count or [], repeat, sameness)
    if plot is not None:
        typer.echo(f"Curve: {benchmark.draw(plot)}")
    if record is not None:
        append(benchmark.measurement(values, id), record)
