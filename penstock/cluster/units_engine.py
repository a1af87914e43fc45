"""Scoring on a cluster: the engine runs tasks that take units each, and runs again those that were lost."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.cluster.task_checks import check_machines
from penstock.core.errors import ClusterError

# An engine keeps a record of each task; beyond that many, tasks take several units.
MAX_TASKS = 10_000
# Times that a unit may be lost with its process before the run fails.
LOSSES = 8
POLL_S = 0.2


class UnitsEngine(ABC):
    """Scores units in tasks of its own."""

    @abstractmethod
    def run(self, file: Path, units: Sequence[int], done: Callable[[int], object]) -> None:
        """Score all units of a job.

        Args:
            file: The record of the job.
            units: Their places in the plan.
            done: Called with the number of units that were scored.

        Raises:
            ClusterError: The cluster cannot run the job, or the application failed.
        """

    def close(self) -> None:  # noqa: B027 - not every engine holds something
        """Let go of the cluster."""


def tasks_of(units: Sequence[int], most: int = MAX_TASKS) -> list[list[int]]:
    """Share units out to tasks: one each, or a few neighbours where there are many.

    Args:
        units: Their places.
        most: The most tasks.
    """
    each = -(-len(units) // most) or 1
    return [list(units[begin : begin + each]) for begin in range(0, len(units), each)]


def units_task(report: Callable[[], dict[str, Any]], kept: bool = False) -> Callable[[Sequence[int]], dict[str, Any]]:
    """Return the function with which a task scores units. It is pickled by value, as `machine_report`'s is.

    Args:
        report: That of `machine_report`.
        kept: The engine keeps the process of a task that failed.

    Returns:
        A function of the units' places in the plan; `units_done` reads what it returns.
    """

    def score(units: Sequence[int]) -> dict[str, Any]:
        place = report()
        if not place["fit"]:
            return {"place": place}
        from pathlib import Path

        from penstock.cluster.units_task import score_units, score_units_or_end

        return dict((score_units_or_end if kept else score_units)(Path(place["job"]), units))

    return score


def units_done(said: Mapping[str, Any]) -> int:
    """Return the number of units that a task has scored.

    Args:
        said: What `units_task.score_units` returned, or `place`, the report of a machine that cannot score.

    Raises:
        ClusterError: The machine cannot score, or the application failed.
    """
    if "place" in said:
        check_machines([said["place"]])
    if said["error"]:
        raise ClusterError(said["error"])
    return said["units"]
