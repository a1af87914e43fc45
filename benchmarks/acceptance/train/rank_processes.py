"""Ranks of one measurement on this machine, as `python -m MODULE RANK SIZE PORT ...`."""

import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, final

from penstock.core.errors import BenchError
from penstock.train.parallel.launch import held_port
from penstock.train.parallel.rank_assignment import RankAssignment
from penstock.train.parallel.world import World, device_of, join_world

POLL_S = 0.5
# Lines of a failed rank that are printed.
MAX_ERROR_LINES = 40


@final
class RankGroup:
    """Processes that run a module as the ranks of one world.

    Args:
        module: The module; it gets rank, size and a port before the arguments, and joins by `own_world`.
        processes: Number of ranks.
        arguments: More arguments.
        environment: Variables that are set or replaced.
    """

    def __init__(
        self, module: str, processes: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._held = ExitStack()
        port = str(self._held.enter_context(held_port()))
        self._errors = [open(os.memfd_create("errors"), "w+") for _ in range(processes)]  # noqa: SIM115
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(rank), str(processes), port, *arguments],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=self._errors[rank],
                text=True,
                env={**os.environ, **(environment or {})},
            )
            for rank in range(processes)
        ]
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        output = self._processes[0].stdout
        assert output is not None
        self._reader = Thread(target=self._read, args=(output,), daemon=True)
        self._reader.start()
        self._late = False

    def lines(self, limit_s: float) -> Iterator[str]:
        """Yield the lines of rank 0 until it ends, another rank fails, or no line comes within the limit."""
        line_s = time.monotonic()
        while True:
            try:
                line = self._lines.get(timeout=POLL_S)
            except Empty:
                self._late = time.monotonic() - line_s > limit_s
                if self._late or any(process.poll() for process in self._processes):
                    return
            else:
                if line is None:
                    return
                line_s = time.monotonic()
                yield line

    def statuses(self, limit_s: float) -> list[int | None]:
        """Wait until every rank has ended or one has failed; return the statuses, None for a rank that still runs."""
        # After a missed limit, do not wait again.
        end_s = time.monotonic() + (0.0 if self._late else limit_s)
        while True:
            found = [process.poll() for process in self._processes]
            if None not in found or any(found) or time.monotonic() > end_s:
                return found
            time.sleep(0.02)

    def end(self) -> str:
        """End all ranks, print what those that failed wrote, and return the reason for a missing line."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._held.close()
        # A process that a rank started may hold the pipe open.
        self._reader.join(POLL_S)
        written = list(map(_lines_of, self._errors))
        failed = [
            lines for process, lines in zip(self._processes, written, strict=True) if process.returncode not in (0, -9)
        ]
        for lines in written if self._late else failed:
            print(*lines[-MAX_ERROR_LINES:], sep="\n", file=sys.stderr)
        return "no result within the time limit" if self._late else _reason(failed)

    def _read(self, output: IO[str]) -> None:
        with output:
            for line in output:
                self._lines.put(line)
        self._lines.put(None)


def _lines_of(errors: IO[str]) -> list[str]:
    with errors:
        errors.seek(0)
        return errors.read().splitlines()


def _reason(failed: list[list[str]]) -> str:
    """Return the last line of the first rank that failed with one; NCCL's warnings at its end are no reason."""
    messages = [[line for line in lines if line.strip() and "Warning: " not in line] for lines in failed]
    return next((lines[-1][:300] for lines in messages if lines), "its processes ended without a message")


def rank0_lines(module: str, processes: int, arguments: Sequence[str], limit_s: float) -> list[str]:
    """Run a module on several ranks and return the output lines of rank 0.

    Args:
        module: The module; it gets rank, size and a port before the arguments.
        processes: Number of ranks.
        arguments: More arguments.
        limit_s: Time limit of a line, and of the end.

    Raises:
        BenchError: One failed.
    """
    group = RankGroup(module, processes, arguments)
    try:
        lines = list(group.lines(limit_s))
        statuses = group.statuses(limit_s)
    finally:
        reason = group.end()
    if any(status != 0 for status in statuses):
        raise BenchError(f"a process of {processes} failed: {statuses}; {reason}.")
    return lines


@contextmanager
def own_world(limit_s: float, device: str = "cpu") -> Generator[World]:
    """Join the world as the rank that the first arguments of this process name.

    Args:
        limit_s: Limit of a wait for the other ranks.
        device: `"cpu"`, or `"cuda"` for a GPU each.

    Raises:
        BenchError: The device is neither.
    """
    if device not in ("cpu", "cuda"):
        raise BenchError(f"device is {device!r}; it is cpu or cuda.")
    rank, size, port = map(int, sys.argv[1:4])
    assignment = RankAssignment(rank=rank, size=size, local_rank=rank, local_size=size, address="127.0.0.1", port=port)
    with join_world(assignment, device_of(assignment, cuda=device == "cuda"), limit_s) as world:
        yield world
