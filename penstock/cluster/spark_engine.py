"""Training on Spark: one barrier task a rank. Spark cannot retry a failed barrier stage; the driver runs another one.

pyspark's TorchDistributor is not used: in version 4.3 it calls a run "finished" whose processes have failed.
"""

# It is installed for the tests of `make fleet` alone.
# pyright: reportMissingImports=false

import base64
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

from penstock.cluster.cluster_engine import ClusterEngine
from penstock.cluster.job import ClusterJob
from penstock.cluster.machine_report import machine_report
from penstock.cluster.outcome import RankOutcome
from penstock.cluster.spark_connection import SLOTS_POLL_S, SLOTS_WAIT_S, SparkConnection, java_errors
from penstock.cluster.task_checks import NEEDED, places_of

_OUTCOME = "PENSTOCK-OUTCOME"
_MARKED = re.compile(rf"{_OUTCOME}:([A-Za-z0-9+/=]+):")
_FEW_SLOTS = ("more slots than the total number of slots", "[SPARK-24819]", "BARRIER_STAGE")


@final
class SparkEngine(ClusterEngine):
    """A standalone cluster of Spark.

    Args:
        master: See `SparkConnection`.
        python: See `SparkConnection`.

    Raises:
        ClusterError: pyspark is not installed, or nothing listens there.
    """

    def __init__(self, master: str, python: str | None = None) -> None:
        self._spark = SparkConnection(master, python)

    def run(self, file: Path, start: int) -> Sequence[RankOutcome]:
        """See `ClusterEngine`."""
        job = ClusterJob.read(file)
        task = _task(str(file), start, machine_report(str(file), job.paths, NEEDED), _OUTCOME)
        try:
            context = self._spark.context(job, _BARRIER_SETTINGS)
            found = context.parallelize(range(job.size), job.size).barrier().mapPartitions(task).collect()
        except java_errors() as error:
            return self._outcomes_of(job, str(error))
        wrong = [each for each in found if isinstance(each, dict)]
        if wrong:
            places_of(wrong)
        return [RankOutcome.parse(text) for text in found]

    def close(self) -> None:
        """See `ClusterEngine`."""
        self._spark.close()

    def _outcomes_of(self, job: ClusterJob, said: str) -> Sequence[RankOutcome]:
        """Read the ends of processes from the error of a failed stage."""
        texts = {base64.b64decode(found).decode() for found in _MARKED.findall(said)}
        if texts:
            return [RankOutcome.parse(text) for text in texts]
        if any(words in said for words in _FEW_SLOTS):
            raise self._spark.few_slots(job)
        self._spark.check_alive()
        self._spark.check_own_fault(said)
        # An executor is lost, or its Python process.
        return []


_BARRIER_SETTINGS = {
    "spark.stage.maxConsecutiveAttempts": "1",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": f"{SLOTS_POLL_S}s",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": str(SLOTS_WAIT_S // SLOTS_POLL_S),
}


def _task(
    job: str, start: int, report: Callable[[], dict[str, Any]], marker: str
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Make the function of a task. A nested one is pickled by value, and needs nothing of Penstock at first."""

    def task(rows: Iterator[Any]) -> Iterator[Any]:
        import json
        import os
        import socket

        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        rank = context.partitionId()
        address = context.getTaskInfos()[rank].address.rpartition(":")[0].strip("[]")
        gpus = context.resources().get("gpu")
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as place:
            port = place.getsockname()[1]
        here = {
            **report(),
            "machine": address,
            "address": address,
            "port": port,
            "has_own_gpu": gpus is not None,
        }
        found = [json.loads(text) for text in context.allGather(json.dumps(here))]
        if not all(each["fit"] for each in found):
            yield here
            return
        import base64
        from pathlib import Path

        from penstock.cluster.rank_task import run_rank
        from penstock.cluster.task_checks import places_of
        from penstock.train.parallel.rank_assignment import assign_ranks

        environment = dict(os.environ)
        # Spark sets it to the cores of a task; a training chooses its threads itself.
        environment.pop("OMP_NUM_THREADS", None)
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)
        outcome = run_rank(Path(job), start, assign_ranks(places_of(found))[rank], environment)
        if outcome.status:
            # Ends the other tasks at once; the driver finds the outcome in the error.
            raise RuntimeError(f"{marker}:{base64.b64encode(outcome.text().encode()).decode()}:")
        yield outcome.text()

    return task
