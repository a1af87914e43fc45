"""Processor time of processes that are no part of a measurement.

A control process that only sleeps and wakes is served before any process that computes, so it does not see that others
take the core from a server that is busy.
"""

import time
from pathlib import Path
from typing import final

from penstock.core.machine.process_stat import ProcessStat, read_stat

# The parent of all kernel threads, whose work may be the server's own.
_KERNEL_THREADS = 2


@final
class OtherProcesses:
    """The processes beside a process and its descendants, from construction on.

    Args:
        own: The process.
        processes: The folder of the kernel's files about processes.
    """

    def __init__(self, own: int, processes: Path = Path("/proc")) -> None:
        self._own = own
        self._processes = processes
        self._began_s = time.monotonic()
        self._used_s = 0.0
        self._before_s = self._cpu_s()

    def look(self) -> None:
        """Count what they have used since the last look; one that began and ended between two looks is not seen."""
        now_s = self._cpu_s()
        self._used_s += sum(max(0.0, used_s - self._before_s.get(pid, 0.0)) for pid, used_s in now_s.items())
        self._before_s = now_s

    @property
    def cores(self) -> float:
        """Mean number of cores that they were seen to use, up to the last look."""
        return self._used_s / max(1e-9, time.monotonic() - self._began_s)

    def _cpu_s(self) -> dict[int, float]:
        """Processor time of each, by process ID."""
        stats: dict[int, ProcessStat] = {}
        for entry in self._processes.iterdir():
            # Without those that have just ended.
            if entry.name.isdigit() and (stat := read_stat(int(entry.name), self._processes)) is not None:
                stats[int(entry.name)] = stat
        return {pid: stat.cpu_s for pid, stat in stats.items() if not self._is_left_out(pid, stats)}

    def _is_left_out(self, pid: int, stats: dict[int, ProcessStat]) -> bool:
        while pid in stats:
            if pid in (self._own, _KERNEL_THREADS):
                return True
            pid = stats[pid].parent
        return False
