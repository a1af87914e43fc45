"""The end of a process with its parent."""

import ctypes
import os
import signal

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
