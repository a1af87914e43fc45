"""Start the training processes of one machine, watch them, and end all of them when one fails."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import final

from penstock.core.errors import TrainError
from penstock.train.interrupt import Interrupt

# Exit status of a process that lost its peers or hung while it waited for them: another one is at fault.
EXIT_PEERS_LOST = 3
EXIT_INTERRUPTED = 130
POLL_S = 0.02
# Victims of a failure exit at about the same time as the culprit.
SETTLE_S = 3.0
# Lines of stderr that are kept for the error message.
LINES_KEPT = 40
SENTENCE = "penstock: "
# The process id of the launcher, which its processes must not outlive.
PARENT_VARIABLE = "PENSTOCK_PARENT"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def launch(command: Sequence[str], processes: int, environment: Mapping[str, str]) -> None:
    """Run a command in several training processes, until all have ended.

    Args:
        command: The same for each process; rank and address are in the environment, as torchrun sets them.
        processes: The number of processes.
        environment: The environment of all of them.

    Raises:
        TrainError: A process failed; the others were ended.
        KeyboardInterrupt: The user stopped the training.
    """
    port = free_port()
    workers: list[_Worker] = []

    def forward(number: int) -> None:
        for worker in workers:
            if worker.status is None:
                worker.process.send_signal(number)

    with Interrupt(forward):
        try:
            for rank in range(processes):
                # One by one: if a start fails, the processes before it must be ended.
                workers.append(_Worker(command, rank, processes, port, environment))  # noqa: PERF401
            ended = _first_to_fail(workers)
        except OSError as error:
            raise TrainError(
                f"process {len(workers)} of {processes} cannot be started ({error.strerror}); request fewer processes."
            ) from None
        finally:
            for worker in workers:
                worker.end()
    if ended is None:
        return
    if all(worker.status == EXIT_INTERRUPTED for worker in workers):
        raise KeyboardInterrupt
    raise TrainError(ended.sentence(processes))


def _first_to_fail(workers: "Sequence[_Worker]") -> "_Worker | None":
    """Wait until a process has failed or all have ended; return the one at fault, or None if all succeeded.

    After an interrupt rank 0 writes a checkpoint first, which may take long; a second signal ends the processes.
    """
    deadline_s: float | None = None
    while True:
        statuses = {worker.status for worker in workers}
        failures = statuses - {None, 0, EXIT_INTERRUPTED}
        if failures and deadline_s is None:
            deadline_s = time.monotonic() + SETTLE_S
        # A victim may exit before the culprit.
        overdue = deadline_s is not None and time.monotonic() >= deadline_s
        if None not in statuses or failures - {EXIT_PEERS_LOST} or overdue:
            return min((worker for worker in workers if worker.status), key=_Worker.blame, default=None)
        time.sleep(POLL_S)


@final
class _Worker:
    """One process. Its stderr is passed on, and the last lines are kept for the error message."""

    def __init__(
        self, command: Sequence[str], rank: int, processes: int, port: int, environment: Mapping[str, str]
    ) -> None:
        self.rank = rank
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        own = {
            "RANK": rank,
            "WORLD_SIZE": processes,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": processes,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            PARENT_VARIABLE: os.getpid(),
        }
        # Its own process group: a terminal sends Ctrl-C to the launcher alone, which forwards it.
        self.process = subprocess.Popen(
            command,
            env={**environment, **{name: str(value) for name, value in own.items()}},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, name=f"stderr of rank {rank}", daemon=True)
        self._reader.start()

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self.process.poll()

    def blame(self) -> tuple[bool, bool, bool, int]:
        """Sort key: the process most likely at fault has the smallest."""
        assert self.status is not None
        return self.status == EXIT_PEERS_LOST, self.status == EXIT_INTERRUPTED, self.status > 0, self.rank

    def end(self) -> None:
        """Kill the process if it still runs, and read the rest of its stderr."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(timeout=1.0)

    def sentence(self, processes: int) -> str:
        """Describe the failure."""
        assert self.status is not None
        own = [line for line in map(_uncoloured, self._lines) if line.startswith(SENTENCE)]
        if self.status > 0 and own:
            return own[-1].removeprefix(SENTENCE)
        if self.status < 0:
            why = f"was ended by {signal.Signals(-self.status).name}"
        else:
            last = self._lines[-1].strip() if self._lines else "without output"
            why = f"ended with status {self.status} ({last})"
        return f"rank {self.rank} of {processes} (process {self.process.pid}) {why}; the others were ended."

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                text = line.rstrip("\n")
                self._lines.append(text)
                # The launcher prints Penstock's own error sentence once, at the end.
                if not _uncoloured(text).startswith(SENTENCE):
                    sys.stderr.write(f"[rank {self.rank}] {text}\n")


def _uncoloured(line: str) -> str:
    """Remove the colours that FORCE_COLOR requests."""
    return _COLOUR.sub("", line)


def free_port() -> int:
    """Find a TCP port of this machine that is free now."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]
