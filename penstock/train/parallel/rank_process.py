"""One training process, as the process that started it sees it."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, final

from penstock.train.parallel.rank_assignment import RankAssignment

# Exit status of a process that lost its peers or hung while it waited for them: another one is at fault.
EXIT_PEERS_LOST = 3
EXIT_INTERRUPTED = 130
# Time for the rest of the output of a process that has ended: its descendants may hold the pipe open.
DRAIN_S = 5.0
# Lines that are kept for the error message.
LINES_KEPT = 40
SENTENCE = "penstock: "
# The process id of the launcher, which its processes must not outlive.
PARENT_VARIABLE = "PENSTOCK_PARENT"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# What `named_values.noted` adds after the message of an error, perhaps behind torch's mark of the rank.
_NOTE = re.compile(r"(\[rank\d+\]: )?(The loss|The metric '.*') was given outputs ")


@final
class RankProcess:
    """One training process. Its stderr is passed on, and the last lines are kept for the error message.

    Args:
        command: The command of all processes.
        assignment: Its rank and address, which go into the environment as torchrun sets them.
        environment: The environment of all processes.
        folder: Its working folder; that of this process by default.
        keeps_output: Keep the last lines of stdout too, in `output`, instead of passing them on.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        assignment: RankAssignment,
        environment: Mapping[str, str],
        *,
        folder: Path | None = None,
        keeps_output: bool = False,
    ) -> None:
        self.rank, self._size = assignment.rank, assignment.size
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self.output: deque[str] = deque(maxlen=LINES_KEPT)
        # Its own process group: a terminal sends Ctrl-C to the launcher alone, which forwards it.
        self.process = subprocess.Popen(
            command,
            env={**environment, **assignment.environment(), PARENT_VARIABLE: str(os.getpid())},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if keeps_output else None,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
        self._readers = [threading.Thread(target=self._read, name=f"stderr of rank {self.rank}", daemon=True)]
        if keeps_output:
            self._readers.append(
                threading.Thread(target=self._keep_output, name=f"stdout of rank {self.rank}", daemon=True)
            )
        for reader in self._readers:
            reader.start()

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self.process.poll()

    def blame(self) -> tuple[bool, bool, bool, int]:
        """Sort key: the process most likely at fault has the smallest."""
        assert self.status is not None
        return self.status == EXIT_PEERS_LOST, self.status == EXIT_INTERRUPTED, self.status > 0, self.rank

    def end(self) -> None:
        """Kill the process if it still runs, and read the rest of its output."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join(timeout=DRAIN_S)

    @property
    def own_sentence(self) -> str:
        """Penstock's own last sentence of a process that has failed by itself; empty without one."""
        own = [line for line in map(_uncoloured, self._lines) if line.startswith(SENTENCE)]
        return own[-1].removeprefix(SENTENCE) if own and (self.status or 0) > 0 else ""

    @property
    def ending(self) -> str:
        """The way it ended, in words without a full stop."""
        assert self.status is not None
        if self.status < 0:
            why = f"was ended by {signal.Signals(-self.status).name}"
        else:
            why = f"ended with status {self.status} ({last_words(list(self._lines)) or 'without output'})"
        return f"rank {self.rank} of {self._size} (process {self.process.pid}) {why}"

    def _read(self) -> None:
        for text in _lines(self.process.stderr):
            self._lines.append(text)
            # The launcher prints Penstock's own error sentence once, at the end.
            if not _uncoloured(text).startswith(SENTENCE):
                sys.stderr.write(f"[rank {self.rank}] {text}\n")

    def _keep_output(self) -> None:
        self.output.extend(_lines(self.process.stdout))


def last_words(lines: Sequence[str]) -> str:
    """Return the last line of a process's output, with the error before it where it is a note; empty without one."""
    first = len(lines) - 1
    while first > 0 and _NOTE.match(lines[first].strip()):
        first -= 1
    return "; ".join(line.strip() for line in lines[max(0, first) :])


def _lines(source: IO[str] | None) -> Iterator[str]:
    assert source is not None
    with source:
        for line in source:
            yield line.rstrip("\n")


def _uncoloured(line: str) -> str:
    """Remove the colours that FORCE_COLOR requests."""
    return _COLOUR.sub("", line)
