"""A low priority for processes and threads that work beside what is served."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Of `nice`: a third of the share of one at 0, so that the work ends on a core that is never idle. A much lower priority
# would delay an event loop where such a thread of its process holds the interpreter's lock and others want the core.
LOW = 5
POLL_S = 0.0005


def lower_priority(task: int = 0) -> None:
    """Give a process or thread a low priority; one that is lower stays.

    A process cannot take this back without privileges. It holds among processes of one session only, where the kernel
    schedules sessions as groups (`sched_autogroup_enabled`). Outside Linux it does nothing: a thread has no priority of
    its own there.

    Args:
        task: Process ID or native thread ID; 0 for the calling thread.
    """
    if sys.platform != "linux":
        return
    # It may have ended.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, task, max(LOW, os.getpriority(os.PRIO_PROCESS, task)))


def in_low_thread(work: Callable[[], object]) -> None:
    """Run a function in a thread at a low priority; return when the thread has ended.

    Args:
        work: The function; it raises nothing.
    """
    task: list[int] = []

    def run() -> None:
        task.append(threading.get_native_id())
        lower_priority()
        work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    # `join` returns before the kernel's thread has ended, and on a busy core that takes a while.
    while Path(f"/proc/self/task/{task[0]}").exists():
        time.sleep(POLL_S)
