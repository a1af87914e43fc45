"""Several processes of one measurement on this machine, as `python -m MODULE RANK SIZE PORT ...`."""

import subprocess
import sys
from collections.abc import Sequence

from penstock.core.errors import BenchError
from penstock.train.launch import free_port


def said_by_first(module: str, processes: int, arguments: Sequence[str], limit_s: float) -> list[str]:
    """The lines that the first of the processes says; all end with it.

    Args:
        module: Each runs it, with its rank, their number and a port before the arguments.
        processes: How many.
        arguments: Of each.
        limit_s: How long they may take.

    Raises:
        BenchError: One failed.
    """
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(processes), port, *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        said = [process.communicate(timeout=limit_s)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(process.returncode for process in started):
        raise BenchError(f"a process of {processes} failed: {[process.returncode for process in started]}.")
    return said[0].splitlines()
