"""`penstock bench streams`: live streams in real time against a server."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.core.errors import BenchError


def streams(
    bundle: Annotated[
        Path | None, typer.Argument(help="A live application's bundle; its network says what is right.")
    ] = None,
    protocol: Annotated[
        str, typer.Option(help="websocket, or grpc: sequences of the Open Inference Protocol, of any server.")
    ] = "websocket",
    url: Annotated[
        str | None, typer.Option(help="A running server's, HOST:PORT; by default one is started for this.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="What the server at --url calls the model.")] = None,
    rate_hz: Annotated[float | None, typer.Option(help="Without a bundle: frames of the signal in a second.")] = None,
    frames: Annotated[int | None, typer.Option(help="Without a bundle: frames of a chunk.")] = None,
    server: Annotated[str, typer.Option(help="Options of the server that is started, in one string.")] = "",
    count: Annotated[list[int] | None, typer.Option(help="Streams at once; may be given several times.")] = None,
    find: Annotated[bool, typer.Option(help="Search the most streams that keep the budget.")] = False,
    within_ms: Annotated[float, typer.Option(help="The budget, from a chunk's last sample to its result.")] = 50.0,
    percentile: Annotated[float, typer.Option(help="Of the latency, that must be within the budget.")] = 98.0,
    seconds: Annotated[float, typer.Option(help="How long each is measured.")] = 10.0,
    repeat: Annotated[int, typer.Option(help="Repetitions.")] = 1,
    processes: Annotated[int, typer.Option(help="Processes that play.")] = 1,
    cpu: Annotated[str | None, typer.Option(help="The cores that play, 1 or 1,2.")] = None,
    server_cpu: Annotated[str | None, typer.Option(help="The cores of the server that is started.")] = None,
    tolerance: Annotated[float | None, typer.Option(help="Of outputs; the bundle's own by default.")] = None,
    naive: Annotated[bool, typer.Option(help="Beside the same server with one stream a step.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Where a picture of latency against streams goes.")] = None,
    sameness: Annotated[bool, typer.Option(help="Record the outputs' largest difference, not the latency.")] = False,
    figure: Annotated[str | None, typer.Option(help="The id of the target that this answers.")] = None,
    record: Annotated[bool, typer.Option(help="Append the measurement to benchmarks/results.")] = False,
) -> None:
    """Play live streams in real time, each with a phase of its own on a connection of its own, and time every result.

    The streams' outputs are compared with those of the network over the whole signals, where there is a bundle.
    """
    import shlex

    from penstock.bench.stream_figures import Trials, played_as

    if not find and not count:
        raise BenchError("say how many streams by --count, or --find the most.")
    if naive and (url or not find):
        raise BenchError("--naive compares the most that two servers carry; give it with --find and without --url.")
    if sameness and bundle is None:
        raise BenchError("--sameness compares outputs with those of a bundle's network; name the bundle.")
    trials = Trials(
        played=played_as(
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
        cpus=_cores(cpu),
        server_cpus=_cores(server_cpu),
        options=tuple(shlex.split(server)),
        url=url,
        within_ms=within_ms,
        percentile=percentile,
        say=typer.echo,
    )
    line = trials.most(repeat, (count or [64])[0], naive=naive) if find else trials.at(count or [], repeat, sameness)
    if plot is not None:
        typer.echo(f"Curve: {trials.draw(plot)}")
    if record:
        trials.record(line, figure)


def _cores(text: str | None) -> frozenset[int] | None:
    return None if text is None else frozenset(int(core) for core in text.split(","))
