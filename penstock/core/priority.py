"""Low priorities for processes and threads that work beside what is served."""

import os
from contextlib import suppress

# Of `nice`.
LOW, LOWEST = 10, 19


def run_when_idle(task: int) -> None:
    """Run a process or thread only while its cores have nothing else to do (`SCHED_IDLE`), or at the lowest priority.

    Linux does not let it take this back without privileges. Threads and processes that it starts inherit it. It yields
    to processes of its session alone where the kernel schedules sessions as groups (`sched_autogroup_enabled`).

    Args:
        task: Process ID or native thread ID; 0 for the calling thread.
    """
    try:
        os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))
    except OSError:
        # A sandbox may not allow it.
        lower_priority(task, LOWEST)


def lower_priority(task: int, nice: int = LOW) -> None:
    """Lower the priority of a process or thread to a value of `nice`; a lower priority than that stays.

    Args:
        task: Process ID or native thread ID; 0 for the calling thread.
        nice: The value.
    """
    # It may have ended.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, task, max(nice, os.getpriority(os.PRIO_PROCESS, task)))
