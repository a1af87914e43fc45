"""A process that the supervisor starts, watches, and starts again when it dies."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import final

from penstock.serve.messages import Channel, Message, pair
from penstock.serve.settings import Settings

log = logging.getLogger(__name__)

STARTS_S = 300.0
LOOK_S = 1.0
# A batch blocks the engine's loop, and may take the whole budget where one is measured for the first time.
BUDGETS_BLOCKED = 2
# One that dies at once every time, or before it is ready, is started ever more slowly.
QUICK_S = 5.0
SLOWEST_S = 10.0


@final
class Backoff:
    """How long to wait before a process that died is started again."""

    def __init__(self) -> None:
        self._quick_deaths = 0

    def after(self, lived_s: float, *, ready: bool) -> float:
        """The pause after one more death, in seconds.

        Args:
            lived_s: How long the process was there.
            ready: Whether it ever gave a sign of life.
        """
        quick = not ready or lived_s < QUICK_S
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        return min(0.1 * 2**self._quick_deaths, SLOWEST_S) if self._quick_deaths > 1 else 0.0


@final
class Child:
    """One role and the process that plays it now.

    Args:
        role: `engine`, of several `engine N on DEVICE`, or `front-end N`.
        settings: What it is told.
        descriptors: What it inherits, in the order in which its role expects them.
        heard: Called with each message of it.
        lost: Called when its process is gone.
        back: Called when another process was started in its place.

    Attributes:
        wanted: Whether it is started again when it dies.
        starts: How often a process was started.
        ready: Whether its process has given a sign of life since it was started.
        why: What its process said before it ended because it could not do its work; empty otherwise.
    """

    def __init__(
        self,
        role: str,
        settings: Settings,
        descriptors: Sequence[int],
        heard: "Callable[[Child, Message, list[int]], None]",
        lost: "Callable[[Child], None]",
        back: "Callable[[Child], None]",
    ) -> None:
        self.role = role
        self.wanted = True
        self.starts = 0
        self.ready = False
        self.why = ""
        # A process whose loop has not turned for so long hangs, and is killed.
        self._hangs_s = settings.hangs_s + BUDGETS_BLOCKED * settings.budget_ns / 1e9
        self._settings = settings
        self._descriptors = tuple(descriptors)
        self._heard = heard
        self._lost = lost
        self._back = back
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._started_s = 0.0
        self._alive_s = 0.0
        self._looked_s = 0.0
        self._backoff = Backoff()
        self._gone = asyncio.Event()

    @property
    def alive(self) -> bool:
        """Whether there is a process now."""
        return self._process is not None

    def start(self) -> None:
        """Start its process.

        Raises:
            OSError: The machine has no process, memory or descriptor left.
        """
        ours, theirs = pair()
        told = json.dumps([self.role, os.getpid(), theirs.fileno(), self._descriptors])
        command = [sys.executable, "-m", "penstock.serve.process", told, self._settings.to_json()]
        # A group of its own: Ctrl-C in a terminal is for the supervisor, which lets the children drain.
        try:
            self._process = subprocess.Popen(
                command, pass_fds=(theirs.fileno(), *self._descriptors), process_group=0, stdin=subprocess.DEVNULL
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._gone.clear()
        self.starts += 1
        self.why = ""
        self._started_s = self._looked_s = time.monotonic()
        self._alive_s = self._started_s + STARTS_S - self._hangs_s
        loop = asyncio.get_running_loop()
        self._channel = Channel(ours, lambda message, given: self._heard(self, message, given), lambda: None)
        exit_fd = os.pidfd_open(self._process.pid)
        loop.add_reader(exit_fd, self._exited, exit_fd)
        loop.call_later(LOOK_S, self._look, self._process)
        log.info("%s started as process %d", self.role, self._process.pid)

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Say something to its process; nothing where there is none."""
        if self._channel is not None:
            self._channel.send(message, descriptors)

    def heard(self) -> None:
        """Its process says that it is alive."""
        self.ready = True
        self._alive_s = time.monotonic()

    def close(self) -> None:
        """Let its process end itself."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def kill(self) -> None:
        """End its process at once, and wait for that."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def ended(self) -> None:
        """Returns when there is no process."""
        if self._process is not None:
            await self._gone.wait()

    def _exited(self, exit_fd: int) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(exit_fd)
        os.close(exit_fd)
        process, self._process = self._process, None
        assert process is not None, self.role
        status = process.wait()
        if self._channel is not None:
            self._channel.hear_out()
        self.close()
        ready, self.ready = self.ready, False
        self._gone.set()
        self._lost(self)
        if self.wanted:
            why = self.why or f"ended with status {status}"
            log.error("%s (process %d) %s; it is started again", self.role, process.pid, why)
            pause_s = self._backoff.after(time.monotonic() - self._started_s, ready=ready)
            loop.call_later(pause_s, self._again)

    def _again(self) -> None:
        if not self.wanted:
            return
        try:
            self.start()
        except OSError as error:
            log.error("%s cannot be started (%s); it is tried again in %g s", self.role, error, SLOWEST_S)
            asyncio.get_running_loop().call_later(SLOWEST_S, self._again)
        else:
            self._back(self)

    def _look(self, process: "subprocess.Popen[bytes]") -> None:
        if process is not self._process:
            return
        now_s = time.monotonic()
        # While the supervisor itself was stopped, it heard of nobody: that time counts for nothing.
        self._alive_s += max(0.0, now_s - self._looked_s - 2 * LOOK_S)
        self._looked_s = now_s
        silent_s = now_s - self._alive_s
        if silent_s > self._hangs_s:
            log.error("%s (process %d) has not moved for %.0f s; it is killed", self.role, process.pid, silent_s)
            process.kill()
        asyncio.get_running_loop().call_later(LOOK_S, self._look, process)
