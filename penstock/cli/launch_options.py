"""The number of training processes and their devices: from the options, the launcher's variables and the machine."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.core.errors import TrainError
from penstock.core.wording.counted import counted
from penstock.train.parallel.rank_assignment import RankAssignment, rank_assignment

TIMEOUT_S = 600.0
# Each process loads torch and waits in memory for the others.
MAX_PROCESSES_PER_CORE = 8
_MASTER = re.compile(r"spark://[^\s/]+")

Device = Literal["cpu", "cuda"]


class Accepted(NamedTuple):
    """Changes since the beginning of a run that the user accepts: of the application's sources, of the examples."""

    app: bool
    data: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """Number of processes, and their device.

    Args:
        device: Device of each process.
        count: Number of processes on this machine; None where neither an option nor the GPUs say it.
        assignment: Ranks of this process; None if no launcher started it.
        timeout_s: Seconds to wait for other processes.
        chosen: True where an option named the device or the number.
    """

    device: Device
    count: int | None
    assignment: RankAssignment | None
    timeout_s: float
    chosen: bool

    @property
    def is_launcher(self) -> bool:
        """True if this process starts the training processes and is none of them."""
        return self.assignment is None and (self.count or 1) > 1


def launch_options(
    device: str | None,
    gpus: int | None,
    processes: int | None,
    timeout_s: float | None,
    environment: Mapping[str, str],
    visible_gpus: Callable[[], int],
) -> LaunchOptions:
    """Choose processes and devices: what the options say, and otherwise all GPUs that there are.

    Args:
        device: `"cpu"`, `"cuda"`, or None to take GPUs where there are some.
        gpus: Number of GPUs of this machine; None if not given.
        processes: Number of processes on the CPU; None if not given.
        timeout_s: Seconds to wait for other processes; None for the default.
        environment: Environment of this process, with the variables of its launcher.
        visible_gpus: Counts the GPUs that torch sees; called only where no option says the device.

    Raises:
        TrainError: Options contradict each other, the launcher or the machine.
    """
    _check(device, gpus, processes, timeout_s, max_count=MAX_PROCESSES_PER_CORE * (os.cpu_count() or 1))
    count = gpus if gpus is not None else processes
    assignment = rank_assignment(environment)
    if assignment is not None and count is not None and count != assignment.local_size:
        raise TrainError(
            f"{counted(count, 'process is', 'processes are')} requested, but the launcher of this one started "
            f"{assignment.local_size} on this machine; omit the option, or make the numbers equal."
        )
    chosen = device is not None or count is not None
    if processes is not None or device == "cpu":
        found: Device = "cpu"
    elif gpus is not None:
        found = "cuda"
    else:
        visible = visible_gpus()
        if device == "cuda" and not visible:
            from penstock.runtime.gpu.devices import no_gpu_remedy

            raise TrainError(f"--device is cuda, but this torch sees no GPU{no_gpu_remedy('give --device cpu')}.")
        found = "cuda" if visible else "cpu"
        if visible and assignment is None:
            count = visible
    return LaunchOptions(
        device=found, count=count, assignment=assignment, timeout_s=timeout_s or TIMEOUT_S, chosen=chosen
    )


def cluster_options(
    on: str,
    device: str | None,
    gpus: int | None,
    processes: int | None,
    timeout_s: float | None,
    environment: Mapping[str, str],
) -> LaunchOptions:
    """Choose processes and devices of a cluster.

    Args:
        on: The cluster, as `--on` names it.
        device: `"cpu"` or `"cuda"`; None if not given.
        gpus: Number of GPUs of all machines together, one process each; None if not given.
        processes: Number of processes on CPUs of all machines together; None if not given.
        timeout_s: Seconds to wait for other processes; None for the default.
        environment: Environment of this process.

    Raises:
        TrainError: There is no such kind of cluster, options contradict each other, the number is missing, or a
            launcher started this process.
    """
    if on not in ("slurm", "ray") and not _MASTER.fullmatch(on):
        raise TrainError(f"--on is {on!r}; give slurm, ray or spark://HOST:PORT.")
    _check(device, gpus, processes, timeout_s, max_count=None)
    if rank_assignment(environment) is not None:
        raise TrainError(
            f"a launcher started this process as one of several; omit --on {on}, which starts them itself."
        )
    count = gpus if gpus is not None else processes
    if count is None:
        raise TrainError(
            f"--on {on} needs the number of processes on all machines together; give --gpus N (one process each) or "
            f"--processes N."
        )
    return LaunchOptions(
        device="cpu" if gpus is None else "cuda",
        count=count,
        assignment=None,
        timeout_s=timeout_s or TIMEOUT_S,
        chosen=True,
    )


def _check(
    device: str | None, gpus: int | None, processes: int | None, timeout_s: float | None, *, max_count: int | None
) -> None:
    if device not in (None, "cpu", "cuda"):
        raise TrainError(f"--device is {device!r}; choose cpu or cuda.")
    if gpus is not None and processes is not None:
        raise TrainError(f"--gpus {gpus} and --processes {processes} contradict each other; give one of them.")
    for other, name, count in (("cpu", "--gpus", gpus), ("cuda", "--processes", processes)):
        if device == other and count is not None:
            raise TrainError(f"--device {device} and {name} {count} contradict each other; give one of them.")
    count = gpus if gpus is not None else processes
    if count is not None and count < 1:
        raise TrainError(f"{count} processes are requested; give at least 1.")
    if count is not None and max_count is not None and count > max_count:
        raise TrainError(
            f"{count:,} processes are requested, too many for the {counted(os.cpu_count() or 1, 'core')} of this "
            f"machine; give at most {max_count}."
        )
    if timeout_s is not None and not timeout_s > 0:
        raise TrainError(f"--timeout-s is {timeout_s:g}; it must be above 0.")
