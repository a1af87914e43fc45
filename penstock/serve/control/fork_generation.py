"""One process of a fork server, as the supervisor sees it: what it is given to import, and what it forks."""

import asyncio
import json
import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal, final

log = logging.getLogger(__name__)

Target = Literal["child", "fork server", "trial"]
# The answers of a fork server to an import, and of a spare that becomes another process.
IMPORTED, HAS_THREADS, BECOMES = b"imported", b"imported, with threads", b"becomes"
# What is collected after the last import of a request: all garbage, or only that of these imports.
ALL, NEW = "all", "new"

# A fork takes milliseconds; the supervisor does nothing else during it.
FORK_TIMEOUT_S = 1.0
# Largest request; beyond it, a Python is started.
MAX_REQUEST_BYTES = 64 << 10


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
class Generation:
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
        ended: "Callable[[Generation], None]",
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

    def preload(self, preloads: Sequence[Preload], *, collects_all: bool) -> None:
        """Have it import these.

        Args:
            preloads: What to import.
            collects_all: Collect all garbage after the last one, not only that of these.
        """
        for at, preload in enumerate(preloads, 1):
            collects = "" if at < len(preloads) else ALL if collects_all else NEW
            if self.send(json.dumps({"preload": asdict(preload), "collects": collects}), ()):
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
