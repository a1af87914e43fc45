"""Processes of this machine, as Linux shows them in /proc/PID/stat, see proc_pid_stat(5)."""

import os
from dataclasses import dataclass
from pathlib import Path

# From <linux/sched.h>: the process is ending, and may still hold its files.
_PF_EXITING = 0x4
# Indices of the fields that follow the name.
_STATE, _PARENT, _FLAGS, _USER_TICKS, _SYSTEM_TICKS = 0, 1, 6, 11, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStat:
    """A process at one moment.

    Args:
        state: One letter: `R` (running), `S` (sleeping), `Z` (ended and not waited for) and others.
        parent: Process ID of its parent.
        flags: The kernel's flags, `PF_*`.
        cpu_s: User and system time that it has used, in seconds, with an accuracy of some 10 ms.
    """

    state: str
    parent: int
    flags: int
    cpu_s: float

    @property
    def ended(self) -> bool:
        """True if it has ended; it may not have been waited for."""
        return self.state in ("Z", "X")

    @property
    def exiting(self) -> bool:
        """True if it has ended or is about to."""
        return self.ended or bool(self.flags & _PF_EXITING)


def read_stat(process: int, processes: Path = Path("/proc")) -> ProcessStat | None:
    """Read a process.

    Args:
        process: Its ID.
        processes: The folder of the kernel's files about processes.

    Returns:
        None if there is none with this ID, or the machine has no /proc.
    """
    try:
        content = (processes / str(process) / "stat").read_bytes()
    except OSError:
        return None
    # The name before these fields stands in parentheses and may hold any bytes, such as spaces and parentheses.
    fields = content.rpartition(b")")[2].split()
    return ProcessStat(
        state=fields[_STATE].decode(),
        parent=int(fields[_PARENT]),
        flags=int(fields[_FLAGS]),
        cpu_s=(int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / os.sysconf("SC_CLK_TCK"),
    )


def is_running(process: int) -> bool:
    """Tell whether a process runs; one that has ended and was not waited for does not."""
    stat = read_stat(process)
    return stat is not None and not stat.ended


def cpu_seconds(process: int) -> float:
    """Return the user and system time that a process has used, in seconds; 0 if it is gone."""
    stat = read_stat(process)
    return 0.0 if stat is None else stat.cpu_s
