"""`penstock train` and `penstock runs`."""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli.documented import documented
from penstock.core.errors import PeersLost, TrainError

if TYPE_CHECKING:
    from penstock.core.find_application import FoundApplication
    from penstock.train.parallel.world import RankAssignment
    from penstock.train.recipe import Recipe
    from penstock.train.run import RunResult


# Width of a table that is not printed to a terminal.
WIDE = 200
TIMEOUT_S = 600.0
# Each process loads torch and waits in memory for the others.
MAX_PROCESSES_PER_CORE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """Number of processes, and their device.

    Args:
        device: Device of each process.
        count: Requested number of processes on this machine; None if not given.
        assignment: Ranks of this process; None if no launcher started it.
        timeout_s: Seconds to wait for other processes.
    """

    device: Literal["cpu", "cuda"]
    count: int | None
    assignment: "RankAssignment | None"
    timeout_s: float

    @property
    def is_launcher(self) -> bool:
        """True if this process starts the training processes and is none of them."""
        return self.assignment is None and (self.count or 1) > 1


@documented
def train(
    application: Annotated[str | None, typer.Argument(metavar="[APP]")] = None,
    out: Path | None = None,
    resume: Path | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    precision: str | None = None,
    gradient_accumulation: int | None = None,
    clip_norm: float | None = None,
    compile: bool | None = None,
    graph: bool | None = None,
    deterministic: bool | None = None,
    peer_memory: bool | None = None,
    workers: int | None = None,
    bad_examples: str | None = None,
    checkpoint_every_steps: int | None = None,
    gpus: int | None = None,
    processes: int | None = None,
    timeout_s: float | None = None,
    profile: int | None = None,
) -> None:
    """Train an application and write its bundle to OUT/bundle.

    Args:
        application: A name (digits), an import path, or your own app.py.
        out: Folder of the run; it must not hold a run yet.
        resume: Resume the run in this folder, exactly.
        epochs: Passes over the training examples.
        steps: Training steps, instead of epochs.
        batch_size: Examples a step, over all devices together.
        seed: Seed of weights, order, augmentation and dropout.
        precision: fp32, tf32, bf16 or fp16.
        gradient_accumulation: Parts in which each process computes its share of a batch.
        clip_norm: Maximal Euclidean norm of the gradient.
        compile: Compile the network with torch.compile, or not.
        graph: Capture the step in a CUDA graph, or not.
        deterministic: Use deterministic algorithms, or the fastest.
        peer_memory: Let GPUs of one host access each other's memory, or use NCCL.
        workers: Threads that read examples ahead of the steps.
        bad_examples: 'stop' at a damaged example, or 'skip' it and train on another one.
        checkpoint_every_steps: Steps between checkpoints.
        gpus: Number of GPUs of this machine, one process each.
        processes: Number of processes on the CPU.
        timeout_s: Seconds to wait for other processes; 600 by default.
        profile: Steps to profile after a warm-up, into step-time.json, timeline.svg and trace.json.
    """
    from penstock.core.find_application import find_application

    if profile is not None:
        # Silences the messages of torch's profiler on standard error; it reads this before its first use.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    options = _launch_options(gpus, processes, timeout_s)
    given = {
        "epochs": epochs,
        "steps": steps,
        "batch_size": batch_size,
        "seed": seed,
        "precision": precision,
        "clip_norm": clip_norm,
        "checkpoints.every_steps": checkpoint_every_steps,
        "loading.workers": workers,
        "loading.bad_examples": bad_examples,
        "execution.accumulation_steps": gradient_accumulation,
        "execution.compile": compile,
        "execution.graph": graph,
        "execution.deterministic": deterministic,
        "parallel.peer_memory": peer_memory,
    }
    overrides = {name: value for name, value in given.items() if value is not None}
    if resume is not None:
        if out is not None or overrides:
            raise TrainError("a resumed run keeps its folder and its settings; give --resume RUN alone.")
        _resume(resume, application, options, profile)
        return
    if application is None or out is None:
        raise TrainError("say what to train and where: 'penstock train APP --out RUN', or '--resume RUN'.")
    if (out / "run.json").exists():
        raise TrainError(f"{out} already holds a run; continue it with '--resume {out}', or choose another folder.")
    if options.is_launcher:
        _launch(out, options)
        return
    from penstock.train.recipe import with_overrides

    found = find_application(application)
    _run(found, out, with_overrides(found.recipe(), overrides), overrides, options, profile)


@documented
def runs(
    folder: Path,
    reach: float | None = None,
    metric: str = "accuracy",
    picture: Path | None = None,
) -> None:
    """List and compare training runs: a table, and one picture of their curves.

    Args:
        folder: The runs in this folder or below it.
        reach: Show the time until each run reached this value.
        metric: The metric of --reach.
        picture: File for the curves; FOLDER/runs.png by default.
    """
    from rich.console import Console
    from rich.table import Table

    from penstock.train.report.run_comparison import find_runs
    from penstock.train.report.run_log import draw_runs

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


