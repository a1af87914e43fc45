"""`penstock score`: run a bundle over Parquet, JSONL, or a folder of pictures or sounds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.documented import documented_with_urls
from penstock.cli.remote_arguments import bundle_at
from penstock.core.cores import available_cores
from penstock.core.errors import ScoreError

if TYPE_CHECKING:
    from penstock.score.network import HowToRun
    from penstock.score.plan import ScoreOptions
    from penstock.score.score_run import ScoreReport


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
        threads: CPU threads; by default all cores.
        cache: The folder of downloads and exported networks.
    """
    from penstock.score.network import HowToRun
    from penstock.score.plan import ScoreOptions

    how = HowToRun(
        cache=cache.expanduser(),
        app=app,
        accept_changed=accept_changed_app,
        device=device,
        precision=precision,
        executor=executor,
        batch=batch,
        threads=threads or available_cores(),
    )
    options = ScoreOptions(
        columns=_columns(input or []),
        body=body,
        content_type=content_type,
        keep=tuple(dict.fromkeys(keep or [])),
        reply=reply,
        on_error=on_error,
    )
    typer.echo(_said(_run(bundle, source, out, options, how), out))


def _run(bundle: Path, source: str, out: str, options: "ScoreOptions", how: "HowToRun") -> "ScoreReport":
    from rich.console import Console
    from rich.progress import Progress

    from penstock.score.files import InputFolder, OutputFolder
    from penstock.score.network import LoadedNetwork
    from penstock.score.score_run import check_apart, score

    if (bundle.suffix == ".py" or ":" in bundle.name) and not bundle.is_dir():
        raise ScoreError(f"{bundle} is no bundle; chains are not scored, so give the bundle of each part by itself.")
    place, answers = InputFolder(source), OutputFolder(out)
    # What can be refused is refused before the network is loaded.
    check_apart(place, answers)
    network = LoadedNetwork(bundle_at(bundle, how.cache), how)
    if network.fallback:
        typer.echo(network.fallback, err=True)
    console = Console(stderr=True)
    try:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("Scoring", total=None)

            def show(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

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
        lines.append(f"{rate:,.0f} rows/s, bound by {report.bound_by} (of the time: {shares}).")
    if report.errors:
        lines.append(f"Without an answer: {report.errors:,} rows; the column 'error' says why.")
    if report.left_out:
        lines.append(f"Left out: {report.left_out:,} files of other kinds.")
    if report.unreadable:
        lines.append(f"Written again: {report.unreadable:,} damaged files of an earlier run.")
    if report.removed:
        lines.append(f"Removed: {report.removed:,} files of inputs that have changed.")
    return "\n".join(lines)
