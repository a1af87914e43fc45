"""`penstock train` and `penstock runs`."""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.core.errors import OthersLost, TrainError

if TYPE_CHECKING:
    from penstock.core.application import FoundApplication
    from penstock.train.loop import RunResult
    from penstock.train.recipe import Recipe
    from penstock.train.world import Seat


# A table that goes into a file or another program is not folded to a terminal's width.
WIDE = 200
WAITED_S = 600.0
# Processes on a machine; each loads torch and waits in memory for the others.
MOST_PER_CORE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Company:
    """How many train together, and where.

    Args:
        device: Of each process.
        count: How many on this machine were asked for; None where nothing was said.
        seat: This process's, where something else started it.
        timeout_s: How long one waits for the others.
    """

    device: Literal["cpu", "cuda"]
    count: int | None
    seat: "Seat | None"
    timeout_s: float

    @property
    def is_to_be_started(self) -> bool:
        """Whether this process is none of them, but starts them."""
        return self.seat is None and (self.count or 1) > 1


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
    precision: Annotated[str | None, typer.Option(help="fp32, tf32, bf16 or fp16.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Parts of a batch that are computed one by one.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="The norm down to which longer gradients are scaled.")] = None,
    compile: Annotated[bool | None, typer.Option(help="Have torch compile the network, or not.")] = None,
    graph: Annotated[bool | None, typer.Option(help="Capture the step in a CUDA graph, or not.")] = None,
    deterministic: Annotated[
        bool | None, typer.Option(help="Compute the same bits each time, or by whatever algorithm is the fastest.")
    ] = None,
    peer_memory: Annotated[
        bool | None, typer.Option(help="Let GPUs of one host read and write each other's memory, or exchange by NCCL.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Threads that read examples ahead of the steps.")] = None,
    bad_examples: Annotated[
        str | None, typer.Option(help="At damaged examples stop, or skip them and learn from others in their place.")
    ] = None,
    checkpoint_every_steps: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Train on so many GPUs of this machine, a process each.")] = None,
    processes: Annotated[int | None, typer.Option(help="Train in so many processes on the CPU.")] = None,
    timeout_s: Annotated[
        float | None, typer.Option(help="Seconds after which a process that waits for others gives up; 600.")
    ] = None,
    profile: Annotated[
        int | None,
        typer.Option(
            help="After a warm-up, say where the time of so many steps goes: receipt.json, timeline.svg, trace.json."
        ),
    ] = None,
) -> None:
    """Train an application and leave its bundle in OUT/bundle."""
    from penstock.core.application import find_application

    if profile is not None:
        # Or torch's profiler says on standard error when it begins and ends; it asks before it is used.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    company = _company(gpus, processes, timeout_s)
    given = {
        "epochs": epochs,
        "steps": steps,
        "batch_size": batch_size,
        "seed": seed,
        "precision": precision,
        "accumulate": accumulate,
        "clip_norm": clip_norm,
        "compile": compile,
        "graph": graph,
        "deterministic": deterministic,
        "peer_memory": peer_memory,
        "workers": workers,
        "bad_examples": bad_examples,
        "checkpoint_every_steps": checkpoint_every_steps,
    }
    overrides = {name: value for name, value in given.items() if value is not None}
    if resume is not None:
        if out is not None or overrides:
            raise TrainError("a resumed run keeps its folder and its settings; give --resume RUN alone.")
        _resume(resume, application, company, profile)
        return
    if application is None or out is None:
        raise TrainError("say what to train and where: 'penstock train APP --out RUN', or '--resume RUN'.")
    if (out / "run.json").exists():
        raise TrainError(f"{out} holds a run already; go on with '--resume {out}', or choose another folder.")
    if company.is_to_be_started:
        _launch(out, company)
        return
    found = find_application(application)
    _run(found, out, _with(found.recipe(), overrides), overrides, company, profile)


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


def _resume(folder: Path, application: str | None, company: Company, profile: int | None) -> None:
    from penstock.core.application import find_application
    from penstock.train.runs import read_run

    run = read_run(folder)
    if run.fields.get("state") == "finished":
        typer.echo(f"The run in {folder} is finished; its bundle is {folder / 'bundle'}.")
        return
    if company.count is None:
        # As many as before, on the same kind of device.
        device = "cuda" if run.fields.get("device") == "cuda" else "cpu"
        count = run.fields.get("processes", 1) if company.seat is None else None
        company = replace(company, device=device, count=count)
    if company.is_to_be_started:
        _launch(folder, company)
        return
    found = find_application(application or run.fields["application"])
    if found.source_sha256() != run.fields["sources"]:
        raise TrainError(
            f"the sources of {found.application.name!r} changed since the run in {folder} began, so it would not go on "
            f"exactly; bring them back, or begin a new run."
        )
    overrides = run.fields["overrides"]
    recipe = _with(found.recipe(), overrides)
    if (company.seat.size if company.seat else 1) == run.fields.get("processes", 1):
        # The last bits of a sum depend on how many threads share it. Other processes have other shares of the cores.
        recipe = replace(recipe, threads=run.fields["threads"])
    _run(found, folder, recipe, overrides, company, profile)


def _launch(folder: Path, company: Company) -> None:
    """The same command, in as many processes as are asked for; this one needs no torch."""
    from penstock.train.launch import launch

    assert company.count is not None, company
    try:
        launch([sys.executable, "-m", "penstock", *sys.argv[1:]], company.count, os.environ)
    except TrainError as error:
        raise TrainError(f"{error}{_way_on(folder)}") from None


def _run(
    found: "FoundApplication",
    folder: Path,
    recipe: "Recipe",
    overrides: dict[str, Any],
    company: Company,
    profile: int | None,
) -> None:
    from penstock.train.launch import PARENT_VARIABLE
    from penstock.train.loop import train
    from penstock.train.world import device_of, joined

    seat = company.seat
    device = device_of(seat, cuda=company.device == "cuda", wanted=1 if seat is None else seat.local_size)
    if device.type == "cuda":
        # cuBLAS is deterministic only with a workspace of its own, which it looks for before its first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if seat is not None and recipe.threads is None:
        recipe = replace(recipe, threads=max(1, len(os.sched_getaffinity(0)) // seat.local_size))
    if seat is not None and seat.size > seat.local_size and device.type == "cpu":
        _show_the_way(seat)
    parent = os.environ.get(PARENT_VARIABLE)
    try:
        with joined(seat, device, company.timeout_s) as world:
            result = train(
                found,
                folder,
                recipe,
                overrides=overrides,
                world=world,
                parent=int(parent) if parent else None,
                profiled_steps=profile,
            )
            if world.is_first:
                _say(result)
    except OthersLost as error:
        # A parent of our own says it itself.
        raise OthersLost(f"{error}{'' if parent else _way_on(folder)}") from None


def _show_the_way(seat: "Seat") -> None:
    """Have gloo meet the processes of other machines on the network that leads there."""
    from penstock.train.network import interface_towards

    if "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = interface_towards(seat.address, seat.port)


def _company(gpus: int | None, processes: int | None, timeout_s: float | None) -> Company:
    if gpus is not None and processes is not None:
        raise TrainError(f"--gpus {gpus} and --processes {processes} contradict each other; give one of them.")
    count = gpus if gpus is not None else processes
    if count is not None and count < 1:
        raise TrainError(f"{count} processes are asked for; give at least 1.")
    most = MOST_PER_CORE * (os.cpu_count() or 1)
    if count is not None and count > most:
        raise TrainError(
            f"{count:,} processes are asked for, which would bring this machine of {os.cpu_count()} cores to a stop; "
            f"give {most} at most."
        )
    if timeout_s is not None and not timeout_s > 0:
        raise TrainError(f"--timeout-s is {timeout_s:g}; it must be above 0.")
    seat = _seat()
    if seat is not None and count is not None and count != seat.local_size:
        raise TrainError(
            f"{count} processes are asked for, and whoever started this one started {seat.local_size} on this machine "
            f"(LOCAL_WORLD_SIZE); leave the option out, or make them agree."
        )
    return Company(
        device="cuda" if gpus is not None else "cpu", count=count, seat=seat, timeout_s=timeout_s or WAITED_S
    )


def _seat() -> "Seat | None":
    """Where torchrun, or a parent process of our own, put this process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    from penstock.train.world import Seat

    def number(name: str, default: str) -> int:
        text = os.environ.get(name, default)
        try:
            return int(text)
        except ValueError:
            raise TrainError(f"the environment has {name}={text!r}; it must be a whole number.") from None

    rank, size = number("RANK", "0"), number("WORLD_SIZE", "1")
    return Seat(
        rank=rank,
        size=size,
        local_rank=number("LOCAL_RANK", str(rank)),
        local_size=number("LOCAL_WORLD_SIZE", str(size)),
        address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        port=number("MASTER_PORT", "29500"),
    )


def _way_on(folder: Path) -> str:
    if not list(folder.glob("checkpoints/step-*")):
        return ""
    return f" Go on with: penstock train --resume {folder}"


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