def _resume(folder: Path, application: str | None, options: LaunchOptions, profile: int | None) -> None:
    from penstock.core.find_application import find_application
    from penstock.train.recipe import with_overrides
    from penstock.train.report.run_comparison import read_run

    run = read_run(folder)
    if run.fields.get("state") == "finished":
        typer.echo(f"The run in {folder} is finished; its bundle is {folder / 'bundle'}.")
        return
    if options.count is None:
        # The number and device of the interrupted run.
        device = "cuda" if run.fields.get("device") == "cuda" else "cpu"
        count = run.fields.get("processes", 1) if options.assignment is None else None
        options = replace(options, device=device, count=count)
    if options.is_launcher:
        _launch(folder, options)
        return
    found = find_application(application or run.fields["application"])
    if found.source_sha256() != run.fields["sources"]:
        raise TrainError(
            f"the sources of {found.application.name!r} changed since the run in {folder} began, so it cannot be "
            f"resumed exactly; restore them, or start a new run."
        )
    overrides = run.fields["overrides"]
    recipe = with_overrides(found.recipe(), overrides)
    if (options.assignment.size if options.assignment else 1) == run.fields.get("processes", 1):
        # The last bits of a sum depend on the number of threads, and that on the number of processes.
        recipe = with_overrides(recipe, {"execution.threads": run.fields["threads"]})
    _run(found, folder, recipe, overrides, options, profile)


def _launch(folder: Path, options: LaunchOptions) -> None:
    """Run the same command in the requested number of processes; this process does not import torch."""
    from penstock.train.parallel.launch import launch

    assert options.count is not None, options
    try:
        launch([sys.executable, "-m", "penstock", *sys.argv[1:]], options.count, os.environ)
    except TrainError as error:
        raise TrainError(f"{error}{_resume_hint(folder)}") from None


def _run(
    found: "FoundApplication",
    folder: Path,
    recipe: "Recipe",
    overrides: dict[str, Any],
    options: LaunchOptions,
    profile: int | None,
) -> None:
    from penstock.train.parallel.launch import PARENT_VARIABLE
    from penstock.train.parallel.world import device_of, join_world
    from penstock.train.recipe import with_overrides
    from penstock.train.run import train

    assignment = options.assignment
    device = device_of(
        assignment, cuda=options.device == "cuda", wanted=1 if assignment is None else assignment.local_size
    )
    notice = unused_gpus(options)
    if notice is not None:
        typer.echo(notice, err=True)
    if device.type == "cuda":
        # cuBLAS is deterministic only with this workspace, and reads the variable before its first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if assignment is not None and recipe.execution.threads is None:
        threads = max(1, len(os.sched_getaffinity(0)) // assignment.local_size)
        recipe = with_overrides(recipe, {"execution.threads": threads})
    if assignment is not None and assignment.size > assignment.local_size and device.type == "cpu":
        from penstock.train.parallel.network_interfaces import interface_towards

        # gloo's own choice may be an interface that does not reach the other machines.
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = interface_towards(assignment.address, assignment.port)
    parent = os.environ.get(PARENT_VARIABLE)
    try:
        with join_world(assignment, device, options.timeout_s) as world:
            result = train(
                found,
                folder,
                recipe,
                overrides=overrides,
                world=world,
                parent=int(parent) if parent else None,
                profiled_steps=profile,
            )
            if world.is_rank_zero:
                _say(result)
    except PeersLost as error:
        # Penstock's own launcher prints the hint itself.
        raise PeersLost(f"{error}{'' if parent else _resume_hint(folder)}") from None


def unused_gpus(options: LaunchOptions) -> str | None:
    """Return a notice if the CPU was chosen by no option on a machine with GPUs."""
    import torch

    count = torch.cuda.device_count()
    if options.device == "cuda" or options.count is not None or options.assignment is not None or count == 0:
        return None
    return f"Training on the CPU; the GPUs of this machine are used with --gpus 1 to --gpus {count}."


def _launch_options(gpus: int | None, processes: int | None, timeout_s: float | None) -> LaunchOptions:
    if gpus is not None and processes is not None:
        raise TrainError(f"--gpus {gpus} and --processes {processes} contradict each other; give one of them.")
    count = gpus if gpus is not None else processes
    if count is not None and count < 1:
        raise TrainError(f"{count} processes are requested; give at least 1.")
    max_count = MAX_PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if count is not None and count > max_count:
        raise TrainError(
            f"{count:,} processes are requested, too many for the {os.cpu_count()} cores of this machine; give at most "
            f"{max_count}."
        )
    if timeout_s is not None and not timeout_s > 0:
        raise TrainError(f"--timeout-s is {timeout_s:g}; it must be above 0.")
    assignment = _rank_assignment()
    if assignment is not None and count is not None and count != assignment.local_size:
        raise TrainError(
            f"{count} processes are requested, but the launcher of this one started {assignment.local_size} on this "
            f"machine (LOCAL_WORLD_SIZE); omit the option, or make the numbers equal."
        )
    return LaunchOptions(
        device="cuda" if gpus is not None else "cpu",
        count=count,
        assignment=assignment,
        timeout_s=timeout_s or TIMEOUT_S,
    )


def _rank_assignment() -> "RankAssignment | None":
    """Read the ranks that torchrun or Penstock's own launcher set."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    from penstock.train.parallel.world import RankAssignment

    def number(name: str, default: str) -> int:
        text = os.environ.get(name, default)
        try:
            return int(text)
        except ValueError:
            raise TrainError(f"the environment has {name}={text!r}; it must be a whole number.") from None

    rank, size = number("RANK", "0"), number("WORLD_SIZE", "1")
    return RankAssignment(
        rank=rank,
        size=size,
        local_rank=number("LOCAL_RANK", str(rank)),
        local_size=number("LOCAL_WORLD_SIZE", str(size)),
        address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
        port=number("MASTER_PORT", "29500"),
    )


def _resume_hint(folder: Path) -> str:
    if not list(folder.glob("checkpoints/step-*")):
        return ""
    return f" Go on with: penstock train --resume {folder}"


def _say(result: "RunResult") -> None:
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    typer.echo(f"Best after step {result.best_step:,}: {metrics}. {result.seconds:.1f} s of training.")
    typer.echo(f"Bundle: {result.folder / 'bundle'}  Curves: {result.folder / 'curves.png'}")


def _short(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
