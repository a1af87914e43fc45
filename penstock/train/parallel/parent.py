"""End of a process whose parent is gone. No torch: it watches from the first instant on, before torch is loaded."""

import os
import threading
import time
from typing import NoReturn

POLL_S = 1.0
# The process that ends has lost its launcher, as it may lose its peers.
EXIT_PARENT_GONE = 3


def end_with_parent(parent: int) -> None:
    """End this process, in any state, soon after its parent has ended.

    Args:
        parent: The process id of the parent when it started this process.
    """
    threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()


def _watch(parent: int) -> NoReturn:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(EXIT_PARENT_GONE)
