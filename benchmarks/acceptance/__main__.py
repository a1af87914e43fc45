"""Measure this project's targets from its source tree: `python -m benchmarks.acceptance NAME`.

`penstock bench` measures a user's own server and machine.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.acceptance.figures import measure_figures, read_figures
from benchmarks.acceptance.server.soak_command import soak
from benchmarks.acceptance.train.train_command import train
from penstock.core.errors import BenchError, PenstockError

Only = Annotated[list[str] | None, typer.Option(help="A figure's id; may be given several times.")]
Record = Annotated[bool, typer.Option("--record", help="Append the measurements to benchmarks/results.")]

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
app.command()(soak)
app.command()(train)


def _add_area(area: str, help: str) -> None:
    """Add the command of an area whose figures need no options."""

    @app.command(area, help=help)
    def measure(only: Only = None, record: Record = False) -> None:  # pyright: ignore[reportUnusedFunction]
        measure_figures(area, only or [], record=record, say=typer.echo)


_add_area("foundation", "Measure the demo, the digits, imports, start-up, the engine tick and resuming.")
_add_area(
    "server",
    "Measure requests lost by drains, isolation from a hostile client, and recovery from faults. "
    "Peers: `python -m benchmarks.peers.run`.",
)
_add_area(
    "install",
    "Measure the size on disk of the extras client and cpu, which pip downloads, and the first hour of a newcomer.",
)
_add_area(
    "streams",
    "Measure word error, leaks between streams, the most streams of a core, and the tick on a GPU.",
)
_add_area("score", "Measure the own time of scoring a row, its rate beside a pandas_udf, and rows after kills.")
_add_area(
    "fleet",
    "Measure a simulated day and the loss of a zone, the simulation beside HAProxy, servers behind HAProxy and Envoy "
    "(what restarts and kills lose, the proxies' time, and weights), and training on Slurm, Spark and Ray.",
)
_add_area("training", "Measure parity with float64 in one process, and the stall of a checkpoint.")


@app.command()
def device(
    pack: Annotated[Path | None, typer.Option(help="A pack of pictures, written by `penstock export`.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="The bundle of the pack, for figures of both.")] = None,
    only: Only = None,
    record: Record = False,
) -> None:
    """Measure the accuracy of the photographs; with --pack, the offline app in Chromium and the device engine."""
    if pack is None:
        measure_figures("device", only or [], record=record, say=typer.echo)
        return
    if not (pack / "pack.json").is_file():
        raise BenchError(f"{pack} is no pack; 'penstock export BUNDLE --out DIR' writes one.")
    measure_figures(
        "device",
        only or [],
        record=record,
        say=typer.echo,
        options=" --pack PACK" + " --bundle BUNDLE" * (bundle is not None),
        given={"pack": pack} | ({} if bundle is None else {"bundle": bundle}),
        # It takes minutes of training.
        by_name=["device.images.accuracy"],
    )


@app.command()
def detect(
    pack: Annotated[Path | None, typer.Option(help="The pack of detect, for its boxes in all places.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="The bundle of that pack.")] = None,
    only: Only = None,
    record: Record = False,
) -> None:
    """Measure mAP50 of a trained network and of HOG; with --pack and --bundle, its boxes in all places."""
    given = {name: path for name, path in (("pack", pack), ("bundle", bundle)) if path is not None}
    measure_figures(
        "detect",
        only or [],
        record=record,
        say=typer.echo,
        options="".join(f" --{name} {name.upper()}" for name in given),
        given=given,
        # They take minutes of training.
        by_name=["detect.map50", "detect.map50_other", "detect.map50_hog"] if given else [],
    )


@app.command()
def mitosis(
    pack: Annotated[Path | None, typer.Option(help="The pack of mitosis, for its time on two cores.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="The bundle of mitosis, for its time on a GPU.")] = None,
    only: Only = None,
    record: Record = False,
) -> None:
    """Measure F1 of trained networks and of blobs; with --pack and --bundle, the time of a whole slide."""
    given = {name: path for name, path in (("pack", pack), ("bundle", bundle)) if path is not None}
    measure_figures(
        "mitosis",
        only or [],
        record=record,
        say=typer.echo,
        options="".join(f" --{name} {name.upper()}" for name in given),
        given=given,
        # They take minutes of training, or need only slides.
        by_name=["mitosis.f1", "mitosis.second_style_f1", "mitosis.blob_f1"] if given else [],
    )


@app.command()
def translate(
    bundle: Annotated[Path, typer.Option(help="The bundle of translate.")],
    prompts: Annotated[Path, typer.Option(help="prompts.tsv, which the application's make_data writes.")],
    only: Only = None,
    record: Record = False,
) -> None:
    """Measure chrF of a trained translator and of Apertium; it needs sacrebleu and apertium."""
    measure_figures(
        "translate",
        only or [],
        record=record,
        say=typer.echo,
        options=" --bundle BUNDLE --prompts PROMPTS",
        given={"bundle": bundle, "prompts": prompts},
    )


@app.command()
def speech(
    bundle: Annotated[Path | None, typer.Option(help="The bundle of a recogniser of any words.")] = None,
    sounds: Annotated[Path | None, typer.Option(help="The sounds that make_test_sounds makes.")] = None,
    only: Only = None,
    record: Record = False,
) -> None:
    """Measure the recogniser that two cores train, kills of engines and servers, and the protocols of other services.

    With --bundle and --sounds: the word error of a recogniser of any words.
    """
    given = {name: path for name, path in (("bundle", bundle), ("sounds", sounds)) if path is not None}
    figures = read_figures("speech")
    measure_figures(
        "speech",
        only or [],
        record=record,
        say=typer.echo,
        options="".join(f" --{name} {name.upper()}" for name in given),
        given=given,
        # They take minutes of training, or an hour of kills.
        by_name=[name for name, figure in figures.items() if not figure.needs] if given else [],
    )


@app.command()
def house(
    only: Only = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of the CPU comparison.")] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds of each load.")] = 5.0,
    record: Record = False,
) -> None:
    """Measure the time of `make test`, abolished words, and the CPU of a request beside commit d910c77."""
    options = f" --repeat {repeat} --seconds {seconds:g}"
    given = {"repeat": repeat, "seconds": seconds, "say": typer.echo}
    measure_figures("house", only or [], record=record, say=typer.echo, options=options, given=given)


@app.command()
def one_core(
    bundle: Annotated[Path | None, typer.Option(help="Another bundle than the CNN of benchmarks/models.")] = None,
    only: Only = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions.")] = 5,
    seconds: Annotated[float, typer.Option(help="Seconds of each load.")] = 3.0,
    record: Record = False,
) -> None:
    """Measure the CPU of a refusal beside an answer, of a request beside Mosec, and of a chunk of live streams.

    Core 0 serves, core 1 sends. By name: the requests a second of eight front-ends over those of one.
    """
    options = f" --repeat {repeat} --seconds {seconds:g}" + " --bundle BUNDLE" * (bundle is not None)
    given: dict[str, Any] = {"repeat": repeat, "seconds": seconds, "say": typer.echo}
    # It needs 13 cores.
    by_name = ["one_core.frontends_x8"]
    if bundle is not None:
        given["bundle"] = bundle
        by_name += ["one_core.refusal_ratio", "one_core.request_us"]
        # Of live streams, which no one-shot bundle serves.
        by_name += ["one_core.chunk_us", "one_core.chunk_us_shared", "one_core.chunk_us_other"]
    measure_figures(
        "one_core", only or [], record=record, say=typer.echo, options=options, given=given, by_name=by_name
    )


@app.command()
def scheduler(
    trace: Annotated[list[Path] | None, typer.Option(help="A recorded trace: CSV of arrival_s,budget_ms.")] = None,
    picture: Annotated[Path | None, typer.Option(help="File for the curves; in docs/assets by default.")] = None,
    record: Record = False,
) -> None:
    """Simulate the scheduler beside fixed-delay batching, batch-when-idle and the offline optimum."""
    from benchmarks.acceptance.report.results import record_result
    from benchmarks.acceptance.scheduler.scheduler_goodput import PICTURE, draw, measurement_of, overall, simulate
    from benchmarks.acceptance.scheduler.simulation import POLICIES

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
        record_result(measurement_of(points), "scheduler")


@app.command()
def report(
    check: Annotated[bool, typer.Option("--check", help="Exit with status 1 if a target is missed.")] = False,
    group: Annotated[str | None, typer.Option(help="Only the targets of this group.")] = None,
) -> None:
    """Print the targets beside the last measurements, and write docs/performance.md."""
    from benchmarks.acceptance.report.performance_page import report as write_report

    missed = write_report(group)
    if check and missed:
        typer.echo(f"Missed: {', '.join(missed)}.", err=True)
        raise typer.Exit(1)


def main() -> None:
    """Run the command line. A user's mistake is one sentence on stderr and exit status 2."""
    try:
        app()
    except PenstockError as error:
        sys.stderr.write(f"benchmarks.acceptance: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
