"""Ranks of one measurement on this machine, as `python -m MODULE RANK SIZE PORT ...`."""

import subprocess
import sys
from collections.abc import Sequence

from penstock.core.errors import BenchError
from penstock.train.parallel.launch import free_port


def rank0_lines(module: str, processes: int, arguments: Sequence[str], limit_s: float) -> list[str]:
    """Run a module on several ranks and return the output lines of rank 0.

    Args:
        module: The module; it gets rank, size and a port before the arguments.
        processes: Number of ranks.
        arguments: More arguments.
        limit_s: Time limit.

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
        outputs = [process.communicate(timeout=limit_s)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(process.returncode for process in started):
        raise BenchError(f"a process of {processes} failed: {[process.returncode for process in started]}.")
    return outputs[0].splitlines()
