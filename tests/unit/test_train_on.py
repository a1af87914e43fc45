"""`penstock train --on` before and after the engine: what each process gets, and what a failed command leaves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.acceptance.fleet.cluster_runs import write_application
from penstock.cli.launch_options import Accepted, cluster_options
from penstock.cli.train_on import ClusterOptions, train_on
from penstock.cluster import ray_engine, slurm_engine
from penstock.cluster.cluster_engine import ClusterEngine
from penstock.cluster.job import LOG, ClusterJob
from penstock.cluster.outcome import RankOutcome
from penstock.core.errors import ClusterError, TrainError


class Recorded(ClusterEngine):
    """Keeps the jobs that it gets; each ends with a status."""

    def __init__(self, status: int) -> None:
        self.status, self.jobs = status, list[ClusterJob]()

    def run(self, file: Path, start: int) -> Sequence[RankOutcome]:
        """See `ClusterEngine`."""
        job = ClusterJob.read(file)
        self.jobs.append(job)
        return [RankOutcome(rank=rank, host="h", status=self.status, sentence="it fails.") for rank in range(job.size)]


def command(
    run: Path, on: str = "ray", cores: int | None = None, application: str = "digits", settings: Any = None
) -> None:
    launch = cluster_options(on, None, None, 2, None, {})
    cluster = ClusterOptions(on=on, launch=launch, cores=cores, restarts=None)
    accepted = Accepted(app=False, data=False)
    train_on(application, run, None, cluster, overrides=settings or {}, fresh=False, accepted=accepted, profile=None)


@pytest.mark.parametrize(
    ("cores", "settings", "threads"),
    [(None, {}, "1"), (3, {}, "3"), (3, {"execution.threads": 2}, "2"), (None, {"execution.threads": 2}, "2")],
)
def test_threads_are_the_same_on_every_machine(
    cores: int | None, settings: dict[str, int], threads: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = Recorded(0)
    monkeypatch.setattr(ray_engine, "RayEngine", lambda: engine)
    command(tmp_path / "run", cores=cores, application=write_application(tmp_path), settings=settings)
    (job,) = engine.jobs
    assert job.cores == (cores or 1)
    assert [each for each in job.arguments if "execution.threads" in each] == [f"--set=execution.threads={threads}"]


@pytest.mark.parametrize("there", [False, True])
def test_nothing_is_left_of_a_job_that_failed(there: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray_engine, "RayEngine", lambda: Recorded(2))
    run = tmp_path / "run"
    if there:
        run.mkdir()
        (run / "kept").touch()
    with pytest.raises(TrainError, match=r"^it fails\.$"):
        command(run)
    assert [each.name for each in tmp_path.rglob("*")] == (["run", "kept"] if there else [])


def test_nothing_is_written_without_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ClusterError, match=r"--on slurm needs Slurm's commands, and sbatch, scontrol, scancel is not on"
    ):
        command(tmp_path / "run", "slurm")
    assert list(tmp_path.iterdir()) == []


def test_the_log_of_a_slurm_job_that_failed_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Failing:
        number = "7"

        def __init__(self, file: Path, restarts: int, run: Path) -> None:
            file.with_name(LOG).write_text("why\n")

        def wait(self, say: object) -> Sequence[str]:
            raise ClusterError("Slurm's job 7 ended as FAILED.")

    monkeypatch.setattr(slurm_engine, "SlurmJob", Failing)
    monkeypatch.setattr(slurm_engine, "check_slurm", lambda: None)
    with pytest.raises(TrainError, match="ended as FAILED"):
        command(tmp_path / "run", "slurm")
    (log,) = (tmp_path / "run").glob(f".cluster/*/{LOG}")
    assert log.read_text() == "why\n"
