"""Checks of the places of tasks, which they report before any rank starts. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core.errors import ClusterError
from penstock.train.parallel.rank_assignment import RankPlace

# In every task, by value: it may run where Penstock is not installed, so it names no module of it.
NEEDED = ("penstock", "torch")


def places_of(found: Sequence[Mapping[str, Any]]) -> list[RankPlace]:
    """Return the places of all tasks, in the order of their ranks.

    Args:
        found: What each task says: see `check_machines`, and the fields of its `RankPlace`.

    Raises:
        ClusterError: A machine has no Penstock or no torch, or does not see the folder of the run.
    """
    check_machines(found)
    names = RankPlace.__slots__
    return [RankPlace(**{name: each[name] for name in names}) for each in found]


def check_machines(found: Sequence[Mapping[str, Any]]) -> None:
    """Check that tasks can run.

    Args:
        found: What each task says: `host`, `python`, `missing` (modules), `job` (the file of the record), `sees_job`.

    Raises:
        ClusterError: A machine has no Penstock or no torch, or does not see the folder of the run.
    """
    check_modules(found)
    if unseen := sorted({each["host"] for each in found if not each["sees_job"]}):
        raise ClusterError(
            f"{', '.join(unseen)} does not see {found[0]['job']}; give an --out in a folder that all machines share "
            f"(for a URL, set PENSTOCK_CACHE to one)."
        )


def check_modules(found: Sequence[Mapping[str, Any]]) -> None:
    """Check that the Python of each task has what it needs.

    Args:
        found: What each task says: `host`, `python`, and `missing`.

    Raises:
        ClusterError: One has no Penstock or no torch.
    """
    for each in found:
        if each["missing"]:
            names = " and no ".join(each["missing"])
            raise ClusterError(
                f"the Python of the cluster on {each['host']} ({each['python']}) has no {names}; install the same "
                f"environment on all machines, or name its Python to the engine."
            )
