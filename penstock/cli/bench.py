"""`penstock bench`: measurements of a user's own server and machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.bench_capacity import capacity
from penstock.cli.bench_faults import chaos, isolation
from penstock.cli.bench_feed import feed
from penstock.cli.bench_streams import streams
from penstock.cli.documented import documented
from penstock.cli.printing import print_rows
from penstock.cli.usage_errors import CommandGroup
from penstock.core.errors import BenchError

if TYPE_CHECKING:
    from penstock.bench.load.generator import Load, LoadResult


@documented
def serve(
    url: str,
    bundle: Annotated[list[Path], typer.Option()],
    chain: Annotated[str | None, typer.Option(metavar="CHAIN.py")] = None,
    rate: float | None = None,
    connections: int | None = None,
    find_goodput: bool = False,
    within_ms: float = 50.0,
    seconds: float = 10.0,
    processes: int = 1,
    sender: str = "auto",
    cpu: str | None = None,
    server_cpu: str | None = None,
    body: str = "raw",
    record: Path | None = None,
) -> None:
    """Put a load on a server: open loop with --rate, closed loop without, or --find-goodput.

    Args:
        url: Address of the running server, http://127.0.0.1:8000.
        bundle: The bundle that it serves; requests are its golden examples. Of a chain, each part's.
        chain: The chain to send requests to; they are examples of its first part.
        rate: Open loop: requests a second, as a Poisson process.
        connections: 64 by default, 512 for the open loop.
        find_goodput: Search the highest rate that keeps the budget.
        within_ms: Latency budget, from when a request is due.
        seconds: Duration of the measurement.
        processes: Processes that send.
        sender: compiled, python, or auto: compiled where a C++ compiler is installed. The first use builds it.
        cpu: Cores that send, 1 or 1,2.
        server_cpu: The server's cores, for the null server.
        body: Request body: raw, json or png.
        record: Append the measurement to this file of JSON lines.
    """
    from penstock.bench.checked_load import goodput_checked, measure_checked
    from penstock.bench.compiled_program import checked_kind
    from penstock.bench.load.generator import Load, parse_cores
    from penstock.bench.load.golden_target import chain_target, golden_target
    from penstock.bench.measurement import append, make_measurement

    if chain is None and len(bundle) > 1:
        raise BenchError(f"--bundle is given {len(bundle)} times; name one, or --chain for a chain of them.")
    load = Load(
        rate=rate,
        connections=(512 if rate or find_goodput else 64) if connections is None else connections,
        seconds=seconds,
        processes=processes,
        cpus=parse_cores(cpu, "--cpu"),
        sender=checked_kind(sender),
    )
    server_cores = parse_cores(server_cpu, "--server-cpu")
    target = golden_target(url, bundle[0], body) if chain is None else chain_target(url, chain, bundle, body)
    if find_goodput:
        value, checked = goodput_checked(target, load, server_cores, within_ms, typer.echo)
        metric = f"highest Poisson rate with 99% of all requests answered within {within_ms:g} ms"
    else:
        checked = measure_checked(target, load, server_cores)
        value, metric = checked.result.answered_a_second, "right answers a second"
    _show(checked.result, checked.null_rate, within_ms)
    if record is not None:
        workload = f"{_describe(load)}, body {body}"
        append(make_measurement([value], workload=workload, metric=metric, unit="requests/s"), record)


@documented
def demo(
    out: Path = Path("runs/demo"),
    epochs: float | None = None,
    seconds: Annotated[float, typer.Option(min=0.1)] = 10.0,
    budget_ms: Annotated[float, typer.Option(min=0.1)] = 50.0,
) -> None:
    """Train the digits, bundle and serve them, and measure the server beside one with batches of one.

    Args:
        out: The run's folder; a run that exists is replaced.
        epochs: A shorter training.
        seconds: Duration of each server's measurement.
        budget_ms: The latency budget of the servers.
    """
    from penstock.bench.demo import run_demo

    run_demo(out, epochs=epochs, seconds=seconds, budget_ms=budget_ms)


def _show(result: "LoadResult", null_rate: float, within_ms: float) -> None:
    percentiles = " / ".join(f"{result.percentile_ms(percent):.2f}" for percent in (50, 90, 98, 99, 99.9))
    rows = {
        "answered": f"{result.answered_a_second:,.0f}/s",
        f"within {within_ms:g} ms": f"{result.share_within(within_ms):.2%} of {result.offered:,} due",
        "latency p50 / p90 / p98 / p99 / p99.9": f"{percentiles} ms",
        "refused, failed, lost": f"{result.refused:,}, {result.failed:,}, {result.lost:,}",
        "checked against golden": f"{result.checked:,}, all right",
        "the generator's own ceiling": f"{null_rate:,.0f}/s against a server that does nothing, {result.load.sender}",
    }
    print_rows(rows, title=_describe(result.load))


def _describe(load: "Load") -> str:
    if load.rate is None:
        return f"closed loop, {load.connections} connections, {load.seconds:g} s"
    return f"open loop, {load.rate:,.0f} requests/s offered, {load.connections} connections, {load.seconds:g} s"


commands = typer.Typer(
    cls=CommandGroup,
    help="Measure a server, its isolation and recovery, live streams, the reading of examples, or simulate a fleet.",
    no_args_is_help=True,
)
for command in (serve, streams, isolation, chaos, feed, demo, capacity):
    commands.command()(command)
