"""Load of processor cores, from the kernel's counters: a generator on busy cores measures its own delays."""

import os
from pathlib import Path
from typing import final

STAT = Path("/proc/stat")
# Fields of a line of /proc/stat: user, nice, system, idle, iowait and others.
_IDLE = (3, 4)


@final
class CoreLoad:
    """Idle time of cores from the making of this object on.

    Args:
        cores: Their numbers; by default those that this process may use.
    """

    def __init__(self, cores: frozenset[int] | None = None) -> None:
        self._cores = frozenset(os.sched_getaffinity(0)) if cores is None else cores
        self._before = self._ticks()

    def idle_share(self) -> float:
        """Return the share of their time in which the cores were idle; NaN if the kernel counts none."""
        idle, total = (now - before for now, before in zip(self._ticks(), self._before, strict=True))
        return idle / total if total else float("nan")

    def _ticks(self) -> tuple[int, int]:
        idle = total = 0
        for line in STAT.read_text().splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self._cores:
                # The time of guests is counted as user time too.
                ticks = [int(field) for field in fields[:8]]
                idle += sum(ticks[index] for index in _IDLE)
                total += sum(ticks)
        return idle, total
