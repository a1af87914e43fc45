"""`penstock score`: run a bundle over Parquet, JSONL, or a folder of pictures or sounds."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.documented import documented_with_urls
from penstock.cli.remote_arguments import bundle_at
from penstock.core.errors import ScoreError
from penstock.core.machine.cores import available_cores
from penstock.core.remote.cache_variables import expanded_cache
from penstock.core.wording.counted import counted

if TYPE_CHECKING:
    from penstock.cli.train_on import ClusterOptions
    from penstock.score.network import HowToRun
    from penstock.score.plan import ScoreOptions
    from penstock.score.score_run import Progress, ScoreReport


@documented_with_urls("bundle")
def score(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE")],
    source: Annotated[str, typer.Argument(metavar="IN")],
    out: Annotated[str, typer.Option("--out", "--to", metavar="OUT")],
    keep: Annotated[list[str] | None, typer.Option(metavar="COLUMN")] = None,
    reply: bool = False,
    on_error: Annotated[str, typer.Option(metavar="fail|null")] = "fail",
    input: Annotated[list[str] | None, typer.Option(metavar="TENSOR=COLUMN")] = None,
    body: Annotated[str | None, typer.Option(metavar="COLUMN")] = None,
    content_type: Annotated[str | None, typer.Option(metavar="TYPE")] = None,
    app: str | None = None,
    accept_changed_app: bool = False,
    device: str = "auto",
    precision: str = "fp32",
    executor: str = "auto",
    batch: Annotated[int, typer.Option(min=1)] = 256,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    on: Annotated[str | None, typer.Option(metavar="CLUSTER")] = None,
    processes: Annotated[int | None, typer.Option(metavar="N")] = None,
    gpus: Annotated[int | None, typer.Option(metavar="N")] = None,
    restarts: Annotated[int | None, typer.Option(metavar="N")] = None,
    cache: Annotated[Path, typer.Option(metavar="DIR", envvar="PENSTOCK_CACHE")] = Path("~/.cache/penstock"),
) -> None:
    """Run a bundle over a folder of rows, and write the answers as Parquet.

    The same command goes on where an earlier one was ended. Each row is written once, also where processes were killed.

    Args:
        bundle: A bundle's folder, such as RUN/bundle, or its URL.
        source: Parquet, JSONL, pictures or sounds: a file, a folder or a URL.
        out: The folder or URL of the answers.
        keep: Write this column of the input beside the answers; may be given several times.
        reply: Write the application's reply to each row as JSON.
        on_error: fail at a row without an answer, or write null for it, and why.
        input: The column of an input tensor that has another name; may be given several times.
        body: The column of encoded bodies, such as JPEG, that the application decodes.
        content_type: The content type of all bodies or files; by default found for each.
        app: The application, if it moved.
        accept_changed_app: Accept changed sources of the application.
        device: cpu, cuda, cuda:N, or auto.
        precision: On a GPU fp32, tf32, bf16 or fp16.
        executor: On a CPU: onnx, torch, or auto.
        batch: Rows of a batch.
        threads: CPU threads; by default all cores. With --on, the cores of each process, by default 1.
        on: Score on this cluster: slurm, ray or spark://HOST:PORT.
        processes: With --on, the number of processes on all machines together.
        gpus: The same with a GPU for each of them.
        restarts: On Slurm, starts in a row that may bring nothing new; by default 3.
        cache: The folder of downloads and exported networks.
    """
    from penstock.score.network import HowToRun
    from penstock.score.plan import ScoreOptions

    if on is None and (processes, gpus, restarts) != (None, None, None):
        raise ScoreError(
            "--processes, --gpus and --restarts are for a cluster; give --on slurm, ray or spark://HOST:PORT too."
        )
    if restarts is not None and on != "slurm":
        raise ScoreError("--restarts is for Slurm; Spark and Ray give up a task that was lost 8 times.")
    how = HowToRun(
        cache=expanded_cache(cache),
        app=app,
        accept_changed=accept_changed_app,
        device=device,
        precision=precision,
        executor=executor,
        batch=batch,
        threads=threads or (available_cores() if on is None else 1),
    )
    options = ScoreOptions(
        columns=_columns(input or []),
        body=body,
        content_type=content_type,
        keep=tuple(dict.fromkeys(keep or [])),
        reply=reply,
        on_error=on_error,
    )
    if on is None:
        report = _run(bundle, source, out, options, how)
    else:
        from penstock.cli.launch_options import cluster_options
        from penstock.cli.train_on import ClusterOptions

        launch = cluster_options(on, None if device == "auto" else device, gpus, processes, None, os.environ)
        cluster = ClusterOptions(on=on, launch=launch, cores=how.threads, restarts=restarts)
        report = _on_cluster(bundle, source, out, options, replace(how, device=launch.device), cluster)
    typer.echo(_said(report, out))


def _on_cluster(
    bundle: Path, source: str, out: str, options: "ScoreOptions", how: "HowToRun", cluster: "ClusterOptions"
) -> "ScoreReport":
    from penstock.cli.score_on import score_on

    _refuse_chain(bundle)
    with _progress("units") as show:
        return score_on(bundle, source, out, options, how, cluster, show)


def _refuse_chain(bundle: Path) -> None:
    if (bundle.suffix == ".py" or ":" in bundle.name) and not bundle.is_dir():
        raise ScoreError(f"{bundle} is no bundle; chains are not scored, so give the bundle of each part by itself.")


@contextmanager
def _progress(unit: str = "") -> "Generator[Progress]":
    """Show a bar in a terminal; gives what moves it.

    Args:
        unit: What is counted; empty where it differs by input.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    counted = [MofNCompleteColumn(), TextColumn(unit)] if unit else [TaskProgressColumn()]
    columns = [TextColumn("{task.description}"), BarColumn(), *counted, TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Scoring", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _run(bundle: Path, source: str, out: str, options: "ScoreOptions", how: "HowToRun") -> "ScoreReport":
    from penstock.score.files import InputFolder, OutputFolder
    from penstock.score.network import LoadedNetwork
    from penstock.score.score_run import check_apart, score

    _refuse_chain(bundle)
    place, answers = InputFolder(source), OutputFolder(out)
    # What can be refused is refused before the network is loaded.
    check_apart(place, answers)
    network = LoadedNetwork(bundle_at(bundle, how.cache), how)
    if network.fallback:
        typer.echo(network.fallback, err=True)
    try:
        with _progress() as show:
            return score(network, place, answers, options, how, show)
    finally:
        network.close()


def _columns(given: list[str]) -> dict[str, str]:
    columns: dict[str, str] = {}
    for text in given:
        tensor, equals, column = text.partition("=")
        if not (tensor and equals and column):
            raise ScoreError(f"--input is {text!r}; give TENSOR=COLUMN.")
        if columns.setdefault(tensor, column) != column:
            raise ScoreError(f"--input names two columns for {tensor!r}, {columns[tensor]!r} and {column!r}; give one.")
    return columns


def _said(report: "ScoreReport", out: str) -> str:
    lines = [f"Rows: {report.rows:,} in {out}, {report.new_rows:,} of them new."]
    if report.new_rows:
        rate = report.new_rows / report.seconds
        shares = ", ".join(f"{name} {share:.0%}" for name, share in report.busy.items())
        bound = f", bound by {report.bound_by}" if report.bound_by else ""
        bound += f" (of the time: {shares})" if shares else ""
        lines.append(f"{rate:,.0f} rows/s{bound}.")
    if not report.rows:
        lines.append("The input has no rows.")
    if report.errors:
        lines.append(f"Without an answer: {counted(report.errors, 'row')}; the column 'error' says why.")
    if report.left_out:
        lines.append(f"Left out: {counted(report.left_out, 'file')} of other kinds.")
    if report.unreadable:
        lines.append(f"Written again: {counted(report.unreadable, 'damaged file')} of an earlier run.")
    if report.removed:
        lines.append(f"Removed: {counted(report.removed, 'file')} of inputs that have changed.")
    return "\n".join(lines)
