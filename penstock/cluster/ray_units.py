"""Scoring on Ray: tasks in the bundles of a placement group, which Ray runs again where their process was lost."""

# It is installed for the tests of `make fleet` alone.
# pyright: reportMissingImports=false

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from penstock.cluster.job import ClusterJob
from penstock.cluster.machine_report import machine_report
from penstock.cluster.ray_engine import connect_ray, reserved
from penstock.cluster.task_checks import NEEDED
from penstock.cluster.units_engine import LOSSES, UnitsEngine, tasks_of, units_done, units_task
from penstock.cluster.units_task import ended_sentence, passing_sentence
from penstock.core.errors import ClusterError

# Tasks that Ray holds for each process: one runs, and another one waits.
AHEAD = 2


@final
class RayUnits(UnitsEngine):
    """The Ray cluster that this machine belongs to, or that RAY_ADDRESS names.

    Raises:
        ClusterError: Ray is not installed, or there is no cluster.
    """

    def __init__(self) -> None:
        connect_ray()

    def run(self, file: Path, units: Sequence[int], done: Callable[[int], object]) -> None:
        """See `UnitsEngine`."""
        import ray
        from ray.exceptions import RayError

        job, todo = ClusterJob.read(file), tasks_of(units)[::-1]
        task = units_task(machine_report(str(file), job.paths, NEEDED), kept=True)
        with reserved(job) as group:
            score = _remote(ray, group, job, task)
            running: list[Any] = []
            try:
                while todo or running:
                    while todo and len(running) < AHEAD * job.size:
                        running.append(score.remote(todo.pop()))
                    ended, running = ray.wait(running, num_returns=1)
                    for each in ended:
                        done(units_done(ray.get(each)))
            except RayError as error:
                raise ClusterError(
                    passing_sentence(str(error))
                    or ended_sentence(file)
                    or f"Ray gave up a unit ({' '.join(str(error).split())[:300]}); the same command goes on from here."
                ) from None
            finally:
                for each in running:
                    ray.cancel(each, force=True)

    def close(self) -> None:
        """See `UnitsEngine`."""
        import ray

        ray.shutdown()


def _remote(ray: Any, group: Any, job: ClusterJob, task: Callable[[Sequence[int]], dict[str, Any]]) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return ray.remote(task).options(
        name="penstock-units",
        num_cpus=job.cores,
        num_gpus=1 if job.device == "cuda" else 0,
        max_retries=LOSSES - 1,
        # What is raised may pass; what would come again is returned.
        retry_exceptions=True,
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group),
    )
