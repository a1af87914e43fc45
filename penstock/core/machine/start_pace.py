"""Pauses in the start of a process that leave a busy core to the processes which serve meanwhile."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import final

SCHED_STAT = Path("/proc/self/schedstat")
# Share of a busy core. An equal share would slow down the processes that do the work of the one that ended.
SHARE = 1 / 8
# The core was free if the process waited less than this for it.
FREE_NS = 1_000_000
MAX_PAUSE_NS = 200_000_000


def waited_for_core_ns(file: Path = SCHED_STAT) -> int:
    """Return how long the main thread of this process was ready to run while others had its core; 0 if unknown."""
    try:
        return int(file.read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


@final
class StartPace:
    """The pace of a start: after each part of it, a pause, if the process had to wait for a core.

    Where the kernel does not say how long a process waited, there are no pauses.

    Args:
        now_ns: A monotonic clock.
        cpu_ns: The CPU time of the process so far.
        waited_ns: How long it has waited for a core so far; 0 if that is not known.
    """

    def __init__(
        self,
        now_ns: Callable[[], int] = time.monotonic_ns,
        cpu_ns: Callable[[], int] = time.process_time_ns,
        waited_ns: Callable[[], int] = waited_for_core_ns,
    ) -> None:
        self._now_ns = now_ns
        self._cpu_ns = cpu_ns
        self._waited_ns = waited_ns
        self._before = self._read()

    def pause_s(self) -> float:
        """Return how long to sleep now, so that the part since the last call had its share of the core."""
        before, self._before = self._before, self._read()
        took_ns, cpu_ns, waited_ns = (now - then for now, then in zip(self._before, before, strict=True))
        if waited_ns < FREE_NS:
            return 0.0
        pause_ns = min(max(0, round(cpu_ns / SHARE) - took_ns), MAX_PAUSE_NS)
        # The pause is no part of what comes next.
        self._before = (self._before[0] + pause_ns, *self._before[1:])
        return pause_ns / 1e9

    def _read(self) -> tuple[int, int, int]:
        return self._now_ns(), self._cpu_ns(), self._waited_ns()
