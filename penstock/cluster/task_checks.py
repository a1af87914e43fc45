"""Checks of the machines of tasks, which report them before any rank starts. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import ClusterError
from penstock.train.parallel.rank_assignment import RankPlace

# Modules that the Python of every task has.
NEEDED = ("penstock", "torch")


def places_of(found: Sequence[Mapping[str, Any]]) -> list[RankPlace]:
    """Return the places of all tasks, in the order of their ranks.

    Args:
        found: What each task says: its `machine_report`, and the fields of its `RankPlace`.

    Raises:
        ClusterError: A machine has no Penstock or no torch, or does not see the folder of the run.
    """
    check_machines(found)
    names = RankPlace.__slots__
    return [RankPlace(**{name: each[name] for name in names}) for each in found]


def check_machines(found: Sequence[Mapping[str, Any]]) -> None:
    """Check that tasks can run.

    Args:
        found: The `machine_report` of each task.

    Raises:
        ClusterError: A machine has no Penstock or no torch, or does not see the folder of the run or another path.
    """
    for each in found:
        if each["missing"]:
            names = " and no ".join(each["missing"])
            raise ClusterError(
                f"the Python of the cluster on {each['host']} ({each['python']}) has no {names}; install the same "
                f"environment on all machines, or name its Python to the engine."
            )
    for path in dict.fromkeys(path for each in found for path in each["unseen"]):
        hosts = ", ".join(sorted({each["host"] for each in found if path in each["unseen"]}))
        if path == found[0]["job"]:
            raise ClusterError(
                f"{hosts} does not see {path}; give an --out in a folder that all machines share "
                f"(for a URL, set PENSTOCK_CACHE to one)."
            )
        raise ClusterError(f"{hosts} does not see {path}; put it into a folder that all machines share.")
