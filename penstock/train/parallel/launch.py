"""Starts the processes that train together on this machine, watches them, and ends all when one ends too early."""

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
from types import FrameType
from typing import final

from penstock.core.errors import TrainError

# What a process ends with that found the others gone, or hanging: it is not the one at fault.
EXIT_PEERS_LOST = 3
EXIT_INTERRUPTED = 130
POLL_S = 0.02
# Processes whose connections break end at about the same time as the one that broke them.
SETTLE_S = 3.0
SAID_LINES = 40
SENTENCE = "penstock: "
# Set for the processes that are started here: the one whose end is theirs.
PARENT_VARIABLE = "PENSTOCK_PARENT"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def launch(command: Sequence[str], processes: int, environment: Mapping[str, str]) -> None:
    """Run a command in several processes that train together, until all have ended.

    Args:
        command: The same for each; what differs is the environment, in the variables that torchrun sets too.
        processes: How many.
        environment: Of all.

    Raises:
        TrainError: One ended before it was done; the others were ended.
        KeyboardInterrupt: They were asked to stop, and did.
    """
    port = free_port()
    workers: list[_Worker] = []
    with _Forwarded(workers):
        try:
            for rank in range(processes):
                # Those that were started before one fails must be known, to be ended.
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
    """The process that is at fault, once one has ended with an error; None when all have ended well."""
    while True:
        # Whoever asked to stop, all do, and the first one writes a checkpoint, however long that takes: a second
        # signal ends them.
        failed = [worker for worker in workers if worker.status not in (EXIT_INTERRUPTED, 0, None)]
        if failed:
            deadline_s = time.monotonic() + SETTLE_S
            # Who lost the others may have been faster than who left them.
            patient = {EXIT_PEERS_LOST, EXIT_INTERRUPTED}
            while time.monotonic() < deadline_s and all(worker.status in (*patient, 0, None) for worker in workers):
                if all(worker.status is not None for worker in workers):
                    break
                time.sleep(POLL_S)
            return min((worker for worker in workers if worker.status), key=_Worker.blame)
        if all(worker.status is not None for worker in workers):
            return next((worker for worker in workers if worker.status), None)
        time.sleep(POLL_S)


@final
class _Worker:
    """One process, and what it says on stderr: passed on, and kept for the message if it fails."""

    def __init__(
        self, command: Sequence[str], rank: int, processes: int, port: int, environment: Mapping[str, str]
    ) -> None:
        self.rank = rank
        self._said: deque[str] = deque(maxlen=SAID_LINES)
        own = {
            "RANK": rank,
            "WORLD_SIZE": processes,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": processes,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            PARENT_VARIABLE: os.getpid(),
        }
        # A group of its own: Ctrl-C in a terminal is for the parent, which passes it on.
        self._process = subprocess.Popen(
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
        """As it ended, below 0 by a signal; None while it runs."""
        return self._process.poll()

    def blame(self) -> tuple[bool, bool, bool, int]:
        """The smaller, the likelier it is that this one failed by itself."""
        assert self.status is not None
        return self.status == EXIT_PEERS_LOST, self.status == EXIT_INTERRUPTED, self.status > 0, self.rank

    def send(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def end(self) -> None:
        """End it, if it still runs, and hear what it said."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join(timeout=1.0)

    def sentence(self, processes: int) -> str:
        """Describe the failure."""
        assert self.status is not None
        own = [line for line in map(_uncoloured, self._said) if line.startswith(SENTENCE)]
        if self.status > 0 and own:
            return own[-1].removeprefix(SENTENCE)
        if self.status < 0:
            why = f"was ended by {signal.Signals(-self.status).name}"
        else:
            last = self._said[-1].strip() if self._said else "without a word"
            why = f"ended with status {self.status} ({last})"
        return f"rank {self.rank} of {processes} (process {self._process.pid}) {why}; the others were ended."

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.rstrip("\n")
                self._said.append(text)
                # A sentence of ours is said once, at the end.
                if not _uncoloured(text).startswith(SENTENCE):
                    sys.stderr.write(f"[rank {self.rank}] {text}\n")


@final
class _Forwarded:
    """While it is entered, the first SIGINT or SIGTERM goes to all processes; a second one ends them."""

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self._workers = workers
        self._asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._pass_on)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        for worker in self._workers:
            if worker.status is None:
                worker.send(number)


def _uncoloured(line: str) -> str:
    """Without the colours that FORCE_COLOR asks for."""
    return _COLOUR.sub("", line)


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]
