"""`python -m benchmarks.acceptance soak`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.acceptance.report.results import record_result
from benchmarks.acceptance.server.soak import SoakResult, SoakSettings, run_soak
from penstock.bench.measurement import make_measurement

ID_SOAK = "server.soak_rss_growth"
# A shorter soak does not answer the target.
SOAK_MINUTES = 30


def soak(
    bundle: Annotated[Path, typer.Option(help="The bundle to serve; requests are its golden examples.")],
    minutes: Annotated[float, typer.Option(help="Duration of the load.")] = 30.0,
    load: Annotated[float, typer.Option(help="Offered share of the server's goodput.")] = 0.8,
    rate: Annotated[float | None, typer.Option(help="Requests a second instead, without a search.")] = None,
    frontends: Annotated[int, typer.Option(help="Front-end processes of the server.")] = 2,
    kill_every_s: Annotated[float, typer.Option(help="Seconds between kills.")] = 60.0,
    within_ms: Annotated[float, typer.Option(help="The server's latency budget.")] = 50.0,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals and of the kills.")] = 0,
    record: Annotated[bool, typer.Option("--record", help="Append the measurement to benchmarks/results.")] = False,
) -> None:
    """Serve under load for long, kill its processes in turn, and count lost, wrong and hung requests and memory."""
    settings = SoakSettings(
        bundle=bundle,
        seconds=60 * minutes,
        rate=rate,
        load=load,
        frontends=frontends,
        kill_every_s=kill_every_s,
        budget_ms=within_ms,
        seed=seed,
    )
    result = run_soak(settings, typer.echo)
    _show(result)
    if record:
        line = make_measurement(
            [result.growth],
            id=ID_SOAK if minutes >= SOAK_MINUTES else None,
            workload=f"{minutes:g} minutes of {result.rate:,.0f} requests/s, {frontends} front-ends, clients that come "
            f"and go, {len(result.kills)} processes killed",
            metric="memory (anonymous and shared PSS) of all processes at the end over that after the same warm-up, "
            "minus 1",
            unit="fraction",
        )
        record_result(line, "server")


def _show(result: SoakResult) -> None:
    requests = result.requests
    table = Table("", "requests", title=f"{result.rate:,.0f} requests/s, {len(result.kills)} kills")
    for name, count in {
        "offered": requests.offered,
        "answered": requests.answered,
        "rejected": requests.rejected,
        "lost with a killed front-end": result.lost_by_kills,
        "wrong": requests.wrong,
        "hung": requests.hung,
    }.items():
        table.add_row(name, f"{count:,}")
    console = Console()
    console.print(table)
    table = Table("after warm-up, then at the end", "memory (PSS)", "descriptors", "threads")
    for role, first in result.first.items():
        last = result.last[role]
        table.add_row(
            role,
            f"{first.memory_bytes / 1e6:.1f} MB, {last.memory_bytes / 1e6:.1f} MB",
            f"{first.descriptors}, {last.descriptors}",
            f"{first.threads}, {last.threads}",
        )
    console.print(table)
    console.print(f"memory growth {result.growth:+.2%}, {requests.opened:,} connections opened", highlight=False)
