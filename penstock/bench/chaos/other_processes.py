"""Processor time of processes that are no part of a measurement.

A control process that only sleeps and wakes is served before any process that computes, so it does not see that others
take the core from a server that is busy.
"""

import os
import time
from pathlib import Path
from typing import final

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
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
        self._used_ticks = 0
        self._before = self._ticks()

    def look(self) -> None:
        """Count what they have used since the last look; one that began and ended between two looks is not seen."""
        now = self._ticks()
        self._used_ticks += sum(max(0, ticks - self._before.get(pid, 0)) for pid, ticks in now.items())
        self._before = now

    @property
    def cores(self) -> float:
        """Mean number of cores that they were seen to use, up to the last look."""
        return self._used_ticks / _TICKS_A_SECOND / max(1e-9, time.monotonic() - self._began_s)

    def _ticks(self) -> dict[int, int]:
        parents: dict[int, int] = {}
        ticks: dict[int, int] = {}
        for entry in self._processes.iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                # It has just ended.
                continue
            pid = int(entry.name)
            parents[pid] = int(fields[1])
            ticks[pid] = int(fields[11]) + int(fields[12])
        return {pid: used for pid, used in ticks.items() if not self._is_left_out(pid, parents)}

    def _is_left_out(self, pid: int, parents: dict[int, int]) -> bool:
        while pid in parents:
            if pid in (self._own, _KERNEL_THREADS):
                return True
            pid = parents[pid]
        return False
