"""Threads beside the event loop of a front-end: how they share its interpreter."""

import sys

# Time after which a thread gives up the interpreter's lock if the loop waits for it; 5 ms by default.
SWITCH_S = 0.000_5


def switch_soon() -> None:
    """Have the threads of this process give up the interpreter's lock soon."""
    sys.setswitchinterval(SWITCH_S)
