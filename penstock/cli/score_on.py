"""`penstock score --on`: units are scored by the tasks of a cluster; planning and the manifest are done here."""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import typer

from penstock.cli.remote_arguments import bundle_at
from penstock.cli.train_on import RESTARTS, ClusterOptions, check_cluster, job_of
from penstock.core.errors import ClusterError, ScoreError
from penstock.core.storage.remote_folder import url_of

if TYPE_CHECKING:
    from penstock.cluster.units_engine import UnitsEngine
    from penstock.core.source_files.find_application import FoundApplication
    from penstock.score.network import HowToRun, LoadedNetwork, RunsElsewhere
    from penstock.score.parts import ScoredPart
    from penstock.score.plan import ScoreOptions
    from penstock.score.score_run import PlannedRun, Progress, ScoreReport
    from penstock.score.shared_run import SharedRun

# Footers of parts that are read at the same time, because a bucket takes long to answer.
AT_ONCE = 16


def score_on(
    bundle: Path,
    source: str,
    out: str,
    options: "ScoreOptions",
    how: "HowToRun",
    cluster: ClusterOptions,
    progress: "Progress",
) -> "ScoreReport":
    """Score an input on a cluster, or go on where a run of the same command ended.

    Args:
        bundle: The bundle's folder, or its URL.
        source: The input.
        out: The output folder or its URL.
        options: What is read and written.
        how: How each process runs the bundle.
        cluster: The cluster.
        progress: Called with the number of units done and of all.

    Raises:
        TrainError: An option of the cluster is wrong.
        ScoreError: The input does not fit, is damaged or changes, or the output is of another run.
        StorageError: The input cannot be read, or the output cannot be written.
        ClusterError: The cluster is not there or too small, or the application failed.
    """
    from penstock.score.files import InputFolder, OutputFolder
    from penstock.score.parts import Parts
    from penstock.score.score_run import ScoreReport, check_apart, plan_run

    check_cluster(cluster)
    place, answers = InputFolder(source), OutputFolder(out)
    check_apart(place, answers)
    # A cluster that is not there is found before anything is written.
    engine = _engine(cluster, _everywhere(out))
    try:
        how = replace(how, cache=how.cache.absolute())
        network = _network(bundle_at(bundle, how.cache), how)
        try:
            planned = plan_run(network, place, answers, options, how)
            found = _application(network, how)
        finally:
            network.close()
        parts, names = Parts(answers, planned.description), planned.names()
        there = _parts(names, parts.found)
        todo = [unit for unit, name in enumerate(names) if name not in there]
        progress(len(there), len(names))
        begin_s = perf_counter()
        if todo:
            # Each machine fetches what is at a URL itself.
            paths = [_everywhere(each) for each in (bundle, source) if url_of(each) is None]
            _run(engine, cluster, paths, _shared(bundle, out, planned, how, todo), found, len(names), progress)
            there |= _parts([names[unit] for unit in todo], parts.found_now)
    finally:
        engine.close()
    if missing := [name for name in names if name not in there]:
        raise ScoreError(
            f"{len(missing):,} of {len(names):,} parts are not in {out}, such as {missing[0]}; run the same command "
            f"again, and see that all machines write to the same folder."
        )
    report = ScoreReport(new_rows=sum(there[names[unit]].rows for unit in todo), seconds=perf_counter() - begin_s)
    report = planned.finish(parts, [there[name] for name in names], report)
    # Of processes that were killed.
    answers.remove_leftovers()
    return report


def _engine(cluster: ClusterOptions, out: str) -> "UnitsEngine":
    if cluster.on == "slurm":
        from penstock.cluster.slurm_units import SlurmUnits

        return SlurmUnits(out, RESTARTS if cluster.restarts is None else cluster.restarts, _say)
    if cluster.on == "ray":
        from penstock.cluster.ray_units import RayUnits

        return RayUnits()
    from penstock.cluster.spark_units import SparkUnits

    return SparkUnits(cluster.on, os.environ.get("PYSPARK_PYTHON"))


def _network(bundle: Path, how: "HowToRun") -> "LoadedNetwork | RunsElsewhere":
    """Load the network as each process will; a machine that gives commands may have no GPU."""
    from penstock.score.network import LoadedNetwork, RunsElsewhere

    if how.device == "cuda":
        return RunsElsewhere.read(bundle, how)
    network = LoadedNetwork(bundle, how)
    if network.fallback:
        _say(network.fallback)
    return network


def _application(network: "LoadedNetwork | RunsElsewhere", how: "HowToRun") -> "FoundApplication":
    from penstock.core.bundles.bundle_application import bundle_application

    return bundle_application(network.files, how.app, accept_changed=how.accept_changed)


def _parts(names: Sequence[str], find: "Callable[[str], ScoredPart | None]") -> "dict[str, ScoredPart]":
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {part.name: part for part in pool.map(find, names) if part is not None}


def _shared(bundle: Path, out: str, planned: "PlannedRun", how: "HowToRun", todo: Sequence[int]) -> "SharedRun":
    from penstock.score.shared_run import SharedRun

    return SharedRun(
        bundle=_everywhere(bundle),
        reference="",
        out=_everywhere(out),
        url=planned.place.url,
        shown=str(planned.place),
        is_one_file=planned.place.is_one_file,
        plan=planned.plan,
        description=dict(planned.description),
        how=how,
        todo=todo,
    )


def _run(
    engine: "UnitsEngine",
    cluster: ClusterOptions,
    paths: Sequence[str],
    run: "SharedRun",
    found: "FoundApplication",
    total: int,
    progress: "Progress",
) -> None:
    """Write what the processes need where they all see it, run the units, and remove it."""
    from penstock.cluster.job import UNITS, ClusterJob
    from penstock.cluster.units_task import OTHER_COMMAND

    job = replace(job_of(cluster, "score"), paths=paths)
    folder = _shared_folder(run)
    left = len(run.todo)

    def done(units: int) -> None:
        nonlocal left
        left -= units
        progress(total - left, total)

    if ClusterJob.remove_others(folder):
        _say("An earlier command for this output had not ended; what is left of it ends now.")
    try:
        file = job.write(folder, found)
        replace(run, reference=found.reference).write(file.with_name(UNITS))
        engine.run(file, run.todo, done)
        if not file.exists():
            raise ClusterError(OTHER_COMMAND)
    finally:
        job.remove(folder)
        with suppress(OSError):
            folder.rmdir()


def _shared_folder(run: "SharedRun") -> Path:
    """Return the folder of the jobs for an output, which all machines see."""
    if url_of(run.out) is None:
        return Path(run.out) / ".cluster"
    return run.how.cache / "score" / hashlib.sha256(run.out.encode()).hexdigest()[:16] / ".cluster"


def _everywhere(place: str | Path) -> str:
    """Return a place by a name that does not depend on the working folder."""
    return url_of(place) or str(Path(place).expanduser().absolute())


def _say(line: str) -> None:
    typer.echo(line, err=True)
