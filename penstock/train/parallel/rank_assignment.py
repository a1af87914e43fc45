"""Ranks of a process: Penstock's own launcher, torchrun, Slurm, Spark and Ray end in the same record. No torch.

Launchers that start processes put ranks into the environment, and `rank_assignment` reads them. Spark and Ray start
tasks, which know only where they run: `assign_ranks` makes their ranks, and each passes its own on by `environment`.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.core.errors import TrainError

# Set beside torchrun's variables where the launcher shows each process a single GPU, its own.
OWN_GPU_VARIABLE = "PENSTOCK_OWN_GPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAssignment:
    """Rank of a process, as its launcher assigned it.

    Args:
        rank: The rank among all processes.
        size: The number of processes.
        local_rank: The rank among the processes of this machine.
        local_size: The number of processes on this machine.
        address: The address where rank 0 listens.
        port: The port where rank 0 listens.
        has_own_gpu: True where the launcher shows each process a single GPU, its own.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    has_own_gpu: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size):
            raise TrainError(
                f"the environment says rank {self.rank} of {self.size} and local rank {self.local_rank} of "
                f"{self.local_size}; ranks begin at 0 and stay below the counts."
            )

    def environment(self) -> dict[str, str]:
        """Return the variables from which `rank_assignment` reads this record: torchrun's, and one of our own."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            OWN_GPU_VARIABLE: int(self.has_own_gpu),
        }
        return {name: str(value) for name, value in values.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Place where the task of a rank runs, as it reports itself.

    Args:
        machine: Equal for tasks of one machine.
        address: The machine's address for the other tasks.
        port: A free port there.
        has_own_gpu: True where the task sees a single GPU, its own.
    """

    machine: str
    address: str
    port: int
    has_own_gpu: bool = False


def assign_ranks(places: Sequence[RankPlace]) -> list[RankAssignment]:
    """Assign ranks to tasks in their order; rank 0 listens at its own address and port.

    Args:
        places: The place of each task.
    """
    local_sizes, started = Counter(place.machine for place in places), Counter[str]()
    assigned: list[RankAssignment] = []
    for rank, place in enumerate(places):
        assigned.append(
            RankAssignment(
                rank=rank,
                size=len(places),
                local_rank=started[place.machine],
                local_size=local_sizes[place.machine],
                address=places[0].address,
                port=places[0].port,
                has_own_gpu=place.has_own_gpu,
            )
        )
        started[place.machine] += 1
    return assigned


def rank_assignment(environment: Mapping[str, str]) -> RankAssignment | None:
    """Say which rank and local rank this process has; None where no launcher gave it any.

    Read are torchrun's variables, which Penstock's own launcher and the tasks on Spark and Ray set too, and those of
    Slurm's srun.

    Raises:
        TrainError: A variable is no whole number, or they contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _of_torchrun(environment)
    # Set by srun alone: a batch script has SLURM_NTASKS and is one process.
    if _number(environment, "SLURM_STEP_NUM_TASKS", "1") > 1:
        return _of_slurm(environment)
    return None


def _of_torchrun(environment: Mapping[str, str]) -> RankAssignment:
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    return RankAssignment(
        rank=rank,
        size=size,
        local_rank=_number(environment, "LOCAL_RANK", str(rank)),
        local_size=_number(environment, "LOCAL_WORLD_SIZE", str(size)),
        address=environment.get("MASTER_ADDR", "127.0.0.1"),
        port=_number(environment, "MASTER_PORT", "29500"),
        has_own_gpu=_number(environment, OWN_GPU_VARIABLE, "0") == 1,
    )


def _of_slurm(environment: Mapping[str, str]) -> RankAssignment:
    """Read srun's variables; rank 0 is on the first host of the step. MASTER_ADDR and MASTER_PORT come before these."""
    size = _number(environment, "SLURM_STEP_NUM_TASKS")
    each = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    node = _number(environment, "SLURM_NODEID", "0")
    local_size = each[node] if node < len(each) else size
    # Two steps of a job may run on one host.
    job, step = _number(environment, "SLURM_JOB_ID", "0"), _number(environment, "SLURM_STEP_ID", "0")
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return RankAssignment(
        rank=_number(environment, "SLURM_PROCID"),
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID"),
        local_size=local_size,
        address=environment.get("MASTER_ADDR") or _first_host(environment.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        port=_number(environment, "MASTER_PORT", str(15_000 + (job + 97 * step) % 20_000)),
        has_own_gpu=local_size > 1 and len(visible) == 1 and visible != [""],
    )


def _tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's `8(x2),4` to 8, 8, 4."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, nodes in found for _ in range(int(nodes or 1))]


def _first_host(text: str) -> str:
    """Return the first host of Slurm's `gpu[03-07,12],login`: `gpu03`."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", text)
    return "".join(part or "" for part in found.groups()) if found else text


def _number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    text = environment.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise TrainError(f"the environment has {name}={text!r}; it must be a whole number.") from None
