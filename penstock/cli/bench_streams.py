"""`penstock bench streams`: live streams in real time against a server."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.documented import documented
from penstock.cli.printing import Format
from penstock.core.errors import BenchError

if TYPE_CHECKING:
    from penstock.bench.streams.stream_result import StreamLoadResult


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
    per_connection: int = 1,
    find: bool = False,
    within_ms: float = 50.0,
    percentile: float = 98.0,
    seconds: float = 10.0,
    repeat: int = 1,
    processes: int = 1,
    sender: str = "auto",
    cpu: str | None = None,
    server_cpu: str | None = None,
    tolerance: float | None = None,
    naive: bool = False,
    plot: Path | None = None,
    sameness: bool = False,
    id: str | None = None,
    record: Path | None = None,
    format: Annotated[Format, typer.Option()] = Format.TEXT,
) -> None:
    """Send live streams in real time, each with a random phase, and time every result.

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
        per_connection: Streams on one WebSocket connection; by default each has its own.
        find: Search the most streams that keep the budget.
        within_ms: Latency budget, from a chunk's last sample to its result.
        percentile: Percentile of the latency that must keep it.
        seconds: Duration of each measurement.
        repeat: Repetitions.
        processes: Processes that send.
        sender: compiled, python, or auto: compiled for WebSockets where a C++ compiler is installed.
        cpu: Cores that send, 1 or 1,2.
        server_cpu: Cores of the server that is started.
        tolerance: Tolerance of outputs; by default the bundle's.
        naive: Compare with the same server at one stream a step.
        plot: File for a plot of latency over streams.
        sameness: Record the outputs' largest difference, not the latency.
        id: Id of the recorded measurement.
        record: Append the measurement to this file of JSON lines.
        format: text, or json: a line for each measurement; with --find, for the most streams.
    """
    import shlex
    from dataclasses import replace

    from penstock.bench.compiled_program import COMPILERS
    from penstock.bench.load.generator import parse_cores
    from penstock.bench.measurement import append
    from penstock.bench.streams.compiled_streams import checked_stream_kind
    from penstock.bench.streams.stream_benchmark import StreamBenchmark, workload_for

    def say(sentence: str) -> None:
        typer.echo(sentence, err=format is Format.JSON)

    if not find and not count:
        raise BenchError("give the number of streams by --count, or --find the most.")
    if naive and (url or not find):
        raise BenchError("--naive compares the most that two servers carry; give it with --find and without --url.")
    if sameness and bundle is None:
        raise BenchError("--sameness compares outputs with those of a bundle's network; name the bundle.")
    kind = checked_stream_kind(sender, protocol)
    if sender == "auto" and kind == "python" and protocol == "websocket":
        say(f"None of {', '.join(COMPILERS)} is installed: the sender is Python, which is full at fewer streams.")
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
            per_connection=per_connection,
        ),
        bundle=bundle,
        seconds=seconds,
        processes=processes,
        cpus=parse_cores(cpu, "--cpu"),
        server_cpus=parse_cores(server_cpu, "--server-cpu"),
        options=tuple(shlex.split(server)),
        url=url,
        within_ms=within_ms,
        percentile=percentile,
        say=say,
        sender=kind,
    )
    if find:
        line = benchmark.find_max(repeat, (count or [64])[0], naive=naive)
    else:
        line = benchmark.measure_at(count or [], repeat, sameness)
    if plot is not None:
        say(f"Curve: {benchmark.draw(plot)}")
    if record is not None:
        append(replace(line, id=id), record)
    if format is Format.JSON:
        for result in benchmark.kept:
            typer.echo(json.dumps(result_record(result, within_ms, kind)))


def result_record(result: "StreamLoadResult", within_ms: float, sender: str) -> dict[str, object]:
    """Return a result for programs; a latency that is infinite, because chunks were lost, is null."""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "streams": result.streams,
        "opened": result.opened,
        "refused": result.refused,
        "broken": result.broken,
        "chunks": result.offered,
        "lost": result.lost,
        "late": int((result.latency_s > within_ms / 1e3).sum()),
        "wrong": result.repeated,
        "p50_ms": finite(result.percentile_ms(50)),
        "p98_ms": finite(result.percentile_ms(98)),
        "p99_ms": finite(result.percentile_ms(99)),
        "max_ms": finite(result.percentile_ms(100)),
        "checked": result.checked,
        "difference": finite(result.difference),
        "sender": sender,
        "sender_cpu_s": finite(result.cpu_s),
        "sender_late_p99_ms": result.late_ms(99),
        "sender_late_max_ms": result.late_ms(100),
        "sender_idle": finite(result.idle),
        "held": result.held,
    }
