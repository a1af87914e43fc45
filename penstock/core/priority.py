"""A low priority for processes and threads that work beside what is served."""

import os
from contextlib import suppress

# Of `nice`: a third of the share of a process at 0, so that the work ends on a core that is never idle.
LOW = 5


def lower_priority(task: int) -> None:
    """Give a process or thread a low priority; one that is lower stays.

    A process cannot take this back without privileges. It holds among processes of one session only, where the kernel
    schedules sessions as groups (`sched_autogroup_enabled`).

    Args:
        task: Process ID or native thread ID; 0 for the calling thread.
    """
    # It may have ended.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, task, max(LOW, os.getpriority(os.PRIO_PROCESS, task)))
