"""Work that takes a core only while it has nothing else to do."""

import os
import threading
from collections.abc import Callable


def run_idle() -> None:
    """Have the calling thread run only while the cores have nothing else to do, for good.

    Others take the core from it as soon as they wake, which a low priority does not promise. Threads and processes that
    it starts do as it does.
    """
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))


def in_idle_thread(work: Callable[[], object]) -> None:
    """Do some work in a thread that runs so; returns when it is done. It must raise nothing."""

    def run() -> None:
        run_idle()
        work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
