"""The supervisor's end of a fork server: a process that has imported what others need, and forks them.

Importing an application that imports torch takes seconds of a core, at each restart of a front-end and at each trial of
a bundle. A fork of a process that has imported it takes milliseconds.

    supervisor ── socket pair ── fork server ── fork ── (ends at once) ── fork ── front-end or trial

The process in between ends, so that the kernel gives the last one to the supervisor, which waits for it, and with which
it ends. Where nothing can be forked, the caller starts a Python of its own.

A fork server forks nothing while it imports, which at a low priority on a busy core may take long. So further imports
are made by another fork server, which is forked from the first and takes its place when it has made them. They are
gathered for a short time, because a model seldom changes alone.

A fork of a large process takes tens of milliseconds of a core, just when the other front-ends have the load of the dead
one. So a fork server may have a *spare*: another process that was forked from it, which makes the same imports and
becomes the next front-end. Another spare is forked a while later.
"""

import asyncio
import ctypes
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import final

from penstock.serve.channel import channel_pair
from penstock.serve.control.fork_generation import ForkedProcess, Generation, Preload, Target

log = logging.getLogger(__name__)

RESTART_PAUSE_S = 5.0
# Imports that are wanted within this time are made together.
GATHER_S = 3.0
ADVANCE_S = 1.0
# Pause before another spare is forked: requests that have piled up come first.
SPARE_S = 1.0
# Garbage of so many imports, which are modules of earlier versions, is kept: collecting all garbage takes 120 ms where
# torch is imported, and copies all memory. After that, the next fork server collects it, and the spare is forked anew.
KEPT_IMPORTS = 32
# A process that has not made its imports in this time is given up.
IMPORT_LIMIT_S = 900.0
_PR_SET_CHILD_SUBREAPER = 36
# A pool of threads would end with a fork, and a lock that one of them holds would stay locked.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


