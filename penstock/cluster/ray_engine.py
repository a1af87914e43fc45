"""Training on Ray: a placement group, and one actor a rank in its bundles. Ray Train is not used."""

# It is installed for the tests of `make fleet` alone.
# pyright: reportMissingImports=false

import logging
import os
import re
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from penstock.cluster.cluster_engine import ClusterEngine, why_unreachable
from penstock.cluster.job import ClusterJob
from penstock.cluster.machine_report import machine_report
from penstock.cluster.outcome import RankOutcome
from penstock.cluster.task_checks import NEEDED, places_of
from penstock.core.errors import ClusterError
from penstock.core.wording.counted import counted
from penstock.train.parallel.launch import SETTLE_S
from penstock.train.parallel.rank_assignment import assign_ranks

# A cluster that grows by itself does so in this time; one that has too little now may not.
BUNDLES_WAIT_S = 30.0
PLACES_WAIT_S = 60.0
POLL_S = 1.0
HEAD_PORT = 6379
_HEAD = re.compile(r"[^/]+:\d+")


@final
class RayEngine(ClusterEngine):
    """The Ray cluster that this machine belongs to, or that RAY_ADDRESS names.

    Raises:
        ClusterError: Ray is not installed, or there is no cluster.
    """

    def __init__(self) -> None:
        connect_ray()

    def run(self, file: Path, start: int) -> Sequence[RankOutcome]:
        """See `ClusterEngine`."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        job = ClusterJob.read(file)
        with reserved(job) as group:
            actors = [_actor(ray, group, index, job, file) for index in range(job.size)]
            try:
                places = ray.get([actor.place.remote() for actor in actors], timeout=PLACES_WAIT_S)
                assigned = assign_ranks(places_of(places))
                tasks = {
                    actor.run.remote(str(file), start, asdict(assignment)): actor
                    for actor, assignment in zip(actors, assigned, strict=True)
                }
                return _outcomes(ray, list(tasks))
            except (RayError, GetTimeoutError):
                return []
            finally:
                for actor in actors:
                    ray.kill(actor)

    def close(self) -> None:
        """See `ClusterEngine`."""
        import ray

        ray.shutdown()


def connect_ray() -> None:
    """Connect to the Ray cluster that this machine belongs to, or that RAY_ADDRESS names.

    Raises:
        ClusterError: Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError:
        raise ClusterError("--on ray needs Ray; pip install 'penstock-nn[ray]'.") from None
    head = os.environ.get("RAY_ADDRESS", "")
    # Ray itself tries for minutes.
    if _HEAD.fullmatch(head) and (why := why_unreachable([head], HEAD_PORT)):
        raise ClusterError(_no_cluster(f"{head}: {why}"))
    try:
        ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=True)
    except Exception as error:  # noqa: BLE001 - Ray raises many kinds for a cluster that does not answer
        raise ClusterError(_no_cluster(" ".join(str(error).split())[:200])) from None


@contextmanager
def reserved(job: ClusterJob) -> Generator[Any]:
    """Reserve a placement group for a job, with a bundle for each process.

    Raises:
        ClusterError: The cluster has too little that is free.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundle: dict[str, float] = {"CPU": job.cores, **({"GPU": 1} if job.device == "cuda" else {})}
    group = placement_group([bundle] * job.size, strategy="PACK")
    try:
        if not ray.wait([group.ready()], timeout=BUNDLES_WAIT_S)[0]:
            raise ClusterError(_too_few(job, ray.cluster_resources(), ray.available_resources()))
        yield group
    finally:
        remove_placement_group(group)


def _no_cluster(why: str) -> str:
    return (
        f"there is no Ray cluster to reach from here ({why}); 'ray start' joins this machine to one, and RAY_ADDRESS "
        f"names one."
    )


def _outcomes(ray: Any, tasks: list[Any]) -> list[RankOutcome]:
    """Collect the ends of ranks, until all have ended or the first has failed and its victims have had their time."""
    from ray.exceptions import RayError

    found: list[RankOutcome] = []
    deadline_s: float | None = None
    while tasks and (deadline_s is None or time.monotonic() < deadline_s):
        ended, tasks = ray.wait(tasks, num_returns=1, timeout=POLL_S)
        for task in ended:
            try:
                outcome = RankOutcome.parse(ray.get(task))
            except RayError:
                # Gone with its machine or its worker.
                outcome = None
            found += [] if outcome is None else [outcome]
            if outcome is None or outcome.status:
                deadline_s = min(deadline_s or float("inf"), time.monotonic() + SETTLE_S)
    return found


def _actor(ray: Any, group: Any, index: int, job: ClusterJob, file: Path) -> Any:
    """Start the actor of a rank. A nested class is pickled by value, and needs nothing of Penstock at first."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    report = machine_report(str(file), job.paths, NEEDED)

    class Rank:
        def place(self) -> dict[str, Any]:
            import socket

            import ray

            address = ray.util.get_node_ip_address()
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.create_server((address, 0), family=family) as place:
                port = place.getsockname()[1]
            return {
                **report(),
                "machine": address,
                "address": address,
                "port": port,
                "has_own_gpu": bool(ray.get_gpu_ids()),
            }

        def run(self, job: str, start: int, assignment: dict[str, Any]) -> str:
            import os
            from pathlib import Path

            from penstock.cluster.rank_task import run_rank
            from penstock.train.parallel.rank_assignment import RankAssignment

            # Ray sets it to the cores of a task; a training chooses its threads itself.
            environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
            return run_rank(Path(job), start, RankAssignment(**assignment), environment).text()

    options: dict[str, Any] = {
        "num_cpus": job.cores,
        "num_gpus": 1 if job.device == "cuda" else 0,
        "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        ),
    }
    return ray.remote(Rank).options(**options).remote()


def _too_few(job: ClusterJob, there: dict[str, float], free: dict[str, float]) -> str:
    kind, each = ("GPU", 1) if job.device == "cuda" else ("CPU", job.cores)
    return (
        f"the Ray cluster has {free.get(kind, 0):g} of {there.get(kind, 0):g} {kind}s free, and "
        f"{counted(job.size, 'process needs', 'processes need')} {job.size * each}; ask for fewer processes, "
        f"add nodes, or wait for other jobs."
    )
