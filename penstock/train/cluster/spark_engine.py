"""Training on Spark: one barrier task a rank. Spark cannot retry a failed barrier stage; the driver runs another one.

pyspark's TorchDistributor is not used: in version 4.3 it calls a run "finished" whose processes have failed.
"""

# It is installed for the tests of `make fleet` alone.
# pyright: reportMissingImports=false

import base64
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from penstock.core.errors import TrainError
from penstock.train.cluster.cluster_engine import ClusterEngine, why_unreachable
from penstock.train.cluster.job import ClusterJob
from penstock.train.cluster.outcome import RankOutcome
from penstock.train.cluster.task_checks import NEEDED, places_of

MASTER_PORT = 7077
# Executors come up in this time, and Spark looks this often whether they are enough.
SLOTS_WAIT_S, SLOTS_POLL_S = 30, 1
_OUTCOME = "PENSTOCK-OUTCOME"
_REASON = re.compile(r"^(?:Caused by: )?([\w.]*(?:Error|Exception): .+)$", re.MULTILINE)
_MARKED = re.compile(rf"{_OUTCOME}:([A-Za-z0-9+/=]+):")
# Errors of tasks that come again: their code fails, or their Python is not there.
_OWN_FAULTS = ("PythonException", "Cannot run program", "PYTHON_VERSION_MISMATCH")
_FEW_SLOTS = ("more slots than the total number of slots", "[SPARK-24819]", "BARRIER_STAGE")


@final
class SparkEngine(ClusterEngine):
    """A standalone cluster of Spark.

    Args:
        master: Its address, `spark://HOST:PORT`, or several with commas.
        python: The Python of its machines, as PYSPARK_PYTHON names it; by default the path of this one.

    Raises:
        TrainError: pyspark is not installed, or nothing listens there.
    """

    def __init__(self, master: str, python: str | None = None) -> None:
        if find_spec("pyspark") is None:
            raise TrainError(f"--on {master} needs pyspark; pip install 'penstock-nn[spark]'.")
        _check_reachable(master)
        self._master, self._python = master, python
        self._context: Any = None

    def run(self, file: Path, start: int) -> Sequence[RankOutcome]:
        """See `ClusterEngine`."""
        from py4j.protocol import Py4JError

        job = ClusterJob.read(file)
        task = _task(str(file), start, NEEDED, _OUTCOME)
        try:
            context = self._connected(job)
            found = context.parallelize(range(job.size), job.size).barrier().mapPartitions(task).collect()
        except Py4JError as error:
            return self._outcomes_of(job, str(error))
        wrong = [each for each in found if isinstance(each, dict)]
        if wrong:
            places_of(wrong)
        return [RankOutcome.parse(text) for text in found]

    def close(self) -> None:
        """See `ClusterEngine`."""
        if self._context is not None:
            self._context.stop()
            self._context = None

    def _outcomes_of(self, job: ClusterJob, said: str) -> Sequence[RankOutcome]:
        """Read the ends of processes from the error of a failed stage."""
        texts = {base64.b64decode(found).decode() for found in _MARKED.findall(said)}
        if texts:
            return [RankOutcome.parse(text) for text in texts]
        if any(words in said for words in _FEW_SLOTS):
            raise TrainError(
                f"{self._master} has fewer than {job.size} free slots of {job.cores} cores; ask for fewer processes, "
                f"add workers, or wait for other applications."
            )
        if self._context is None or self._context._jsc.sc().isStopped():
            # The master or this driver's connection to it is gone.
            self._context = None
            _check_reachable(self._master)
        if any(words in said for words in _OWN_FAULTS):
            raise TrainError(f"{self._master} cannot run the processes ({_reason(said)}).")
        # An executor is lost, or its Python process.
        return []

    def _connected(self, job: ClusterJob) -> Any:
        if self._context is None:
            from pyspark import SparkConf, SparkContext
            from pyspark.errors import PySparkException

            conf = SparkConf()
            for name, value in _settings(job).items():
                # spark-defaults.conf comes first.
                conf.setIfMissing(name, value)
            conf.setMaster(self._master)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._context = SparkContext(conf=conf)
            except PySparkException as error:
                raise TrainError(f"Spark does not start here ({_reason(str(error))}); is Java installed?") from None
            self._context.setLogLevel("ERROR")
            # pyspark takes PYSPARK_PYTHON, or else any python3.
            self._context.pythonExec = self._python or conf.get("spark.pyspark.python", sys.executable)
        return self._context


def _settings(job: ClusterJob) -> dict[str, str]:
    """Return Spark's configuration of a job: an executor of its own for each rank."""
    settings = {
        "spark.app.name": "penstock train",
        "spark.task.cpus": str(job.cores),
        "spark.executor.cores": str(job.cores),
        "spark.cores.max": str(job.cores * job.size),
        "spark.stage.maxConsecutiveAttempts": "1",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": f"{SLOTS_POLL_S}s",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": str(SLOTS_WAIT_S // SLOTS_POLL_S),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if job.device == "cuda":
        settings |= {"spark.executor.resource.gpu.amount": "1", "spark.task.resource.gpu.amount": "1"}
    return settings


def _task(job: str, start: int, needed: Sequence[str], marker: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Make the function of a task. A nested one is pickled by value, and needs nothing of Penstock at first."""

    def task(rows: Iterator[Any]) -> Iterator[Any]:
        import json
        import os
        import socket
        import sys
        from importlib.util import find_spec

        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        rank = context.partitionId()
        address = context.getTaskInfos()[rank].address.rpartition(":")[0].strip("[]")
        gpus = context.resources().get("gpu")
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as place:
            port = place.getsockname()[1]
        here = {
            "host": socket.gethostname(),
            "python": sys.executable,
            "missing": [name for name in needed if find_spec(name) is None],
            "job": job,
            "sees_job": os.path.isfile(job),
            "machine": address,
            "address": address,
            "port": port,
            "has_own_gpu": gpus is not None,
        }
        found = [json.loads(text) for text in context.allGather(json.dumps(here))]
        if any(each["missing"] or not each["sees_job"] for each in found):
            yield here
            return
        import base64
        from pathlib import Path

        from penstock.train.cluster.rank_task import run_rank
        from penstock.train.cluster.task_checks import places_of
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


def _check_reachable(master: str) -> None:
    if why := why_unreachable(master.removeprefix("spark://").split(","), MASTER_PORT):
        raise TrainError(f"no Spark master answers at {master} ({why}); start one, or correct --on spark://HOST:PORT.")


def _reason(said: str) -> str:
    """Return the innermost reason in an error of the JVM, without its stack."""
    return next(reversed(_REASON.findall(said)), " ".join(said.split()))[:300]
