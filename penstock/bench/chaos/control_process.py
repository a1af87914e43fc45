"""A process that only sleeps and wakes: how late it wakes is how late this machine's scheduler is."""

import multiprocessing
import os
import time
from bisect import bisect_left
from multiprocessing.connection import Connection
from typing import final

SLEEP_S = 0.001
# Wakes that are less late are not kept.
KEPT_S = 0.0005


@final
class Control:
    """The process, from construction to `stop`.

    Args:
        cpus: Its cores, those of the process beside which it stands; None for any.
    """

    def __init__(self, cpus: frozenset[int] | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(cpus, theirs), daemon=True)
        self._process.start()
        # It has imported everything: that would disturb what is measured.
        self._ours.recv()
        self._late: list[tuple[float, float]] = []

    def stop(self) -> None:
        """End it and take what it saw."""
        self._ours.send("stop")
        self._late = self._ours.recv()
        self._process.join()

    def worst_s(self, begin_s: float, end_s: float) -> float:
        """Return the sum of what it woke late within a time: that much a process beside it may have been held up."""
        return sum(self._within(begin_s, end_s))

    def longest_s(self, begin_s: float, end_s: float) -> float:
        """Return the most that it woke late at once within a time."""
        return max(self._within(begin_s, end_s), default=0.0)

    def _within(self, begin_s: float, end_s: float) -> list[float]:
        found: list[float] = []
        for at in range(bisect_left(self._late, (begin_s, 0.0)), len(self._late)):
            woke_s, late_s = self._late[at]
            if woke_s - late_s >= end_s:
                break
            found.append(late_s)
        return found


def _run(cpus: frozenset[int] | None, parent: Connection) -> None:
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    parent.send("ready")
    late: list[tuple[float, float]] = []
    while not parent.poll():
        before_s = time.monotonic()
        time.sleep(SLEEP_S)
        woke_s = time.monotonic()
        if woke_s - before_s - SLEEP_S > KEPT_S:
            late.append((woke_s, woke_s - before_s - SLEEP_S))
    parent.send(late)
