"""`penstock bench`: measurements that can be repeated."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.bench_device import device
from penstock.cli.bench_feed import feed
from penstock.cli.bench_streams import streams
from penstock.cli.bench_train import train

if TYPE_CHECKING:
    from penstock.bench.load import Load, Measured
    from penstock.bench.soak import Soaked

# The targets that these commands answer.
ID_SOAK = "server.soak_rss_growth"
# A shorter soak is no answer to it.
SOAK_MINUTES = 30


def register(app: typer.Typer) -> None:
    """Add the commands."""
    bench = typer.Typer(help="Measure, and keep what was measured as data.", no_args_is_help=True)
    bench.command()(serve)
    bench.command()(scheduler)
    bench.command()(report)
    bench.command()(foundation)
    bench.command()(server)
    bench.command()(live)
    bench.command()(streams)
    bench.command()(training)
    bench.command()(train)
    bench.command()(device)
    bench.command()(soak)
    bench.command()(feed)
    app.add_typer(bench, name="bench")


def serve(
    url: Annotated[str, typer.Argument(help="The running server's, http://127.0.0.1:8000.")],
    bundle: Annotated[Path, typer.Option(help="The bundle that it serves: its golden examples are asked and checked.")],
    rate: Annotated[float | None, typer.Option(help="Open loop: requests a second, at random moments.")] = None,
    connections: Annotated[
        int | None, typer.Option(help="64 for the closed loop; what the rate needs otherwise.")
    ] = None,
    find_goodput: Annotated[bool, typer.Option(help="Search the highest rate that is kept within the budget.")] = False,
    within_ms: Annotated[float, typer.Option(help="The latency budget, from when a request is due.")] = 50.0,
    seconds: Annotated[float, typer.Option(help="How long is measured.")] = 10.0,
    processes: Annotated[int, typer.Option(help="Processes that send.")] = 1,
    cpu: Annotated[str | None, typer.Option(help="The cores that send, 1 or 1,2.")] = None,
    server_cpu: Annotated[str | None, typer.Option(help="The server's cores, for the null server.")] = None,
    body: Annotated[str, typer.Option(help="How an example is sent: raw, json or png.")] = "raw",
    record: Annotated[bool, typer.Option(help="Append the measurement to benchmarks/results.")] = False,
) -> None:
    """Put a load on a server: open loop with --rate, closed loop without, or --find-goodput."""
    from penstock.bench.load import Load
    from penstock.bench.results import append, line_of
    from penstock.bench.serve import goodput_checked, measure_checked
    from penstock.bench.target import golden_target

    target = golden_target(url, bundle, body)
    connections = connections or (512 if rate or find_goodput else 64)
    load = Load(rate=rate, connections=connections, seconds=seconds, processes=processes, cpus=_cores(cpu))
    if find_goodput:
        best, verdict = goodput_checked(target, load, _cores(server_cpu), within_ms, typer.echo)
        value, metric = best, f"highest Poisson rate with 99% of all requests answered within {within_ms:g} ms"
    else:
        verdict = measure_checked(target, load, _cores(server_cpu))
        value, metric = verdict.measured.answered_a_second, "right answers a second"
    _show(verdict.measured, verdict.null_rate, within_ms)
    if record:
        workload = f"{_described(load)}, body {body}"
        append(line_of([value], id=None, workload=workload, metric=metric, unit="requests/s"), "serve")


def scheduler(
    trace: Annotated[list[Path] | None, typer.Option(help="A recorded trace: CSV of arrival_s,budget_ms.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where the curves go; docs/assets by default.")] = None,
    record: Annotated[bool, typer.Option(help="Append the measurement to benchmarks/results.")] = False,
) -> None:
    """Simulate the scheduler beside fixed-delay batching, batch-when-idle and an optimum that knows the future."""
    from rich.console import Console
    from rich.table import Table

    from penstock.bench.scheduler import PICTURE, draw, overall, simulate
    from penstock.bench.scheduler import record as record_line
    from penstock.bench.simulation import POLICIES

    points = simulate(trace or [], lambda sentence: typer.echo(f"Simulating {sentence}"))
    table = Table("machine", "trace", "load", *POLICIES, "optimum", title="Answered in time, of all requests")
    for point in points:
        shares = [f"{point.kept[name] / point.offered:.1%}" for name in POLICIES]
        best = "-" if point.optimum is None else f"{point.optimum / point.offered:.1%}"
        table.add_row(point.machine, point.trace, f"{point.load:g}", *shares, best)
    console = Console()
    console.print(table)
    for name, share in overall(points).items():
        console.print(f"{name}: {share:.1%} of the optimum over all traces and loads", highlight=False)
    console.print(f"Curves: {draw(points, picture or PICTURE)}", soft_wrap=True, highlight=False)
    if record:
        record_line(points)


def report(
    check: Annotated[bool, typer.Option(help="Exit with status 1 when something asked for falls short.")] = False,
    issue: Annotated[str | None, typer.Option(help="Only the targets of this group.")] = None,
) -> None:
    """Print what is asked beside what was last measured, and write docs/performance.md."""
    from penstock.bench.report import report as write_report

    short = write_report(issue)
    if check and short:
        typer.echo(f"Short of what is asked: {', '.join(short)}.", err=True)
        raise typer.Exit(1)


def foundation(
    only: Annotated[list[str] | None, typer.Option(help="A figure's id; may be given several times.")] = None,
    record: Annotated[bool, typer.Option(help="Append the measurements to benchmarks/results.")] = False,
) -> None:
    """Measure the figures of the foundation: the demo, digits, imports, start-up, the tick, resuming."""
    from penstock.bench.figures import FOUNDATION, measure_figures

    measure_figures(FOUNDATION, "foundation", only or [], record=record, say=typer.echo)


def server(
    only: Annotated[list[str] | None, typer.Option(help="A figure's id; may be given several times.")] = None,
    record: Annotated[bool, typer.Option(help="Append the measurements to benchmarks/results.")] = False,
) -> None:
    """Measure the server's figures that need no peer: accepted requests lost when it drains."""
    from penstock.bench.figures import SERVER, measure_figures

    measure_figures(SERVER, "server", only or [], record=record, say=typer.echo)


