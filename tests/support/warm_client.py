"""A `python` for tests: tests/support/warm.py forks `-m MODULE` for modules that import torch; all else is Python.

Standard library only, and little of it: it starts with every process of the tests.
"""

import json
import os
import signal
import socket
import sys
from typing import Any

SOCKET_VARIABLE = "PENSTOCK_TESTS_WARM"
# Its value must be the parent's process id, see penstock/train/parallel/launch.py.
PARENT_VARIABLE = "PENSTOCK_PARENT"
LENGTH_BYTES = 8
WARM = ("penstock.runtime.", "penstock.export.", "benchmarks.acceptance.", "tests.support.", "tests.integration.")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def is_warm(arguments: list[str]) -> bool:
    """Tell command lines that are forked from those that start a new Python."""
    if len(arguments) < 2 or arguments[0] != "-m" or SOCKET_VARIABLE not in os.environ:
        return False
    module, options = arguments[1], arguments[2:]
    if module == "penstock":
        # A supervisor imports no torch, and tests look for it and its children in /proc.
        return not {"--frontends", "--device"} & set(options)
    return module.startswith(
        ("penstock.runtime.", "penstock.export.", "benchmarks.acceptance.", "tests.support.", "tests.integration.")
    )


def main() -> None:
    arguments = sys.argv[1:]
    if not is_warm(arguments):
        os.execv(sys.executable, [sys.executable, *arguments])
    request: dict[str, Any] = {
        "module": arguments[1],
        "arguments": arguments[2:],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
    }
    content = json.dumps(request).encode()
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as connection:
        # Signals wait until the process id is known.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        connection.connect(os.environ[SOCKET_VARIABLE])
        socket.send_fds(connection, [len(content).to_bytes(LENGTH_BYTES)], [0, 1, 2])
        connection.sendall(content)
        process = int.from_bytes(connection.recv(LENGTH_BYTES))
        for number in FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda given, _: _forward(process, given))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        connection.settimeout(0.5)
        while True:
            try:
                ended = connection.recv(LENGTH_BYTES)
                break
            except TimeoutError:
                # Closing the connection ends the process.
                if PARENT_VARIABLE in os.environ and os.getppid() != parent:
                    sys.exit(1)
    status = os.waitstatus_to_exitcode(int.from_bytes(ended)) if ended else 1
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    # This interpreter has nothing to finalise.
    os._exit(status)


def _forward(process: int, number: int) -> None:
    try:  # noqa: SIM105 - contextlib is one more import of each process
        os.kill(process, number)
    except ProcessLookupError:
        # It has ended, and its status is on the way.
        pass


if __name__ == "__main__":
    main()
