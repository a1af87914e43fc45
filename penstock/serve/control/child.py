"""A process that the supervisor starts, watches, and restarts when it dies."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from penstock.core.machine.process_stat import cpu_seconds
from penstock.serve.channel import Channel, channel_pair
from penstock.serve.control.backoff import MAX_BACKOFF_S, RestartPauses
from penstock.serve.control.fork_generation import ForkedProcess
from penstock.serve.control.fork_server import ONE_THREAD, ForkServer
from penstock.serve.messages import Message
from penstock.serve.settings import Settings

log = logging.getLogger(__name__)

# Time for a start, until the process serves.
START_TIMEOUT_S = 300.0
WATCH_INTERVAL_S = 1.0
# A process without a heartbeat for this time is stalled; it sends one each second.
STALLED_S = 2.5
# A batch blocks the engine's loop, and the first run of a batch size may take the whole budget.
BUDGETS_BLOCKED = 2


def is_hung(silent_s: float, silent_cpu_s: float, *, serving: bool, watchdog_s: float) -> bool:
    """Tell whether a process without heartbeats is to be killed.

    A process that starts reads and imports much at once. On a loaded machine that takes long while the process gets
    little CPU time, so until it serves its CPU time counts.

    Args:
        silent_s: Time since its last heartbeat.
        silent_cpu_s: CPU time that it used since.
        serving: Whether its start is over.
        watchdog_s: Limit of the time without a heartbeat.
    """
    if serving:
        return silent_s > watchdog_s
    return silent_cpu_s > watchdog_s or silent_s > START_TIMEOUT_S


@final
@dataclass(eq=False)
class ChildProcess:
    """One engine or front-end: its current process, and the restarts of it.

    Args:
        name: `engine`, of several `engine N on DEVICE`, or `front-end N`.
        index: Index among the engines or the front-ends.
        settings: Settings of the server.
        descriptors: Inherited descriptors, in the order that `child_main` expects.
        on_message: Called with each message of the process and its descriptors.
        on_exit: Called when the process is gone.
        on_restart: Called when a new process was started in its place; None for an engine.
        forks: Forks the process if it can; None to start a Python each time.
        at_once: See `RestartPauses`.
        on_stall: Called when `stalled` changes while the process serves; None for an engine.
        gives_way: Returns whether other processes serve now; the start of a fork then leaves a busy core to them.

    Attributes:
        keep_running: Restart the process when it dies.
        starts: Number of processes started so far.
        ready: The current process has sent a heartbeat.
        serving: The start of the current process is over: for a front-end, it has attached every table.
        start_error: The process's own reason why it could not start; empty otherwise.
        exit_status: Status of the process that ended last, negative if a signal ended it.
        stalled: It has sent no heartbeat for a while. It may go on, or be killed by the watchdog.
    """

    name: str
    index: int
    settings: Settings
    descriptors: Sequence[int]
    on_message: "Callable[[ChildProcess, Message, list[int]], None]"
    on_exit: "Callable[[ChildProcess], None]"
    on_restart: "Callable[[ChildProcess], None] | None"
    forks: ForkServer | None = None
    at_once: int = 1
    on_stall: "Callable[[ChildProcess], None] | None" = None
    gives_way: Callable[[], bool] = lambda: False
    keep_running: bool = field(init=False, default=True)
    starts: int = field(init=False, default=0)
    ready: bool = field(init=False, default=False)
    serving: bool = field(init=False, default=False)
    start_error: str = field(init=False, default="")
    exit_status: int = field(init=False, default=0)
    stalled: bool = field(init=False, default=False)
    _process: "subprocess.Popen[bytes] | ForkedProcess | None" = field(init=False, default=None)
    _channel: Channel | None = field(init=False, default=None)
    _started_s: float = field(init=False, default=0.0)
    _heartbeat_s: float = field(init=False, default=0.0)
    _heartbeat_cpu_s: float = field(init=False, default=0.0)
    _watched_s: float = field(init=False, default=0.0)
    _pauses: RestartPauses = field(init=False)
    _gone: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._pauses = RestartPauses(self.at_once)

    @property
    def _watchdog_s(self) -> float:
        return self.settings.limits.watchdog_s + BUDGETS_BLOCKED * self.settings.batching.budget_ns / 1e9

    @property
    def pid(self) -> int | None:
        """The current process; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """True while there is a process."""
        return self._process is not None

    @property
    def answers(self) -> bool:
        """True while its start is over, and it is not stalled."""
        return self.serving and not self.stalled

    def start(self) -> None:
        """Start the process.

        Raises:
            OSError: The machine has no process, memory or descriptor left.
        """
        ours, theirs = channel_pair()
        try:
            self._process = self._forked(theirs)
            if self._process is None and self.forks is not None:
                # A fork that was not answered in time may have this end, too.
                for end in (ours, theirs):
                    end.close()
                ours, theirs = channel_pair()
            if self._process is None:
                self._process = self._started(theirs)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            exit_fd = os.pidfd_open(self._process.pid)
        except OSError:
            # Nothing would notice its end, and it would run on beside the next one.
            self.kill()
            self._process = None
            ours.close()
            raise
        self._gone.clear()
        self.starts += 1
        self.start_error = ""
        self.stalled = False
        self._started_s = self._watched_s = self._heartbeat_s = time.monotonic()
        self._heartbeat_cpu_s = 0.0
        loop = asyncio.get_running_loop()
        self._channel = Channel(
            ours, lambda message, descriptors: self.on_message(self, message, descriptors), lambda: None
        )
        loop.add_reader(exit_fd, self._exited, exit_fd)
        loop.call_later(WATCH_INTERVAL_S, self._watch, self._process)
        how = " by a fork" if isinstance(self._process, ForkedProcess) else ""
        log.info("%s started as process %d%s", self.name, self._process.pid, how)

    def _forked(self, channel: socket.socket) -> ForkedProcess | None:
        if self.forks is None:
            return None
        argument = json.dumps([self.name, self.index, self.settings.to_json(), self.gives_way()])
        return self.forks.fork("child", argument, (channel.fileno(), *self.descriptors))

    def _started(self, channel: socket.socket) -> "subprocess.Popen[bytes]":
        start = json.dumps([self.name, self.index, os.getpid(), channel.fileno(), self.descriptors])
        command = [sys.executable, "-m", "penstock.serve.control.child_main", start, self.settings.to_json()]
        # A process group of its own: Ctrl-C in a terminal reaches the supervisor alone, which drains the children.
        return subprocess.Popen(
            command,
            pass_fds=(channel.fileno(), *self.descriptors),
            process_group=0,
            stdin=subprocess.DEVNULL,
            env=os.environ if self.forks is None else ONE_THREAD | os.environ,
        )

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message; it is dropped where there is no process."""
        if self._channel is not None:
            self._channel.send(message, descriptors)

    def record_heartbeat(self) -> None:
        """Restart the watchdog."""
        self.ready = True
        self._heartbeat_s = time.monotonic()
        self._set_stalled(False)
        if not self.serving and self._process is not None:
            self._heartbeat_cpu_s = cpu_seconds(self._process.pid)

    def _set_stalled(self, stalled: bool) -> None:
        if stalled != self.stalled:
            self.stalled = stalled
            if self.on_stall is not None and self.serving:
                self.on_stall(self)

    def close(self) -> None:
        """Close the channel, after which the process ends itself."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def kill(self) -> None:
        """Kill the process and reap it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def wait_exit(self) -> None:
        """Wait until there is no process."""
        if self._process is not None:
            await self._gone.wait()

    def _exited(self, exit_fd: int) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(exit_fd)
        os.close(exit_fd)
        process, self._process = self._process, None
        assert process is not None, self.name
        status = self.exit_status = process.wait()
        # Whatever its last messages and its end lead to, another process is started.
        try:
            if self._channel is not None:
                self._channel.drain()
        finally:
            self.close()
            # After its last messages: a heartbeat among them must not count for the next process.
            ready, served = self.ready, self.serving
            self.ready = self.serving = False
            self._gone.set()
            try:
                self.on_exit(self)
            finally:
                self._restart_later(process.pid, status, ready=ready, served=served)

    def _restart_later(self, pid: int, status: int, *, ready: bool, served: bool) -> None:
        if not self.keep_running:
            return
        reason = self.start_error or f"ended with status {status}"
        log.error("%s (process %d) %s; restarting it", self.name, pid, reason)
        pause_s = self._pauses.pause_s(time.monotonic() - self._started_s, ready=ready, served=served)
        asyncio.get_running_loop().call_later(pause_s, self._restart)

    def _restart(self) -> None:
        if not self.keep_running:
            return
        try:
            self.start()
        except OSError as error:
            log.error("%s cannot be started (%s); trying again in %g s", self.name, error, MAX_BACKOFF_S)
            asyncio.get_running_loop().call_later(MAX_BACKOFF_S, self._restart)
        else:
            if self.on_restart is not None:
                self.on_restart(self)

    def _watch(self, process: "subprocess.Popen[bytes] | ForkedProcess") -> None:
        if process is not self._process:
            return
        now_s = time.monotonic()
        # Time in which the supervisor itself was stopped does not count: it received no heartbeats.
        self._heartbeat_s += max(0.0, now_s - self._watched_s - 2 * WATCH_INTERVAL_S)
        self._watched_s = now_s
        silent_s = now_s - self._heartbeat_s
        self._set_stalled(silent_s > STALLED_S)
        silent_cpu_s = 0.0 if self.serving else cpu_seconds(process.pid) - self._heartbeat_cpu_s
        # Nothing tells the time that a process takes to import what it needs before its first heartbeat.
        limit_s = self._watchdog_s if self.ready else START_TIMEOUT_S
        if is_hung(silent_s, silent_cpu_s, serving=self.serving, watchdog_s=limit_s):
            log.error("%s (process %d) sent no heartbeat for %.0f s; killing it", self.name, process.pid, silent_s)
            process.kill()
        asyncio.get_running_loop().call_later(WATCH_INTERVAL_S, self._watch, process)
