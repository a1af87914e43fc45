"""Threads beside the event loop of a front-end: how they share its core and its interpreter."""

import os
import sys
import threading

# Of such a thread; the loop has three quarters of a core that both want. A much lower priority would delay the loop,
# where the thread holds the interpreter's lock and other processes want the core.
NICE = 5
# Time after which a thread gives up the interpreter's lock if the loop waits for it; 5 ms by default.
SWITCH_S = 0.000_5


def lower_priority() -> None:
    """Have the event loop go before the calling thread."""
    # Elsewhere a thread has no priority of its own.
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def switch_soon() -> None:
    """Have the threads of this process give up the interpreter's lock soon."""
    sys.setswitchinterval(SWITCH_S)
