"""Scoring on Spark: ordinary tasks, so that its own retries and speculation apply."""

# It is installed for the tests of `make fleet` alone.
# pyright: reportMissingImports=false

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

from penstock.cluster.job import ClusterJob
from penstock.cluster.machine_report import machine_report
from penstock.cluster.spark_connection import (
    SLOTS_POLL_S,
    SLOTS_WAIT_S,
    SparkConnection,
    java_errors,
    reason_of,
)
from penstock.cluster.task_checks import NEEDED
from penstock.cluster.units_engine import LOSSES, POLL_S, UnitsEngine, tasks_of, units_done, units_task
from penstock.cluster.units_task import passing_sentence
from penstock.core.errors import ClusterError


@final
class SparkUnits(UnitsEngine):
    """A standalone cluster of Spark.

    Args:
        master: See `SparkConnection`.
        python: See `SparkConnection`.

    Raises:
        ClusterError: pyspark is not installed, or nothing listens there.
    """

    def __init__(self, master: str, python: str | None = None) -> None:
        self._spark = SparkConnection(master, python)

    def run(self, file: Path, units: Sequence[int], done: Callable[[int], object]) -> None:
        """See `UnitsEngine`."""
        try:
            error = self._run(file, units, done)
        except java_errors() as failure:
            error = str(failure)
        if error:
            self._fail(error)

    def _run(self, file: Path, units: Sequence[int], done: Callable[[int], object]) -> str:
        """Run the stage; return the text of its error, empty without one."""
        job = ClusterJob.read(file)
        context = self._spark.context(job, {"spark.task.maxFailures": str(LOSSES)})
        self._wait_for_slots(context, job)
        stage = _Stage(context, units_task(machine_report(str(file), job.paths, NEEDED)), tasks_of(units))
        try:
            while stage.is_alive:
                stage.wait()
                for said in stage.said():
                    done(units_done(said))
        finally:
            stage.end()
        # What came while the stage ended.
        for said in stage.said():
            done(units_done(said))
        return stage.error

    def close(self) -> None:
        """See `UnitsEngine`."""
        self._spark.close()

    def _wait_for_slots(self, context: Any, job: ClusterJob) -> None:
        deadline_s = time.monotonic() + SLOTS_WAIT_S
        # The driver is one of those that are counted.
        while len(context._jsc.sc().statusTracker().getExecutorInfos()) <= job.size:
            if time.monotonic() > deadline_s:
                self._spark.check_alive()
                raise self._spark.few_slots(job)
            time.sleep(min(SLOTS_POLL_S, POLL_S))

    def _fail(self, said: str) -> None:
        if sentence := passing_sentence(said):
            raise ClusterError(sentence)
        self._spark.check_alive()
        self._spark.check_own_fault(said)
        raise ClusterError(
            f"Spark gave up a unit after {LOSSES} attempts ({reason_of(said)}); the same command goes on from here."
        )


@final
class _Stage:
    """A stage that runs beside the thread that follows it."""

    def __init__(
        self, context: Any, score: Callable[[Sequence[int]], dict[str, Any]], tasks: Sequence[Sequence[int]]
    ) -> None:
        self._context, self._said = context, context.accumulator([], _gathered())
        self._read = 0
        self.error = ""
        rows, task = context.parallelize(tasks, len(tasks)), _task(score, self._said)
        self._thread = threading.Thread(target=self._run, args=(rows, task), name="spark-stage", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True until the stage has ended."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait a moment for its end."""
        self._thread.join(POLL_S)

    def said(self) -> Sequence[Any]:
        """Return what tasks have said since the last call; of each task once, also where it ran twice."""
        found = self._said.value[self._read :]
        self._read += len(found)
        return found

    def end(self) -> None:
        """End the stage, if it still runs."""
        while self._thread.is_alive():
            try:
                self._context.cancelAllJobs()
            except (*java_errors(), OSError, AttributeError):
                # The context has stopped, and its stages with it.
                return
            self._thread.join(POLL_S)

    def _run(self, rows: Any, task: Callable[[Iterator[Any]], None]) -> None:
        try:
            rows.foreachPartition(task)
        except Exception as error:  # noqa: BLE001 - Py4J raises many kinds where the JVM is gone; the text tells them apart
            self.error = str(error) or type(error).__name__


def _gathered() -> Any:
    """Make what adds up the words of tasks. A nested class is pickled by value."""
    from pyspark import AccumulatorParam

    class Gathered(AccumulatorParam):  # pyright: ignore[reportUntypedBaseClass]
        def zero(self, value: list[Any]) -> list[Any]:
            return []

        def addInPlace(self, value1: list[Any], value2: list[Any]) -> list[Any]:  # noqa: N802 - Spark's name
            return value1 + value2

    return Gathered()


def _task(score: Callable[[Sequence[int]], dict[str, Any]], said: Any) -> Callable[[Iterator[Any]], None]:
    """Make the function of a task. A nested one is pickled by value, and needs nothing of Penstock at first."""

    def task(rows: Iterator[Any]) -> None:
        import os

        from pyspark import TaskContext

        context = TaskContext.get()
        gpus = context.resources().get("gpu") if context is not None else None
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)
        for units in rows:
            said.add([score(units)])

    return task
