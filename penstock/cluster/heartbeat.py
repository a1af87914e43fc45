"""Heartbeats of processes in files of a job's folder: a process beside each counts up while that one lives.

A machine that lost its power says nothing, and where it is soon back, Slurm goes on taking its tasks for running.
`python heartbeat.py FILE PID` is the process beside PID; it names no module of Penstock, and so starts at once.
"""

import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

BEAT_S = 5.0
# A process that has not counted up in this time is lost; one that has not begun may still load its modules.
SILENT_S, BEGIN_S = 60.0, 300.0


@contextmanager
def beating(file: Path) -> Generator[None]:
    """Write heartbeats of this process into a file until the block ends, also while it holds the GIL."""
    # Isolated and without packages: neither is needed.
    command = [sys.executable, "-IS", __file__, str(file), str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as beside:
        try:
            yield
        finally:
            beside.kill()


@final
class Silence:
    """The silence of a process, in looks and not by a clock: where looks themselves have to wait, so may heartbeats.

    Args:
        file: The file of its heartbeats.
        look_s: The time between two looks.
    """

    def __init__(self, file: Path, look_s: float) -> None:
        self._file, self._look_s = file, look_s
        self.begin()

    def begin(self) -> None:
        """Expect a new process, which writes into the same file."""
        self._content, self._looks, self._has_begun = self._read(), 0, False

    def is_lost(self) -> bool:
        """Look once; return True if the process is lost."""
        content = self._read()
        if content != self._content:
            self._content, self._looks, self._has_begun = content, 0, True
            return False
        self._looks += 1
        return self._looks * self._look_s >= (SILENT_S if self._has_begun else BEGIN_S)

    def _read(self) -> bytes:
        # Opened anew each time, for which a file system of a network asks its server.
        try:
            return self._file.read_bytes()
        except OSError:
            return b""


def main(file: str, pid: int) -> None:
    """Count up in a file while the process that has started this one lives."""
    count = 0
    while os.getppid() == pid:
        # A folder that cannot be written now may be again.
        with suppress(OSError), open(file, "w") as sink:
            sink.write(f"{pid} {count}\n")
        count += 1
        time.sleep(BEAT_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
