"""Scoring on Ray: tasks in the bundles of a placement group, which Ray runs again where their process was lost."""

# It is installed for the tests of `make fleet` alone.
# pyright: reportMissingImports=false

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from penstock.cluster.job import ClusterJob
from penstock.cluster.ray_engine import connect_ray, reserved
from penstock.cluster.task_checks import NEEDED
from penstock.cluster.units_engine import LOSSES, UnitsEngine, tasks_of, units_done
from penstock.cluster.units_task import passing_sentence
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
        with reserved(job) as group:
            score = _remote(ray, group, job)
            running: list[Any] = []
            try:
                while todo or running:
                    while todo and len(running) < AHEAD * job.size:
                        running.append(score.remote(str(file), todo.pop(), NEEDED))
                    ended, running = ray.wait(running, num_returns=1)
                    for each in ended:
                        done(units_done(ray.get(each)))
            except RayError as error:
                raise ClusterError(
                    passing_sentence(str(error))
                    or f"Ray gave up a unit ({' '.join(str(error).split())[:300]}); the same command goes on from here."
                ) from None
            finally:
                for each in running:
                    ray.cancel(each, force=True)

    def close(self) -> None:
        """See `UnitsEngine`."""
        import ray

        ray.shutdown()


def _remote(ray: Any, group: Any, job: ClusterJob) -> Any:
    """Make the function of a task. A nested one is pickled by value, and needs nothing of Penstock at first."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def units(job: str, units: Sequence[int], needed: Sequence[str]) -> dict[str, Any]:
        import os
        import socket
        import sys
        from importlib.util import find_spec

        place = {
            "host": socket.gethostname(),
            "python": sys.executable,
            "missing": [name for name in needed if find_spec(name) is None],
            "job": job,
            "sees_job": os.path.isfile(job),
        }
        if place["missing"] or not place["sees_job"]:
            return {"place": place}
        from pathlib import Path

        from penstock.cluster.units_task import score_units

        return dict(score_units(Path(job), units))

    return ray.remote(units).options(
        name="penstock-units",
        num_cpus=job.cores,
        num_gpus=1 if job.device == "cuda" else 0,
        max_retries=LOSSES - 1,
        # What is raised may pass; what would come again is returned.
        retry_exceptions=True,
        scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group),
    )
