"""`penstock train` and `penstock runs`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.core.errors import TrainError

if TYPE_CHECKING:
    from penstock.core.application import FoundApplication
    from penstock.train.loop import RunResult
    from penstock.train.recipe import Recipe


# A table that goes into a file or another program is not folded to a terminal's width.
WIDE = 200


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(train)
    app.command()(runs)


def train(
    application: Annotated[
        str | None, typer.Argument(metavar="[APP]", help="A name (digits), an import path, or your own app.py.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; it must not hold a run yet.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder, exactly.")] = None,
    epochs: Annotated[float | None, typer.Option(help="How often every example is seen.")] = None,
    steps: Annotated[int | None, typer.Option(help="How many steps are taken, instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples a step, over all devices together.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the weights, the order, augmentation and dropout.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16.")] = None,
    checkpoint_every_steps: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
) -> None:
    """Train an application and leave its bundle in OUT/bundle."""
    from penstock.core.application import find_application

    given = {
        "epochs": epochs,
        "steps": steps,
        "batch_size": batch_size,
        "seed": seed,
        "precision": precision,
        "checkpoint_every_steps": checkpoint_every_steps,
    }
    overrides = {name: value for name, value in given.items() if value is not None}
    if resume is not None:
        if out is not None or overrides:
            raise TrainError("a resumed run keeps its folder and its settings; give --resume RUN alone.")
        _resume(resume, application)
        return
    if application is None or out is None:
        raise TrainError("say what to train and where: 'penstock train APP --out RUN', or '--resume RUN'.")
    if (out / "run.json").exists():
        raise TrainError(f"{out} holds a run already; go on with '--resume {out}', or choose another folder.")
    found = find_application(application)
    _run(found, out, _with(found.recipe(), overrides), overrides)


def runs(
    folder: Annotated[Path, typer.Argument(help="The runs in this folder or below it.")],
    reach: Annotated[float | None, typer.Option(help="Show when each run first reached this value.")] = None,
    metric: Annotated[str, typer.Option(help="The metric of --reach.")] = "accuracy",
    picture: Annotated[Path | None, typer.Option(help="Where the curves go; FOLDER/runs.png by default.")] = None,
) -> None:
    """List and compare training runs: a table, and one picture of their curves."""
    from rich.console import Console
    from rich.table import Table

    from penstock.train.report import draw_runs
    from penstock.train.runs import find_runs

    found = find_runs(folder)
    names = list(
        dict.fromkeys(name for run in found for line in run.lines for name in line if name[:10] == "validation")
    )
    table = Table("run", "application", "state", "seed", "batch", "seconds", *[name[11:] for name in names])
    if reach is not None:
        table.add_column(f"seconds to {metric} {reach:g}", justify="right")
    for run in found:
        recipe = run.fields.get("recipe", {})
        cells: list[Any] = [run.folder.relative_to(folder), run.fields.get("name"), run.fields.get("state")]
        cells += [recipe.get("seed"), recipe.get("batch_size"), _short(run.seconds, 1)]
        cells += [_short(run.best(name), 4) for name in names]
        if reach is not None:
            cells.append(_short(run.seconds_to(f"validation_{metric}", reach), 1))
        table.add_row(*map(str, cells))
    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)
    file = draw_runs({str(run.folder.relative_to(folder)): run.lines for run in found}, picture or folder / "runs.png")
    console.print(f"Curves: {file}", soft_wrap=True, highlight=False)


def _resume(folder: Path, application: str | None) -> None:
    from penstock.core.application import find_application
    from penstock.train.runs import read_run

    run = read_run(folder)
    if run.fields.get("state") == "finished":
        typer.echo(f"The run in {folder} is finished; its bundle is {folder / 'bundle'}.")
        return
    found = find_application(application or run.fields["application"])
    if found.source_sha256() != run.fields["sources"]:
        raise TrainError(
            f"the sources of {found.application.name!r} changed since the run in {folder} began, so it would not go on "
            f"exactly; bring them back, or begin a new run."
        )
    overrides = run.fields["overrides"]
    # The last bits of a sum depend on how many threads share it.
    recipe = replace(_with(found.recipe(), overrides), threads=run.fields["threads"])
    _run(found, folder, recipe, overrides)


def _run(found: "FoundApplication", folder: Path, recipe: "Recipe", overrides: dict[str, Any]) -> None:
    from penstock.train.loop import train

    _say(train(found, folder, recipe, overrides=overrides))


def _say(result: "RunResult") -> None:
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    typer.echo(f"Best after step {result.best_step:,}: {metrics}. {result.seconds:.1f} s of training.")
    typer.echo(f"Bundle: {result.folder / 'bundle'}  Curves: {result.folder / 'curves.png'}")


def _with(recipe: "Recipe", overrides: dict[str, Any]) -> "Recipe":
    if "steps" in overrides and "epochs" not in overrides:
        overrides = overrides | {"epochs": None}
    elif "epochs" in overrides and "steps" not in overrides:
        overrides = overrides | {"steps": None}
    return replace(recipe, **overrides)


def _short(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
