"""A thread at a low priority."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from penstock.core.priority import lower_priority

POLL_S = 0.0005


def in_low_thread(work: Callable[[], object]) -> None:
    """Run a function in a thread at a low priority; return when the thread has ended.

    Args:
        work: The function; it raises nothing.
    """
    task: list[int] = []

    def run() -> None:
        task.append(threading.get_native_id())
        lower_priority(0)
        work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    # `join` returns before the kernel's thread has ended, and on a busy core that takes a while.
    while Path(f"/proc/self/task/{task[0]}").exists():
        time.sleep(POLL_S)
