"""`penstock sweep`."""

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.config_file import naming_config
from penstock.cli.documented import documented
from penstock.cli.launch_options import launch_options
from penstock.cli.printing import Format, table_console
from penstock.core.errors import TrainError
from penstock.core.machine.cores import available_cores
from penstock.core.storage.remote_folder import url_of
from penstock.core.wording.counted import counted

if TYPE_CHECKING:
    from penstock.train.sweep.sweeping import SweepPlan, SweepResult
    from penstock.train.sweep.trials import TrialRecord

TRIALS = 20


@documented
@naming_config
def sweep(
    application: Annotated[str, typer.Argument(metavar="APP")],
    out: Annotated[Path, typer.Option("--out")],
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE")] = None,
    config: Path | None = None,
    trials: int = TRIALS,
    jobs: int | None = None,
    seed: int = 0,
    prune: bool = True,
    device: str | None = None,
    fresh: bool = False,
    accept_changed_app: bool = False,
    accept_changed_data: bool = False,
    format: Format = Format.TEXT,
) -> None:
    """Train an application with many settings, chosen by Optuna, and find the best.

    Args:
        application: A name (digits), an import path, or your own app.py.
        out: Folder of the sweep, with a run for each trial. The same command goes on with a sweep there.
        settings: A range, '[a, b, c]', 'range(low, high)' or 'log(low, high)', or a fixed value; may be repeated.
        config: A TOML file of settings; ranges are texts in it, and --set comes before it.
        trials: Trials of the whole sweep; more of them go on with a finished one.
        jobs: Trials at a time; by default one on each GPU, or one on the CPU.
        seed: Seed of the choices; that of the weights is --set seed=N.
        prune: Stop trials that are worse than the median of the others.
        device: cpu or cuda; by default the GPUs of this machine, one for each trial, where it has some.
        fresh: Begin a new sweep beside the one in --out, in OUT-2, OUT-3 and so on.
        accept_changed_app: Go on with a sweep although the sources of its application changed.
        accept_changed_data: Go on with a sweep although its examples changed.
        format: A table, or JSON for programs with progress on standard error.
    """
    if url_of(out) is not None:
        raise TrainError(f"--out {out} is a URL; give a local folder, and copy what is wanted from it.")
    if trials < 1:
        raise TrainError(f"--trials is {trials}; give at least 1.")
    if seed < 0:
        raise TrainError(f"--seed is {seed}; give a whole number from 0.")
    from penstock.core.source_files.find_application import find_application
    from penstock.train.same_run import next_folder
    from penstock.train.sweep.ranges import parse_space
    from penstock.train.sweep.sweeping import SWEEP_FILE, SweepPlan, SweepStopped, check_unrun_sweep
    from penstock.train.sweep.sweeping import sweep as run_sweep

    space = parse_space(settings or [], config)
    gpus = _gpus(device)
    if fresh and (out / SWEEP_FILE).exists():
        out = next_folder(out)
    accepted = ["--accept-changed-app"] * accept_changed_app + ["--accept-changed-data"] * accept_changed_data
    plan = SweepPlan(
        application=application,
        folder=out,
        space=space,
        trials=trials,
        seed=seed,
        prunes=prune,
        gpus=gpus,
        jobs=_jobs(jobs, gpus),
        options=("--device", "cpu", *accepted) if gpus is None else ("--gpus", "1", *accepted),
        accepts_changed_app=accept_changed_app,
    )
    check_unrun_sweep(plan)
    try:
        result = run_sweep(
            plan, find_application(application), lambda said: typer.echo(said, err=format is Format.JSON)
        )
    except SweepStopped:
        typer.echo(f"The sweep in {out} is stopped; the same command goes on with it.", err=True)
        raise
    if format is Format.JSON:
        typer.echo(json.dumps(_fields(plan, result)))
    else:
        _print(plan, result)


def _gpus(device: str | None) -> tuple[str, ...] | None:
    """Return the GPUs of the trials, as CUDA_VISIBLE_DEVICES names them; None for the CPU."""
    import torch

    options = launch_options(device, None, None, None, os.environ, torch.cuda.device_count)
    if options.assignment is not None and options.assignment.size > 1:
        raise TrainError(
            f"penstock sweep was started {options.assignment.size} times by a launcher; start it once: it starts its "
            f"trials itself."
        )
    if options.device == "cpu":
        return None
    count = torch.cuda.device_count()
    visible = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    return tuple(visible[:count] or map(str, range(count)))


def _jobs(jobs: int | None, gpus: tuple[str, ...] | None) -> int:
    most = available_cores() if gpus is None else len(gpus)
    if jobs is None:
        return 1 if gpus is None else most
    if not 1 <= jobs <= most:
        there = counted(most, "core" if gpus is None else "GPU")
        raise TrainError(f"--jobs is {jobs}; give 1 to {most}, as this machine has {there}.")
    return jobs


def best_command(plan: "SweepPlan", best: "TrialRecord") -> str:
    """Return the command that trains the best trial again."""
    from penstock.train.sweep.trial_run import set_options

    out = plan.folder.with_name(f"{plan.folder.name}-best")
    chosen = set_options({**plan.space.fixed, **best.settings})
    return shlex.join(["penstock", "train", plan.application, "--out", str(out), *chosen])


def _fields(plan: "SweepPlan", result: "SweepResult") -> dict[str, Any]:
    best = result.best
    return {
        "metric": result.metric,
        "mode": result.mode,
        "trials": [_row(plan, each) for each in result.trials],
        "best": None if best is None else _row(plan, best),
        "command": None if best is None else best_command(plan, best),
    }


def _row(plan: "SweepPlan", trial: "TrialRecord") -> dict[str, Any]:
    from penstock.train.sweep.sweeping import trial_folder

    return {
        "trial": trial.number,
        "run": str(trial_folder(plan.folder, trial.number)),
        "outcome": trial.outcome,
        "settings": trial.settings,
        "value": trial.value,
        "reason": trial.reason,
    }


def _print(plan: "SweepPlan", result: "SweepResult") -> None:
    from rich.table import Table

    names = list(plan.space.varied)
    table = Table("trial", "outcome", *names, result.metric)
    for trial in result.trials:
        is_best = result.best is not None and trial.number == result.best.number
        cells: list[Any] = [f"{trial.number:03d}", "best" if is_best else trial.outcome]
        cells += [_short(trial.settings.get(name)) for name in names]
        cells.append("-" if trial.value is None else f"{trial.value:.4f}")
        table.add_row(*map(str, cells), style="bold" if is_best else None)
    console = table_console()
    console.print(table)
    if result.best is None:
        typer.echo("No trial is complete; the reasons are above, and train.log of each run has its output.")
        return
    missing = plan.trials - len(result.trials)
    if missing > 0:
        typer.echo(f"Every combination of the settings was trained; there are {missing} fewer than --trials.")
    typer.echo(f"Train the best again: {best_command(plan, result.best)}")


def _short(value: Any) -> str:
    from penstock.train.overrides import setting_text

    return f"{value:.4g}" if isinstance(value, float) else setting_text(value)
