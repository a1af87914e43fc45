"""The supervisor's end of a fork server: a process that has imported what others need, and forks them.

Importing an application that imports torch takes seconds of a core, at each restart of a front-end and at each trial of
a bundle. A fork of a process that has imported it takes milliseconds.

    supervisor ── socket pair ── fork server ── fork ── (ends at once) ── fork ── front-end or trial

The process in between ends, so that the kernel gives the last one to the supervisor, which waits for it, and with which
it ends. Where nothing can be forked, the caller starts a Python of its own.
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

Target = Literal["child", "trial"]

# A fork takes milliseconds; the supervisor does nothing else during it.
FORK_TIMEOUT_S = 1.0
# Largest request; beyond it, a Python is started.
MAX_REQUEST_BYTES = 64 << 10
RESTART_PAUSE_S = 5.0
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
class ForkServer:
    """A fork server, started anew when it ends.

    Args:
        preloads: Called at each start; what it imports first.
    """

    def __init__(self, preloads: Callable[[], Sequence[Preload]]) -> None:
        self._preloads = preloads
        self._process: subprocess.Popen[bytes] | None = None
        self._end: socket.socket | None = None
        self._exit_fd = -1
        # Imports that it has not reported yet.
        self._importing = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Its process; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, if there is none, and let it import at the lowest priority."""
        if self._closed or self._process is not None:
            return
        # Orphans of the descendants become children of this process.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        ours, theirs = channel_pair()
        command = [sys.executable, "-m", "penstock.serve.control.fork_server_main", str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
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
        self._end = ours
        self._importing = 0
        self._exit_fd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._exit_fd, self._exited, self._process)
        for preload in self._preloads():
            self.preload(preload)

    def preload(self, preload: Preload) -> None:
        """Have it import something; nothing is forked until that is done."""
        if self._send(json.dumps({"preload": asdict(preload)}), ()):
            self._importing += 1

    def fork(self, target: Target, argument: str, descriptors: Sequence[int]) -> ForkedProcess | None:
        """Fork a process.

        Args:
            target: What it runs, see `fork_server_main`.
            argument: Its argument.
            descriptors: It gets copies of these, in this order.

        Returns:
            The process; None if it cannot be forked, because the server still imports, or its imports started threads.
        """
        if not self._is_idle():
            return None
        request = json.dumps({"fork": target, "argument": argument, "parent": os.getpid()})
        if not self._send(request, descriptors):
            return None
        answer = self._receive(FORK_TIMEOUT_S)
        if answer is None:
            log.warning("the fork server does not answer; another one is started")
            # Its end is noticed by `_exited`.
            if self._process is not None:
                self._process.kill()
            self._disconnect()
            return None
        pid = int(answer)
        return ForkedProcess(pid) if pid else None

    def close(self) -> None:
        """End the process, for good."""
        self._closed = True
        self.pause()

    def pause(self) -> None:
        """End the process until the next `start`."""
        if self._process is not None:
            self._process.kill()
            self._forget(self._process)

    def _is_idle(self) -> bool:
        while self._importing and self._receive(0.0) is not None:
            self._importing -= 1
        return self._end is not None and not self._importing

    def _send(self, request: str, descriptors: Sequence[int]) -> bool:
        content = request.encode()
        if self._end is None or len(content) > MAX_REQUEST_BYTES:
            return False
        try:
            socket.send_fds(self._end, [content], list(descriptors), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def _receive(self, timeout_s: float) -> bytes | None:
        """Receive a packet; None if there is none in time, or never will be."""
        if self._end is None or not select.select([self._end], [], [], timeout_s)[0]:
            return None
        with suppress(ConnectionError):
            return self._end.recv(64) or None
        return None

    def _disconnect(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None

    def _exited(self, process: "subprocess.Popen[bytes]") -> None:
        self._forget(process)
        asyncio.get_running_loop().call_later(RESTART_PAUSE_S, self.start)

    def _forget(self, process: "subprocess.Popen[bytes]") -> None:
        process.wait()
        asyncio.get_running_loop().remove_reader(self._exit_fd)
        os.close(self._exit_fd)
        self._disconnect()
        self._process = None


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
