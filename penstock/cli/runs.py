"""`penstock runs`: training runs side by side."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.documented import documented_with_urls
from penstock.cli.printing import Format, table_console
from penstock.core.errors import TrainError
from penstock.core.remote_folder import url_of

if TYPE_CHECKING:
    from penstock.train.report.run_comparison import Run


@documented_with_urls("folder")
def runs(
    folder: Path,
    reach: float | None = None,
    metric: str = "accuracy",
    picture: Path | None = None,
    format: Format = Format.TEXT,
) -> None:
    """List and compare training runs: a table, and one picture of their curves.

    Args:
        folder: The runs in this folder or below it, or at a URL.
        reach: Show the time until each run reached this value.
        metric: The metric of --reach.
        picture: File for the curves; FOLDER/runs.png by default, or ./runs.png of a URL.
        format: A table and the picture, or JSON for programs.
    """
    if url_of(folder) is None:
        _print_runs(folder, reach, metric, picture or folder / "runs.png", format)
        return
    from tempfile import TemporaryDirectory

    from penstock.core.remote_folder import RemoteFolder
    from penstock.train.run_place import fetch_records

    with TemporaryDirectory(prefix="penstock-") as copies:
        fetch_records(RemoteFolder(str(url_of(folder))), Path(copies))
        _print_runs(Path(copies), reach, metric, picture or Path("runs.png"), format)


def _print_runs(folder: Path, reach: float | None, metric: str, picture: Path, format: Format) -> None:
    from rich.table import Table

    from penstock.train.report.run_comparison import differing_settings, find_runs
    from penstock.train.report.run_log import draw_runs

    found = find_runs(folder)
    differing = {run.folder: settings for run, settings in zip(found, differing_settings(found), strict=True)}
    names = list(
        dict.fromkeys(name for run in found for line in run.lines for name in line if name[:10] == "validation")
    )
    if reach is not None and names and f"validation_{metric}" not in names:
        measured = ", ".join(name.removeprefix("validation_") for name in names)
        raise TrainError(f"no run in {folder} has the metric {metric!r}; --metric is one of {measured}.")
    if format is Format.JSON:
        typer.echo(json.dumps([_summary(run, folder, names) for run in found]))
        return
    table = Table("run", "application", "state", "settings", "seconds", *[name[11:] for name in names])
    if reach is not None:
        table.add_column(f"seconds to {metric} {reach:g}", justify="right")
    for run in found:
        cells: list[Any] = [run.folder.relative_to(folder), run.fields.get("name"), run.state]
        cells += [differing[run.folder], _short(run.seconds, 1)]
        cells += [_short(run.best(name), 4) for name in names]
        if reach is not None:
            cells.append(_short(run.seconds_to(f"validation_{metric}", reach), 1))
        table.add_row(*map(str, cells))
    console = table_console()
    console.print(table)
    for run in found:
        if run.reason is not None:
            console.print(
                f"{run.folder.relative_to(folder)} failed: {run.reason}", soft_wrap=True, highlight=False, markup=False
            )
    if find_spec("matplotlib") is None:
        console.print("Curves: none without matplotlib; pip install 'penstock-nn\\[train]'.", soft_wrap=True)
        return
    try:
        file = draw_runs({str(run.folder.relative_to(folder)): run.lines for run in found}, picture)
    except OSError as error:
        raise TrainError(
            f"{picture} cannot be written ({error.strerror or error}); give another file by --picture."
        ) from None
    console.print(f"Curves: {file}", soft_wrap=True, highlight=False)


def _summary(run: "Run", folder: Path, names: list[str]) -> dict[str, Any]:
    """The row of a run as JSON."""
    fields = run.fields
    return {
        "run": str(run.folder.relative_to(folder)),
        "application": fields.get("name"),
        "state": run.state,
        "reason": run.reason,
        "settings": fields.get("overrides", {}),
        "seconds": run.seconds,
        "best": {name.removeprefix("validation_"): run.best(name) for name in names},
    }


def _short(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
