"""The end of a process with its parent."""

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> bool:
    """Have the kernel kill this process when its parent ends, however that ends.

    Args:
        parent: Process ID of the parent.

    Returns:
        Whether the parent is still there.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def is_running(process: int) -> bool:
    """Tell whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
