"""The supervisor's end of a fork server: a process that has imported what others need, and forks them.

Importing an application that imports torch takes seconds of a core, at each restart of a front-end and at each trial of
a bundle. A fork of a process that has imported it takes milliseconds.

    supervisor ── socket pair ── fork server ── fork ── (ends at once) ── fork ── front-end or trial

The process in between ends, so that the kernel gives the last one to the supervisor, which waits for it, and with which
it ends. Where nothing can be forked, the caller starts a Python of its own.

A fork server forks nothing while it imports, which at the lowest priority of a busy core may take long. So further
imports are made by another fork server that is forked from the first, and takes its place when that is done; a short
time after the last of them was asked for, because a model seldom changes alone.
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
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal, final

from penstock.serve.channel import channel_pair

log = logging.getLogger(__name__)

# An idle trial runs only while the cores have nothing else to do.
Target = Literal["child", "fork server", "trial", "idle trial"]
# What a fork server says of an import.
IMPORTED, HAS_THREADS = b"imported", b"imported, with threads"

# A fork takes milliseconds; the supervisor does nothing else during it.
FORK_TIMEOUT_S = 1.0
# Largest request; beyond it, a Python is started.
MAX_REQUEST_BYTES = 64 << 10
RESTART_PAUSE_S = 5.0
GATHER_S = 3.0
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
        # Imports that it has not reported yet.
        self.importing = 0
        # Whether its imports left threads, beside which it forks nothing.
        self.has_threads = False
        self._process = process
        self._end: socket.socket | None = end
        self._exit_fd = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._exit_fd, ended, self)

    def preload(self, preload: Preload) -> bool:
        """Have it import something; returns whether it was asked."""
        asked = self.send(json.dumps({"preload": asdict(preload)}), ())
        self.importing += asked
        return asked

    def is_idle(self) -> bool:
        """Tell whether it has imported everything."""
        while self.importing and (answer := self.receive(0.0)) is not None:
            self.importing -= 1
            self.has_threads = answer == HAS_THREADS
        return self._end is not None and not self.importing

    def send(self, request: str, descriptors: Sequence[int]) -> bool:
        """Send a request; returns whether it was sent."""
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
        if self._end is None or not select.select([self._end], [], [], timeout_s)[0]:
            return None
        with suppress(ConnectionError):
            return self._end.recv(64) or None
        return None

    def fork(self, target: Target, argument: str, descriptors: Sequence[int]) -> ForkedProcess | None:
        """Fork a process; None if its imports started threads, or it does not answer: then it is killed."""
        request = json.dumps({"fork": target, "argument": argument, "parent": os.getpid()})
        if not self.send(request, descriptors):
            return None
        answer = self.receive(FORK_TIMEOUT_S)
        if answer is None:
            log.warning("the fork server does not answer; another one is started")
            # Its end is noticed by `ended`.
            self.kill()
            self._disconnect()
            return None
        pid = int(answer)
        return ForkedProcess(pid) if pid else None

    def kill(self) -> None:
        """Kill the process; call `close` afterwards."""
        self._process.kill()

    def close(self) -> None:
        """Wait for the process, which ended or was killed, and forget it."""
        self._process.wait()
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
        preloads: Called at each start; what it imports first.
    """

    def __init__(self, preloads: Callable[[], Sequence[Preload]]) -> None:
        self._preloads = preloads
        self._current: _Generation | None = None
        # Forked from the current one, with more imports.
        self._next: _Generation | None = None
        self._wanted: list[Preload] = []
        self._gathering: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process that forks; None while there is none."""
        return None if self._current is None else self._current.pid

    @property
    def pids(self) -> frozenset[int]:
        """Its processes."""
        return frozenset(each.pid for each in (self._current, self._next) if each is not None)

    def start(self) -> None:
        """Start the process, if there is none, and let it import at the lowest priority."""
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
        for preload in self._preloads():
            self._current.preload(preload)

    def preload(self, preload: Preload) -> None:
        """Have it import something soon; what it has imported so far can be forked meanwhile."""
        if self._current is not None:
            self._wanted.append(preload)
            self._gather()

    def _gather(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
        self._gathering = asyncio.get_running_loop().call_later(GATHER_S, self._import_wanted)

    def _import_wanted(self) -> None:
        self._advance()
        if self._next is not None:
            # Its imports are to be of use before others are made.
            self._gather()
            return
        self._gathering = None
        if self._current is not None and self._current.is_idle():
            self._next = self._forked_from(self._current)
        where = self._next or self._current
        for preload in dict.fromkeys(self._wanted):
            if where is not None:
                where.preload(preload)
        self._wanted = []

    def fork(self, target: Target, argument: str, descriptors: Sequence[int]) -> ForkedProcess | None:
        """Fork a process.

        Args:
            target: What it runs, see `fork_server_main`.
            argument: Its argument.
            descriptors: It gets copies of these, in this order.

        Returns:
            The process; None if it cannot be forked, because the server has only begun to import, or its imports
            started threads.
        """
        self._advance()
        if self._current is None or not self._current.is_idle():
            return None
        return self._current.fork(target, argument, descriptors)

    def close(self) -> None:
        """End the process, for good."""
        self._closed = True
        self.pause()

    def pause(self) -> None:
        """End the process until the next `start`."""
        for each in (self._next, self._current):
            if each is not None:
                self._end(each)
        self._next = self._current = None
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        # At the next start, it imports everything.
        self._wanted = []

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
        """Let the next process take the place of the current one, if it has imported everything."""
        if self._next is None or not self._next.is_idle():
            return
        if self._next.has_threads:
            # It forks nothing, and what it has imported starts threads in what the current one forks, too.
            self._end(self._next)
        else:
            if self._current is not None:
                self._end(self._current)
            self._current = self._next
        self._next = None

    def _end(self, generation: _Generation) -> None:
        generation.kill()
        generation.close()

    def _exited(self, generation: _Generation) -> None:
        generation.close()
        if generation is self._next:
            self._next = None
            return
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