def live(
    only: Annotated[list[str] | None, typer.Option(help="A figure's id; may be given several times.")] = None,
    record: Annotated[bool, typer.Option(help="Append the measurements to benchmarks/results.")] = False,
) -> None:
    """Measure the figures of live streams that need no load: the keywords' word error, leaks, the tick on a GPU."""
    from penstock.bench.figures import STREAMS, measure_figures

    measure_figures(STREAMS, "streams", only or [], record=record, say=typer.echo)


def training(
    only: Annotated[list[str] | None, typer.Option(help="A figure's id; may be given several times.")] = None,
    record: Annotated[bool, typer.Option(help="Append the measurements to benchmarks/results.")] = False,
) -> None:
    """Measure the figures of training over several processes: how far their gradients are from those of one."""
    from penstock.bench.figures import TRAINING, measure_figures

    measure_figures(TRAINING, "training", only or [], record=record, say=typer.echo)


def soak(
    bundle: Annotated[Path, typer.Option(help="The bundle that is served and whose golden examples are asked.")],
    minutes: Annotated[float, typer.Option(help="How long the load lasts.")] = 30.0,
    load: Annotated[float, typer.Option(help="The share of what the server can carry that is offered.")] = 0.8,
    rate: Annotated[float | None, typer.Option(help="Requests a second instead, without searching.")] = None,
    frontends: Annotated[int, typer.Option(help="Front-end processes of the server.")] = 2,
    kill_every_s: Annotated[float, typer.Option(help="Seconds between kills.")] = 60.0,
    within_ms: Annotated[float, typer.Option(help="The server's latency budget.")] = 50.0,
    seed: Annotated[int, typer.Option(help="Of the arrivals, and of who is killed.")] = 0,
    record: Annotated[bool, typer.Option(help="Append the measurement to benchmarks/results.")] = False,
) -> None:
    """Serve under load for long, kill its processes one after the other, and say what was lost, wrong or leaked."""
    from penstock.bench.results import append, line_of
    from penstock.bench.soak import Plan
    from penstock.bench.soak import soak as run_soak

    plan = Plan(
        bundle=bundle,
        seconds=60 * minutes,
        rate=rate,
        load=load,
        frontends=frontends,
        kill_every_s=kill_every_s,
        budget_ms=within_ms,
        seed=seed,
    )
    soaked = run_soak(plan, typer.echo)
    _show_soaked(soaked)
    if record:
        workload = (
            f"{minutes:g} minutes of {soaked.rate:,.0f} requests/s, {frontends} front-ends, clients that come and go, "
            f"{len(soaked.kills)} processes killed"
        )
        metric = (
            "memory (anonymous and shared PSS) of all processes at the end over that after the same warm-up, minus 1"
        )
        append(
            line_of(
                [soaked.growth],
                id=ID_SOAK if minutes >= SOAK_MINUTES else None,
                workload=workload,
                metric=metric,
                unit="fraction",
            ),
            "server",
        )


def _show_soaked(soaked: "Soaked") -> None:
    from rich.console import Console
    from rich.table import Table

    churned = soaked.churned
    table = Table("", "requests", title=f"{soaked.rate:,.0f} requests/s, {len(soaked.kills)} kills")
    for name, count in {
        "offered": churned.offered,
        "answered": churned.answered,
        "refused": churned.refused,
        "lost with a killed front-end": soaked.lost_by_kills,
        "wrong": churned.wrong,
        "hung": churned.hung,
    }.items():
        table.add_row(name, f"{count:,}")
    console = Console()
    console.print(table)
    table = Table("after warm-up, then at the end", "memory (PSS)", "descriptors", "threads")
    for role, first in soaked.first.items():
        last = soaked.last[role]
        table.add_row(
            role,
            f"{first.memory_bytes / 1e6:.1f} MB, {last.memory_bytes / 1e6:.1f} MB",
            f"{first.descriptors}, {last.descriptors}",
            f"{first.threads}, {last.threads}",
        )
    console.print(table)
    console.print(f"memory growth {soaked.growth:+.2%}, {churned.opened:,} connections opened", highlight=False)


def _show(measured: "Measured", null_rate: float, within_ms: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title=_described(measured.load))
    rows = {
        "answered": f"{measured.answered_a_second:,.0f}/s",
        f"within {within_ms:g} ms": f"{measured.share_within(within_ms):.2%} of {measured.offered:,} due",
        "latency p50 / p90 / p98 / p99 / p99.9": " / ".join(
            f"{measured.percentile_ms(percent):.2f}" for percent in (50, 90, 98, 99, 99.9)
        )
        + " ms",
        "refused, failed, lost": f"{measured.refused:,}, {measured.failed:,}, {measured.lost:,}",
        "checked against golden": f"{measured.checked:,}, all right",
        "the generator's own ceiling": f"{null_rate:,.0f}/s against a server that does nothing",
    }
    for row in rows.items():
        table.add_row(*row)
    Console().print(table)


def _described(load: "Load") -> str:
    if load.rate is None:
        return f"closed loop, {load.connections} connections, {load.seconds:g} s"
    return f"open loop, {load.rate:,.0f} requests/s offered, {load.connections} connections, {load.seconds:g} s"


def _cores(text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    from penstock.core.errors import BenchError

    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise BenchError(f"the cores are {text!r}; write them as 1 or 1,2.") from None
