"""`penstock bench`: measurements of a user's own server and machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.bench_feed import feed
from penstock.cli.bench_streams import streams

if TYPE_CHECKING:
    from penstock.bench.load.generator import Load, LoadResult


def register(app: typer.Typer) -> None:
    """Add the commands."""
    bench = typer.Typer(help="Measure a server, live streams, or the reading of examples.", no_args_is_help=True)
    for command in (serve, streams, feed, demo):
        bench.command()(command)
    app.add_typer(bench, name="bench")


def serve(
    url: Annotated[str, typer.Argument(help="Address of the running server, http://127.0.0.1:8000.")],
    bundle: Annotated[Path, typer.Option(help="The bundle that it serves; requests are its golden examples.")],
    rate: Annotated[float | None, typer.Option(help="Open loop: requests a second, as a Poisson process.")] = None,
    connections: Annotated[int | None, typer.Option(help="64 by default, 512 for the open loop.")] = None,
    find_goodput: Annotated[bool, typer.Option(help="Search the highest rate that keeps the budget.")] = False,
    within_ms: Annotated[float, typer.Option(help="Latency budget, from when a request is due.")] = 50.0,
    seconds: Annotated[float, typer.Option(help="Duration of the measurement.")] = 10.0,
    processes: Annotated[int, typer.Option(help="Processes that send.")] = 1,
    cpu: Annotated[str | None, typer.Option(help="Cores that send, 1 or 1,2.")] = None,
    server_cpu: Annotated[str | None, typer.Option(help="The server's cores, for the null server.")] = None,
    body: Annotated[str, typer.Option(help="Request body: raw, json or png.")] = "raw",
    record: Annotated[Path | None, typer.Option(help="Append the measurement to this file of JSON lines.")] = None,
) -> None:
    """Put a load on a server: open loop with --rate, closed loop without, or --find-goodput."""
    from penstock.bench.checked_load import goodput_checked, measure_checked
    from penstock.bench.load.generator import Load, parse_cores
    from penstock.bench.load.golden_target import golden_target
    from penstock.bench.measurement import append, make_measurement

    target = golden_target(url, bundle, body)
    connections = connections or (512 if rate or find_goodput else 64)
    load = Load(rate=rate, connections=connections, seconds=seconds, processes=processes, cpus=parse_cores(cpu))
    if find_goodput:
        value, checked = goodput_checked(target, load, parse_cores(server_cpu), within_ms, typer.echo)
        metric = f"highest Poisson rate with 99% of all requests answered within {within_ms:g} ms"
    else:
        checked = measure_checked(target, load, parse_cores(server_cpu))
        value, metric = checked.result.answered_a_second, "right answers a second"
    _show(checked.result, checked.null_rate, within_ms)
    if record is not None:
        workload = f"{_describe(load)}, body {body}"
        append(make_measurement([value], workload=workload, metric=metric, unit="requests/s"), record)


def demo(
    out: Annotated[Path, typer.Option(help="The run's folder; a run that exists is replaced.")] = Path("runs/demo"),
    epochs: Annotated[float | None, typer.Option(help="A shorter training.")] = None,
    seconds: Annotated[float, typer.Option(help="Duration of each server's measurement.")] = 10.0,
    budget_ms: Annotated[float, typer.Option(help="The latency budget of the servers.")] = 50.0,
) -> None:
    """Train the digits, bundle and serve them, and measure the server beside one with batches of one."""
    from penstock.bench.demo import run_demo

    run_demo(out, epochs=epochs, seconds=seconds, budget_ms=budget_ms)


def _show(result: "LoadResult", null_rate: float, within_ms: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title=_describe(result.load))
    percentiles = " / ".join(f"{result.percentile_ms(percent):.2f}" for percent in (50, 90, 98, 99, 99.9))
    rows = {
        "answered": f"{result.answered_a_second:,.0f}/s",
        f"within {within_ms:g} ms": f"{result.share_within(within_ms):.2%} of {result.offered:,} due",
        "latency p50 / p90 / p98 / p99 / p99.9": f"{percentiles} ms",
        "refused, failed, lost": f"{result.refused:,}, {result.failed:,}, {result.lost:,}",
        "checked against golden": f"{result.checked:,}, all right",
        "the generator's own ceiling": f"{null_rate:,.0f}/s against a server that does nothing",
    }
    for row in rows.items():
        table.add_row(*row)
    Console().print(table)


def _describe(load: "Load") -> str:
    if load.rate is None:
        return f"closed loop, {load.connections} connections, {load.seconds:g} s"
    return f"open loop, {load.rate:,.0f} requests/s offered, {load.connections} connections, {load.seconds:g} s"
