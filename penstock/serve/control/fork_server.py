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
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal, final

from penstock.serve.channel import channel_pair

log = logging.getLogger(__name__)

Target = Literal["child", "fork server", "trial"]
# The answers of a fork server to an import, and of a spare that becomes another process.
IMPORTED, HAS_THREADS, BECOMES = b"imported", b"imported, with threads", b"becomes"

# A fork takes milliseconds; the supervisor does nothing else during it.
FORK_TIMEOUT_S = 1.0
# Largest request; beyond it, a Python is started.
MAX_REQUEST_BYTES = 64 << 10
RESTART_PAUSE_S = 5.0
# Imports that are wanted within this time are made together.
GATHER_S = 3.0
ADVANCE_S = 1.0
# Pause before another spare is forked: requests that have piled up come first.
SPARE_S = 1.0
# A spare keeps the garbage of its imports, which a collection would copy. One that has made so many is forked anew.
SPARE_IMPORTS = 32
# A process that has not made its imports in this time is given up.
IMPORT_LIMIT_S = 900.0
_PR_SET_CHILD_SUBREAPER = 36
# A pool of threads would end with a fork, and a lock that one of them holds would stay locked.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Preload:
    """Something that a fork server imports.

    Args:
        module: A module; empty if none.
        application: Reference of an application, see `import_application`; empty if none.
        pinned: Folder of the copies of its sources; empty if there are none.
    """

    module: str = ""
    application: str = ""
    pinned: str = ""


@final
class ForkedProcess:
    """A process that a fork server forked; a child of this one.

    Args:
        pid: Its number.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def kill(self) -> None:
        """Kill it, unless it was waited for."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait until it has ended; returns its status, negative if a signal ended it."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


@final
class _Generation:
    """One process of a fork server, and this end of its socket pair.

    Args:
        process: The process.
        end: This end.
        ended: Called when the process has ended.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes] | ForkedProcess",
        end: socket.socket,
        ended: "Callable[[_Generation], None]",
    ) -> None:
        self.pid = process.pid
        self.started_s = time.monotonic()
        # Imports without an answer; the first is in progress.
        self.importing: deque[Preload] = deque()
        # The number of imports that it was given.
        self.given = 0
        # The import that left threads, beside which nothing is forked.
        self.threaded: Preload | None = None
        self._process = process
        self._end: socket.socket | None = end
        self._exit_fd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._exit_fd, ended, self)

    def preload(self, preloads: Sequence[Preload], *, collects: bool = True) -> None:
        """Have it import these, and collect garbage after the last one."""
        for at, preload in enumerate(preloads, 1):
            if self.send(json.dumps({"preload": asdict(preload), "collects": collects and at == len(preloads)}), ()):
                self.importing.append(preload)
                self.given += 1

    def is_idle(self) -> bool:
        """Return whether it has made all imports."""
        while self.importing and (answer := self.receive(0.0)) is not None:
            preload = self.importing.popleft()
            if answer == HAS_THREADS and self.threaded is None:
                self.threaded = preload
        return self._end is not None and not self.importing

    def send(self, request: str, descriptors: Sequence[int]) -> bool:
        """Send a request; return whether it was sent."""
        content = request.encode()
        if self._end is None or len(content) > MAX_REQUEST_BYTES:
            return False
        try:
            socket.send_fds(self._end, [content], list(descriptors), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def receive(self, timeout_s: float) -> bytes | None:
        """Receive a packet; None if there is none in time, or never will be."""
        if self._end is None:
            return None
        # Unlike `select`, for descriptors of any number.
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        if not poll.poll(timeout_s * 1e3):
            return None
        with suppress(ConnectionError):
            return self._end.recv(64) or None
        return None

    def fork(self, target: Target, argument: str, descriptors: Sequence[int]) -> ForkedProcess | None:
        """Fork a process; None if there are threads beside it, or it does not answer: then it is killed."""
        answer = self._ask("fork", target, argument, descriptors)
        if answer is None:
            return None
        pid = int(answer)
        return ForkedProcess(pid) if pid else None

    def become(self, target: Target, argument: str, descriptors: Sequence[int]) -> ForkedProcess | None:
        """Have this process, a fork itself, go on as another one; None if it does not answer: then it is killed."""
        assert isinstance(self._process, ForkedProcess), self.pid
        if self._ask("become", target, argument, descriptors) is None:
            return None
        self._release()
        return self._process

    def _ask(self, order: str, target: Target, argument: str, descriptors: Sequence[int]) -> bytes | None:
        request = json.dumps({"order": order, "target": target, "argument": argument, "parent": os.getpid()})
        if not self.send(request, descriptors):
            return None
        answer = self.receive(FORK_TIMEOUT_S)
        if answer is None:
            log.warning("the fork server does not answer; another one is started")
            self.kill()
        return answer

    def kill(self) -> None:
        """Kill the process; `ended` is called when it has ended."""
        self._process.kill()
        self._disconnect()

    def close(self) -> None:
        """Wait for the process, which has ended or was killed, and release its descriptors."""
        self._process.wait()
        self._release()

    def _release(self) -> None:
        asyncio.get_running_loop().remove_reader(self._exit_fd)
        os.close(self._exit_fd)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None


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
        self._current: _Generation | None = None
        # Forked from the current one, with more imports.
        self._next: _Generation | None = None
        # The imports of the next one.
        self._given: tuple[Preload, ...] = ()
        self._spare: _Generation | None = None
        # Killed, and not gone yet: on a busy core, the end of a process at a low priority takes a while.
        self._ending: set[_Generation] = set()
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
        self._current = _Generation(process, ours, self._exited)
        self._current.preload([each for each in self._preloads() if each not in self._unfit])
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
        if spare is not None and spare.is_idle() and (spare.threaded is not None or spare.given > SPARE_IMPORTS):
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
                (self._next or self._current).preload(wanted)
                self._given = tuple(wanted)
        if self._next is not None:
            if time.monotonic() - self._next.started_s > IMPORT_LIMIT_S:
                self._drop_next(self._next.importing[0])
            self._look_again(ADVANCE_S)
        # A spare that lacks the imports of the next process gets them when that has made them.
        self._renew_spare()

    def _forked_from(self, generation: _Generation) -> _Generation | None:
        ours, theirs = channel_pair()
        try:
            process = generation.fork("fork server", "", (theirs.fileno(),))
            if process is not None:
                return _Generation(process, ours, self._exited)
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
                    self._spare.preload(self._given, collects=False)
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

    def _end(self, generation: _Generation) -> None:
        generation.kill()
        self._ending.add(generation)

    def _exited(self, generation: _Generation) -> None:
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
