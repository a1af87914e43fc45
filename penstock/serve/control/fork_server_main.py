"""The process of a fork server: `python -m penstock.serve.control.fork_server_main DESCRIPTOR`."""

import os
import sys
from functools import partial
from importlib import import_module

from penstock.serve.control.idle_thread import in_idle_thread


def main() -> None:
    """Run the loop of a fork server; what it needs is imported while the cores have nothing else to do."""
    parent = os.getppid()
    loop = "penstock.serve.control.fork_loop"
    in_idle_thread(partial(import_module, loop))
    import_module(loop).run(parent, int(sys.argv[1]))


if __name__ == "__main__":
    main()
