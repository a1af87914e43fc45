"""The process of a fork server: `python -m penstock.serve.control.fork_server_main DESCRIPTOR`."""

import os
import signal
import sys
from functools import partial
from importlib import import_module

from penstock.core.machine.priority import in_low_thread
from penstock.serve.control.parent_process import end_with


def main() -> None:
    """Run the loop of a fork server; its imports are made at a low priority."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if end_with(parent):
        loop = "penstock.serve.control.fork_loop"
        in_low_thread(partial(import_module, loop))
        import_module(loop).run(int(sys.argv[1]))


if __name__ == "__main__":
    main()
