"""`penstock train --on`: the command on a cluster, whose engine starts the processes."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import typer

from penstock.cli.launch_options import Accepted, LaunchOptions
from penstock.cli.remote_arguments import run_at, run_beside
from penstock.core.errors import ClusterError, TrainError
from penstock.core.remote.cache_variables import cache_folder

if TYPE_CHECKING:
    from penstock.cluster.job import ClusterJob
    from penstock.train.run_place import RunPlace

RESTARTS = 3


class ClusterOptions(NamedTuple):
    """The cluster of a command: `--on`, number and device of the processes, and what was given for each."""

    on: str
    launch: LaunchOptions
    cores: int | None
    restarts: int | None


def train_on(
    application: str | None,
    out: Path | None,
    resume: Path | None,
    cluster: ClusterOptions,
    *,
    overrides: Mapping[str, Any],
    fresh: bool,
    accepted: Accepted,
    profile: int | None,
) -> None:
    """Run `penstock train` in every process of a cluster, until the run is done.

    Raises:
        TrainError: The command is wrong, or the run failed.
        ClusterError: The cluster is not there.
    """
    from penstock.cluster.job import LOG
    from penstock.core.source_files.find_application import find_application, refuse_downloaded
    from penstock.train.overrides import setting_text, with_overrides
    from penstock.train.report.run_comparison import read_run
    from penstock.train.run_owner import refuse_owned

    check_cluster(cluster)
    if resume is not None and (out is not None or fresh or overrides):
        raise TrainError("a resumed run keeps its folder and its settings; give --resume RUN alone.")
    at = out or resume
    if at is None or (application is None and resume is None):
        raise TrainError("say what to train and where: 'penstock train APP --out RUN', or '--resume RUN'.")
    place = run_at(at)
    if fresh and (place.folder / "run.json").exists():
        place = run_beside(place)
    reference = application
    if reference is None:
        reference = read_run(place.folder).fields["application"]
        if place.remote is not None:
            refuse_downloaded(reference, place.folder)
    found = find_application(reference)
    settings, recipe = dict(overrides), found.recipe()
    if resume is None and (cluster.cores is not None or recipe.execution.threads is None):
        # Not the cores of each machine: the weights would depend on where the engine starts the processes.
        settings.setdefault("execution.threads", cluster.cores or 1)
    # A wrong setting is found before anything starts.
    with_overrides(recipe, settings)
    run = place.folder.absolute() if place.remote is None else str(place.remote)
    arguments = ["train", *([found.reference] if application else [])]
    arguments += ["--out" if resume is None else "--resume", str(run)]
    arguments += [f"--set={name}={setting_text(value)}" for name, value in settings.items()]
    arguments += ["--accept-changed-app"] * accepted.app + ["--accept-changed-data"] * accepted.data
    arguments += [f"--device={cluster.launch.device}", f"--timeout-s={cluster.launch.timeout_s:g}"]
    arguments += [] if profile is None else [f"--profile={profile}"]
    job = replace(
        job_of(cluster, "train"), arguments=arguments, environment={"PENSTOCK_CACHE": str(cache_folder().absolute())}
    )
    refuse_owned(place.folder)
    folder, jobs = place.folder.absolute(), _cluster_folder(place)
    # A cluster that is not there is found before anything is written.
    run_job = _on_slurm(cluster, folder) if cluster.on == "slurm" else _on_engine(cluster, folder)
    file = job.write(jobs, found)
    try:
        output = run_job(file)
    except (ClusterError, TrainError, KeyboardInterrupt) as error:
        if not file.with_name(LOG).exists():
            _remove(job, jobs, place)
        if isinstance(error, KeyboardInterrupt):
            raise
        hint = f" Go on with the same command; the run is {place}." if list(folder.glob("checkpoints/step-*")) else ""
        raise TrainError(f"{error}{hint}") from None
    for line in output:
        typer.echo(line)
    _remove(job, jobs, place)


def job_of(cluster: ClusterOptions, command: Literal["train", "score"]) -> "ClusterJob":
    """Describe a command to the processes of a cluster; `ClusterJob.write` adds the sources of the application."""
    from penstock.cluster.job import ClusterJob

    assert cluster.launch.count is not None, cluster
    return ClusterJob(
        token=secrets.token_hex(8),
        command=command,
        size=cluster.launch.count,
        device=cluster.launch.device,
        cores=cluster.cores or 1,
        working_folder=str(Path.cwd()),
        sources={},
    )


def _on_slurm(cluster: ClusterOptions, run: Path) -> Callable[[Path], Sequence[str]]:
    """Return what runs a job on Slurm, given the file of its record."""
    from penstock.cluster.job import LOG
    from penstock.cluster.slurm_engine import SlurmJob, check_slurm

    check_slurm()

    def run_job(file: Path) -> Sequence[str]:
        job = SlurmJob(file, _restarts(cluster), run)
        _say(f"Slurm's job {job.number} trains; what it prints is in {file.with_name(LOG)}.")
        return job.wait(_say)

    return run_job


def _on_engine(cluster: ClusterOptions, run: Path) -> Callable[[Path], Sequence[str]]:
    """Return what runs a job on Spark or Ray, given the file of its record."""
    from penstock.cluster.cluster_engine import run_on
    from penstock.train.checkpoint.remote_checkpoints import newest_step

    if cluster.on == "ray":
        from penstock.cluster.ray_engine import RayEngine

        engine = RayEngine()
    else:
        from penstock.cluster.spark_engine import SparkEngine

        engine = SparkEngine(cluster.on, os.environ.get("PYSPARK_PYTHON"))

    def run_job(file: Path) -> Sequence[str]:
        assert cluster.launch.count is not None, cluster
        try:
            return run_on(engine, file, cluster.launch.count, _restarts(cluster), lambda: newest_step(run), _say)
        finally:
            engine.close()

    return run_job


def _restarts(cluster: ClusterOptions) -> int:
    return RESTARTS if cluster.restarts is None else cluster.restarts


def _remove(job: "ClusterJob", jobs: Path, place: "RunPlace") -> None:
    """Remove the files of a job that has ended, and folders that hold nothing else."""
    job.remove(jobs)
    if place.remote is None:
        for folder in (jobs, place.folder):
            with suppress(OSError):
                folder.rmdir()


def _cluster_folder(place: "RunPlace") -> Path:
    """Return the folder of what the engine starts. That of a URL is beside its copy, which may be fetched anew."""
    folder = place.folder.absolute()
    return folder / ".cluster" if place.remote is None else folder.parent / ".cluster"


def check_cluster(cluster: ClusterOptions) -> None:
    """Check the options of a cluster.

    Raises:
        TrainError: One is wrong.
    """
    for name, value, least in (("--cores", cluster.cores, 1), ("--restarts", cluster.restarts, 0)):
        if value is not None and value < least:
            raise TrainError(f"{name} is {value}; it must be at least {least}.")


_say: Callable[[str], None] = typer.echo
