"""`penstock train`."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.config_file import naming_config
from penstock.cli.documented import documented_with_urls
from penstock.cli.launch_options import Accepted, LaunchOptions, cluster_options, launch_options
from penstock.cli.remote_arguments import run_at, run_beside
from penstock.core.errors import BadExample, PeersLost, TrainError
from penstock.core.machine.cores import available_cores

if TYPE_CHECKING:
    from penstock.core.source_files.find_application import FoundApplication
    from penstock.train.recipe import Recipe
    from penstock.train.run import RunResult
    from penstock.train.run_place import RunPlace


@documented_with_urls("out", "resume")
@naming_config
def train(
    application: Annotated[str | None, typer.Argument(metavar="[APP]")] = None,
    out: Path | None = None,
    resume: Path | None = None,
    fresh: bool = False,
    accept_changed_app: bool = False,
    accept_changed_data: bool = False,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE")] = None,
    config: Path | None = None,
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
    threads: int | None = None,
    bad_examples: str | None = None,
    checkpoint_every_steps: int | None = None,
    device: str | None = None,
    gpus: int | None = None,
    processes: int | None = None,
    timeout_s: float | None = None,
    callbacks: Annotated[list[str] | None, typer.Option("--callback", metavar="NAME")] = None,
    profile: int | None = None,
    on: str | None = None,
    cores: int | None = None,
    restarts: int | None = None,
) -> None:
    """Train an application and write its bundle to OUT/bundle.

    Args:
        application: A name (digits), an import path, or your own app.py.
        out: Folder or URL of the run. If it holds one already, the same command goes on with it.
        resume: Resume the run in this folder or at this URL, exactly.
        fresh: Begin a new run beside the one in --out, in OUT-2, OUT-3 and so on.
        accept_changed_app: Go on with a run although the sources of its application changed.
        accept_changed_data: Go on with a run although its examples changed.
        settings: A setting of the recipe, such as optimizer.lr=0.01; may be repeated.
        config: A TOML file of settings; --set and the options below come before it.
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
        threads: CPU threads of a step; measured at the start of a run by default.
        bad_examples: 'stop' at a damaged example, or 'skip' it and train on another one.
        checkpoint_every_steps: Steps between checkpoints.
        device: cpu or cuda; by default all GPUs of this machine, where it has some.
        gpus: Number of GPUs of this machine, one process each; all by default.
        processes: Number of processes on the CPU.
        timeout_s: Seconds to wait for other processes; 600 by default.
        callbacks: A logger beside those of the recipe: wandb, mlflow or trackio; may be repeated.
        profile: Steps to profile after a warm-up, into step-time.json, timeline.svg and trace.json.
        on: The cluster whose engine starts the processes: slurm, ray or spark://HOST:PORT. --gpus (one process each) or
            --processes is then their number on all machines together.
        cores: CPU cores of each process, with --on; 1 by default. It is their number of threads too.
        restarts: Restarts in a row without a new checkpoint before a run that loses processes fails, with --on; 3 by
            default.
    """
    if profile is not None:
        # Silences the messages of torch's profiler on standard error; it reads this before its first use.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    if profile is not None and profile < 1:
        raise TrainError(f"--profile is {profile}; give at least 1 step.")
    if on is None and (cores is not None or restarts is not None):
        raise TrainError("--cores and --restarts are for a cluster; give --on slurm, ray or spark://HOST:PORT too.")
    if on is None:
        options = launch_options(device, gpus, processes, timeout_s, os.environ, _visible_gpus)
    else:
        options = cluster_options(on, device, gpus, processes, timeout_s, os.environ)
    accepted = Accepted(app=accept_changed_app, data=accept_changed_data)
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
        "execution.threads": threads,
        "execution.accumulation_steps": gradient_accumulation,
        "execution.compile": compile,
        "execution.graph": graph,
        "execution.deterministic": deterministic,
        "parallel.peer_memory": peer_memory,
        "callbacks": callbacks or None,
    }
    overrides = _settings(config, settings) | {name: value for name, value in given.items() if value is not None}
    if on is not None:
        from penstock.cli.train_on import ClusterOptions, train_on

        cluster = ClusterOptions(on=on, launch=options, cores=cores, restarts=restarts)
        train_on(
            application, out, resume, cluster, overrides=overrides, fresh=fresh, accepted=accepted, profile=profile
        )
        return
    _train_here(application, out, resume, options, overrides=overrides, fresh=fresh, accepted=accepted, profile=profile)


def _train_here(
    application: str | None,
    out: Path | None,
    resume: Path | None,
    options: LaunchOptions,
    *,
    overrides: dict[str, Any],
    fresh: bool,
    accepted: Accepted,
    profile: int | None,
) -> None:
    """Train in processes of this machine: begin a run, or go on with one."""
    if resume is not None:
        if out is not None or fresh or overrides:
            raise TrainError("a resumed run keeps its folder and its settings; give --resume RUN alone.")
        _resume(run_at(resume), application, options, profile, accepted)
        return
    if application is None or out is None:
        raise TrainError("say what to train and where: 'penstock train APP --out RUN', or '--resume RUN'.")
    place = run_at(out)
    if (place.folder / "run.json").exists():
        if fresh:
            place = run_beside(place)
        elif not _begins_anew(place, application, overrides, options):
            _go_on(place, application, overrides, options, profile, accepted)
            return
    if options.is_launcher:
        _launch(place, options)
        return
    from penstock.core.source_files.find_application import find_application
    from penstock.train.overrides import with_overrides

    found = find_application(application, _copy())
    _run(found, place, with_overrides(found.recipe(), overrides), overrides, options, profile, accepted)


def _settings(config: Path | None, settings: list[str] | None) -> dict[str, Any]:
    if config is None and not settings:
        return {}
    from penstock.train.overrides import parse_settings, read_settings

    return ({} if config is None else read_settings(config)) | parse_settings(settings or [])


def _begins_anew(place: "RunPlace", application: str, overrides: dict[str, Any], options: LaunchOptions) -> bool:
    """Check for a run that ended before its first checkpoint, so that nothing of it would be lost or gone on with."""
    from penstock.core.source_files.find_application import find_application
    from penstock.train.parallel.rank_process import PARENT_VARIABLE
    from penstock.train.report.run_comparison import read_run
    from penstock.train.run_owner import is_abandoned
    from penstock.train.same_run import changed_sources, differences

    is_first = options.assignment is None or options.assignment.rank == 0
    # The first process of several may hold the lock already.
    if is_first and not is_abandoned(place.folder):
        return False
    fields = read_run(place.folder).fields
    # The checkpoints of a run at a URL may not be here.
    if place.remote is not None or fields.get("state") == "finished" or _has_checkpoint(place):
        return False
    named = find_application(application, _copy())
    if fields.get("application") != named.reference:
        return False
    # The command that started this process has printed it.
    prints = is_first and not os.environ.get(PARENT_VARIABLE)
    if prints and (differences(fields, named, overrides) or changed_sources(fields, named)):
        typer.echo(f"The run in {place} ended before its first checkpoint, so it begins anew, as this command says.")
    return True


def _has_checkpoint(place: "RunPlace") -> bool:
    return any(place.folder.glob("checkpoints/step-*"))


def _go_on(
    place: "RunPlace",
    application: str,
    overrides: dict[str, Any],
    options: LaunchOptions,
    profile: int | None,
    accepted: Accepted,
) -> None:
    """Go on with the run in a folder, if the command asks for that run."""
    from penstock.core.source_files.find_application import find_application
    from penstock.train.overrides import with_overrides
    from penstock.train.report.run_comparison import read_run
    from penstock.train.same_run import FREE, differences, is_longer

    fields, named = read_run(place.folder).fields, find_application(application, _copy())
    if found := differences(fields, named, overrides):
        # A name that no recipe has is no difference between two runs.
        with_overrides(named.recipe(), overrides)
        raise TrainError(
            f"{place} holds a run that this command does not go on with: {'; '.join(found)}. Give the same options, "
            f"another --out, or --fresh to begin a new run beside it."
        )
    more = {name: value for name, value in overrides.items() if name in FREE}
    longer = is_longer(fields, overrides)
    _resume(
        place,
        application,
        options,
        profile,
        accepted,
        longer=longer,
        more=overrides if longer else more,
    )


def _resume(
    place: "RunPlace",
    application: str | None,
    options: LaunchOptions,
    profile: int | None,
    accepted: Accepted,
    *,
    longer: bool = False,
    more: dict[str, Any] | None = None,
) -> None:
    from penstock.core.source_files.find_application import find_application, refuse_downloaded
    from penstock.train.overrides import with_overrides
    from penstock.train.report.run_comparison import read_run
    from penstock.train.same_run import LENGTHS, check_sources, check_unrun_sources

    run = read_run(place.folder)
    if run.fields.get("state") == "finished" and not longer:
        if options.assignment is None or options.assignment.rank == 0:
            _upload_rest(place)
        typer.echo(f"The run in {place} is finished; its bundle is {place.bundle}.")
        return
    if not options.chosen:
        # The number and device of the interrupted run.
        device = "cuda" if run.fields.get("device") == "cuda" else "cpu"
        count = run.fields.get("processes", 1) if options.assignment is None else None
        options = replace(options, device=device, count=count)
    if options.is_launcher:
        _launch(place, options)
        return
    if application is None and place.remote is not None:
        refuse_downloaded(run.fields["application"], place.folder)
    reference = application or run.fields["application"]
    remedy = ", so it cannot be resumed exactly; restore it, begin a new run"
    if not accepted.app:
        check_unrun_sources(run.fields, reference, str(place), remedy, _copy())
    found = find_application(reference, _copy())
    if not accepted.app:
        check_sources(run.fields, found, str(place), remedy)
    overrides = run.fields["overrides"]
    if longer:
        overrides = {name: value for name, value in overrides.items() if name not in LENGTHS}
    overrides = overrides | (more or {})
    recipe = with_overrides(found.recipe(), overrides)
    if (options.assignment.size if options.assignment else 1) == run.fields.get("processes", 1):
        # The last bits of a sum depend on the number of threads, and that on the number of processes.
        recipe = with_overrides(recipe, {"execution.threads": run.fields["threads"]})
    _run(found, place, recipe, overrides, options, profile, accepted)


def _upload_rest(place: "RunPlace") -> None:
    if place.remote is not None:
        from penstock.train.run_uploads import upload_rest

        upload_rest(place)


def _launch(place: "RunPlace", options: LaunchOptions) -> None:
    """Run the same command in the requested number of processes; this process does not import torch."""
    from penstock.train.parallel.launch import launch
    from penstock.train.run_owner import refuse_owned

    refuse_owned(place.folder)
    assert options.count is not None, options
    try:
        launch([sys.executable, "-m", "penstock", *sys.argv[1:]], options.count, os.environ)
    except TrainError as error:
        raise TrainError(f"{error}{_resume_hint(place)}") from None


def _run(
    found: "FoundApplication",
    place: "RunPlace",
    recipe: "Recipe",
    overrides: dict[str, Any],
    options: LaunchOptions,
    profile: int | None,
    accepted: Accepted,
) -> None:
    from penstock.cluster.rank_task import LAUNCH_VARIABLE
    from penstock.train.overrides import with_overrides
    from penstock.train.parallel.parent import end_with_parent
    from penstock.train.parallel.rank_process import PARENT_VARIABLE
    from penstock.train.parallel.world import device_of, join_world
    from penstock.train.run import train
    from penstock.train.run_owner import Launch

    assignment = options.assignment
    device = device_of(
        assignment, cuda=options.device == "cuda", wanted=1 if assignment is None else assignment.local_size
    )
    if device.type == "cuda":
        # cuBLAS is deterministic only with this workspace, and reads the variable before its first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if assignment is not None and recipe.execution.threads is None:
        threads = max(1, available_cores() // assignment.local_size)
        recipe = with_overrides(recipe, {"execution.threads": threads})
    if assignment is not None and assignment.size > assignment.local_size and device.type == "cpu":
        from penstock.train.parallel.network_interfaces import interface_towards

        # gloo's own choice may be an interface that does not reach the other machines.
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            os.environ["GLOO_SOCKET_IFNAME"] = interface_towards(assignment.address, assignment.port)
    parent, launch = os.environ.get(PARENT_VARIABLE), os.environ.get(LAUNCH_VARIABLE)
    if parent:
        # It may wait long for the others before the watchdog of the training begins.
        end_with_parent(int(parent))
    place.fetch_checkpoint()
    try:
        with join_world(assignment, device, options.timeout_s) as world:
            result = train(
                found,
                place.folder,
                recipe,
                overrides=overrides,
                world=world,
                parent=int(parent) if parent else None,
                profiled_steps=profile,
                accept_changed_data=accepted.data,
                place=place,
                launch=Launch.parse(launch) if launch else None,
            )
            if world.is_rank_zero:
                _say(result, place)
    except BadExample as error:
        if recipe.loading.bad_examples != "stop" or "bad_examples" in str(error):
            raise
        raise TrainError(f"{error} Mend or remove it, or train without such examples: --bad-examples skip.") from None
    except PeersLost as error:
        # Penstock's own launcher prints the hint itself.
        raise PeersLost(f"{error}{'' if parent else _resume_hint(place)}") from None


def _copy() -> Path | None:
    """The shipped copy of the application's file, where the processes of a cluster do not have the file itself."""
    from penstock.cluster.rank_task import COPY_VARIABLE

    return Path(copy) if (copy := os.environ.get(COPY_VARIABLE)) else None


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _resume_hint(place: "RunPlace") -> str:
    if not _has_checkpoint(place):
        return ""
    return f" Go on with: penstock train --resume {place}"


def _say(result: "RunResult", place: "RunPlace") -> None:
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
    typer.echo(f"Best after step {result.best_step:,}: {metrics}. {result.seconds:.1f} s of training.")
    curves = result.folder / "curves.png"
    typer.echo(f"Bundle: {place.bundle}" + f"  Curves: {place}/{curves.name}" * curves.exists())