@final
class ForkServer:
    """A fork server, started anew when it ends.

    Args:
        preloads: Called at each start; the imports that its forks need.
        has_spare: Whether a spare is forked ahead of time.
    """

    def __init__(self, preloads: Callable[[], Sequence[Preload]], *, has_spare: bool = False) -> None:
        self._preloads = preloads
        self._has_spare = has_spare
        self._current: Generation | None = None
        # Forked from the current one, with more imports.
        self._next: Generation | None = None
        # The imports of the next one.
        self._given: tuple[Preload, ...] = ()
        # Imports since all garbage was collected.
        self._uncollected = 0
        self._spare: Generation | None = None
        # Killed, and not gone yet: on a busy core, the end of a process at a low priority takes a while.
        self._ending: set[Generation] = set()
        self._wanted: dict[Preload, None] = {}
        # Imports after which nothing can be forked, or that do not end.
        self._unfit: set[Preload] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process that forks; None while there is none."""
        return None if self._current is None else self._current.pid

    @property
    def pids(self) -> frozenset[int]:
        """All its processes."""
        all_of_them = (self._current, self._next, self._spare, *self._ending)
        return frozenset(each.pid for each in all_of_them if each is not None)

    @property
    def spare_pid(self) -> int | None:
        """The process that becomes the next one that is to be forked; None while there is none."""
        return None if self._spare is None else self._spare.pid

    def start(self) -> None:
        """Start the process, if there is none, and let it import at a low priority."""
        if self._closed or self._current is not None:
            return
        # Orphans of the descendants become children of this process.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        ours, theirs = channel_pair()
        command = [sys.executable, "-m", "penstock.serve.control.fork_server_main", str(theirs.fileno())]
        try:
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                process_group=0,
                stdin=subprocess.DEVNULL,
                env=ONE_THREAD | os.environ,
            )
        except OSError as error:
            ours.close()
            log.warning("nothing can be forked ahead of time: %s", error)
            return
        finally:
            theirs.close()
        self._current = Generation(process, ours, self._exited)
        self._current.preload([each for each in self._preloads() if each not in self._unfit], collects_all=True)
        self._uncollected = 0
        if self._has_spare:
            asyncio.get_running_loop().call_later(SPARE_S, self._renew_spare)

    def preload(self, preload: Preload) -> None:
        """Have it import something soon; what it has imported so far can be forked meanwhile."""
        if self._current is not None and preload not in self._unfit:
            self._wanted[preload] = None
            self._look_again(GATHER_S)

    def fork(self, target: Target, argument: str, descriptors: Sequence[int]) -> ForkedProcess | None:
        """Fork a process, or have the spare become it.

        Args:
            target: What it runs, see `fork_loop`.
            argument: Its argument.
            descriptors: It gets copies of these, in this order.

        Returns:
            The process; None if it cannot be forked, because the server has only begun to import, or its imports
            started threads. After a fork that was not answered in time, a process may have the descriptors too.
        """
        self._advance()
        spare = self._spare
        if spare is not None and spare.is_idle() and spare.threaded is None:
            self._spare = None
            asyncio.get_running_loop().call_later(SPARE_S, self._renew_spare)
            process = spare.become(target, argument, descriptors)
            if process is not None:
                return process
            self._end(spare)
        if self._current is None or not self._current.is_idle():
            return None
        return self._current.fork(target, argument, descriptors)

    def _renew_spare(self) -> None:
        """Fork a spare, if there is none that can be used."""
        spare, current = self._spare, self._current
        if not self._has_spare or current is None:
            return
        if spare is not None and spare.is_idle() and (spare.threaded is not None or spare.given > KEPT_IMPORTS):
            self._end(spare)
            self._spare = None
        if self._spare is None and current.is_idle():
            self._spare = self._forked_from(current)
        if self._spare is None or not self._spare.is_idle():
            self._look_again(ADVANCE_S)

    def close(self) -> None:
        """End the process, for good."""
        self._closed = True
        self.pause()
        for each in self._ending:
            each.close()
        self._ending.clear()

    def pause(self) -> None:
        """End the process until the next `start`."""
        for each in (self._next, self._current, self._spare):
            if each is not None:
                self._end(each)
        self._next = self._current = self._spare = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # At the next start, it imports everything.
        self._wanted.clear()

    def _look_again(self, after_s: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(after_s, self._look)

    def _look(self) -> None:
        """Replace the current process by one with the imports that are wanted, if that is time."""
        self._timer = None
        self._advance()
        if self._next is None:
            needed = set(self._preloads())
            wanted = [each for each in self._wanted if each in needed]
            self._wanted.clear()
            if wanted and self._current is not None:
                self._next = self._forked_from(self._current) if self._current.is_idle() else None
                self._uncollected += len(wanted)
                collects_all = self._uncollected > KEPT_IMPORTS
                (self._next or self._current).preload(wanted, collects_all=collects_all)
                self._given = tuple(wanted)
                if collects_all:
                    self._uncollected = 0
        if self._next is not None:
            if time.monotonic() - self._next.started_s > IMPORT_LIMIT_S:
                self._drop_next(self._next.importing[0])
            self._look_again(ADVANCE_S)
        # A spare that lacks the imports of the next process gets them when that has made them.
        self._renew_spare()

    def _forked_from(self, generation: Generation) -> Generation | None:
        ours, theirs = channel_pair()
        try:
            process = generation.fork("fork server", "", (theirs.fileno(),))
            if process is not None:
                return Generation(process, ours, self._exited)
        finally:
            theirs.close()
        ours.close()
        return None

    def _advance(self) -> None:
        """Let the next process take the place of the current one, if it has made all imports."""
        if self._next is not None and self._next.is_idle():
            if self._next.threaded is not None:
                self._drop_next(self._next.threaded)
            else:
                if self._current is not None:
                    self._end(self._current)
                self._current, self._next = self._next, None
                if self._spare is not None:
                    # They do no harm: the current process has made them.
                    self._spare.preload(self._given, collects_all=False)
        current = self._current
        if current is not None and current.is_idle() and current.threaded is not None:
            self._unfit.add(current.threaded)
            self._end(current)
            self._current = None
            self.start()

    def _drop_next(self, culprit: Preload) -> None:
        """End the next process because of one import; what the current one forks makes that itself."""
        assert self._next is not None, culprit
        self._end(self._next)
        self._forget_next(culprit)

    def _forget_next(self, culprit: Preload | None) -> None:
        self._next = None
        if culprit is not None:
            self._unfit.add(culprit)
            # The other imports of that process are made again.
            self._wanted |= dict.fromkeys(each for each in self._preloads() if each not in self._unfit)
            self._look_again(GATHER_S)

    def _end(self, generation: Generation) -> None:
        generation.kill()
        self._ending.add(generation)

    def _exited(self, generation: Generation) -> None:
        # Its answers to the imports that it made may not have been read yet.
        generation.is_idle()
        generation.close()
        self._ending.discard(generation)
        # An application may end the process that imports it.
        importing = next(iter(generation.importing), None)
        culprit = importing if importing is not None and importing.application else None
        if generation is self._next:
            self._forget_next(culprit)
        elif generation is self._spare:
            self._spare = None
            self._look_again(RESTART_PAUSE_S)
        elif generation is self._current:
            if culprit is not None:
                self._unfit.add(culprit)
            self._current, self._next = self._next, None
            if self._current is None:
                asyncio.get_running_loop().call_later(RESTART_PAUSE_S, self.start)


def reap_orphans(own: Collection[int]) -> None:
    """Wait for children of this process that others started, which became its children when those ended.

    Args:
        own: Processes that are waited for elsewhere.
    """
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            # The kernel names the same one again until it is waited for.
            if ended.si_pid in own:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
