"""The connection to a standalone cluster of Spark, and what its errors mean."""

# It is installed for the tests of `make fleet` alone.
# pyright: reportMissingImports=false

import re
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, final

from penstock.cluster.cluster_engine import why_unreachable
from penstock.cluster.job import ClusterJob
from penstock.core.errors import ClusterError
from penstock.core.wording.counted import counted

MASTER_PORT = 7077
# Executors come up in this time, and Spark looks this often whether they are enough.
SLOTS_WAIT_S, SLOTS_POLL_S = 30, 1
_SETTINGS = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
_REASON = re.compile(r"^(?:Caused by: )?([\w.]*(?:Error|Exception): .+)$", re.MULTILINE)
# Errors of tasks that come again: their code fails, or their Python is not there.
_OWN_FAULTS = ("PythonException", "Cannot run program", "PYTHON_VERSION_MISMATCH")


@final
class SparkConnection:
    """A standalone cluster of Spark.

    Args:
        master: Its address, `spark://HOST:PORT`, or several with commas.
        python: The Python of its machines, as PYSPARK_PYTHON names it; by default the path of this one.

    Raises:
        ClusterError: pyspark is not installed, or nothing listens there.
    """

    def __init__(self, master: str, python: str | None = None) -> None:
        if find_spec("pyspark") is None:
            raise ClusterError(f"--on {master} needs pyspark; pip install 'penstock-nn[spark]'.")
        _check_reachable(master)
        self.master, self._python = master, python
        self._context: Any = None

    def context(self, job: ClusterJob, settings: Mapping[str, str]) -> Any:
        """Return Spark's context, made at the first call.

        Args:
            job: The job.
            settings: Further configuration; spark-defaults.conf comes first.

        Raises:
            ClusterError: Spark does not start here.
        """
        if self._context is None:
            from pyspark import SparkConf, SparkContext
            from pyspark.errors import PySparkException
            from pyspark.java_gateway import launch_gateway

            try:
                gateway = SparkContext._gateway or launch_gateway()
            except PySparkException as error:
                raise _does_not_start(error) from None
            # The driver's JVM has read spark-defaults.conf; pyspark itself does not read it.
            conf = SparkConf(_jvm=gateway.jvm)
            for name, value in {**_SETTINGS, "spark.app.name": f"penstock {job.command}", **settings}.items():
                conf.setIfMissing(name, value)
            for name, value in executor_settings(job).items():
                conf.set(name, value)
            conf.setMaster(self.master)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._context = SparkContext(conf=conf, gateway=gateway)
            except PySparkException as error:
                raise _does_not_start(error) from None
            self._context.setLogLevel("ERROR")
            # pyspark takes PYSPARK_PYTHON, or else any python3.
            self._context.pythonExec = self._python or conf.get("spark.pyspark.python", sys.executable)
        return self._context

    def check_alive(self) -> None:
        """Forget a context that has stopped.

        Raises:
            ClusterError: The master or the driver is gone.
        """
        from pyspark import SparkContext

        try:
            # The driver may have ended before there was a context.
            if SparkContext._jvm is not None:
                SparkContext._jvm.java.lang.System.nanoTime()
            stopped = self._context is None or self._context._jsc.sc().isStopped()
        except java_errors():
            self.close()
            raise ClusterError(
                "Spark's driver, a Java process on this machine, has ended; see that it has enough memory, and give "
                "the same command again."
            ) from None
        if stopped:
            # The master or this driver's connection to it is gone.
            self._context = None
            _check_reachable(self.master)

    def check_own_fault(self, said: str) -> None:
        """Check that an error of a stage may pass.

        Args:
            said: Its text.

        Raises:
            ClusterError: The code of the tasks fails, or their Python is not there.
        """
        if any(words in said for words in _OWN_FAULTS):
            raise ClusterError(f"{self.master} cannot run the processes ({reason_of(said)}).")

    def few_slots(self, job: ClusterJob) -> ClusterError:
        """Return the error for a cluster without enough free slots for a job."""
        return ClusterError(
            f"{self.master} has fewer than {counted(job.size, 'free slot')} of {counted(job.cores, 'core')}; "
            f"ask for fewer processes, add workers, or wait for other applications."
        )

    def close(self) -> None:
        """Let go of the cluster."""
        if self._context is not None:
            with warnings.catch_warnings(), suppress(*java_errors()):
                warnings.simplefilter("ignore")
                self._context.stop()
            self._context = None


def java_errors() -> tuple[type[Exception], ...]:
    """Return the errors of calls into Java: its own, and those of a process that is gone."""
    from py4j.protocol import Py4JError

    # Py4J turns those of an open connection into its own, but not this one of a new connection.
    return Py4JError, ConnectionRefusedError


def executor_settings(job: ClusterJob) -> dict[str, str]:
    """Return what a job needs of Spark's configuration, whatever spark-defaults.conf says: an executor a process."""
    settings = {
        "spark.task.cpus": str(job.cores),
        "spark.executor.cores": str(job.cores),
        "spark.cores.max": str(job.cores * job.size),
        "spark.dynamicAllocation.enabled": "false",
    }
    if job.device == "cuda":
        settings |= {"spark.executor.resource.gpu.amount": "1", "spark.task.resource.gpu.amount": "1"}
    return settings


def _does_not_start(error: Exception) -> ClusterError:
    return ClusterError(f"Spark does not start here ({reason_of(str(error))}); is Java installed?")


def _check_reachable(master: str) -> None:
    if why := why_unreachable(master.removeprefix("spark://").split(","), MASTER_PORT):
        raise ClusterError(
            f"no Spark master answers at {master} ({why}); start one, or correct --on spark://HOST:PORT."
        )


def reason_of(said: str) -> str:
    """Return the innermost reason in an error of the JVM, without its stack."""
    return next(reversed(_REASON.findall(said)), " ".join(said.split()))[:300]
