"""Processes of a server that run in the test's own event loop: the code of the supervisor and of both sides is real.

What is replaced is what the system does (processes, their ends), the models of an engine, and the sockets and tables of
a front-end. A killed process stops at once; its end is noticed a moment later.
"""

import asyncio
import json
import os
import random
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import pytest

from penstock.core.errors import BundleError, PenstockError, ServeError, UnknownRoute
from penstock.runtime.loading_steps import AWAITING_EXPORT, EXPORTING
from penstock.serve.channel import Channel
from penstock.serve.control import child, frontend_process, supervisor
from penstock.serve.engine import engine_process
from penstock.serve.messages import Heartbeat, LoadModel, Message, ModelLoaded
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.repository import fatal_loads, model_repository, model_restores
from penstock.serve.repository.model_directory import ModelFolder
from penstock.serve.settings import Settings

# Longest pause of anything.
PAUSE_S = 0.003
FIRST_PID = 1 << 23


@final
class Chances:
    """Random pauses and faults, from a seed.

    Args:
        seed: The seed.
        load_failures: Share of the loads that an engine refuses, after the start.
        attach_failures: Share of the tables that a front-end cannot attach.
        find_failures: Share of the searches for the model that find it damaged or removed.
        exports: Share of the loads before which the network is exported.
    """

    def __init__(
        self,
        seed: int,
        load_failures: float = 0.0,
        attach_failures: float = 0.0,
        find_failures: float = 0.0,
        exports: float = 0.0,
    ) -> None:
        self.random = random.Random(seed)
        self.load_failures, self.attach_failures = load_failures, attach_failures
        self.find_failures, self.exports = find_failures, exports
        # Set after the start, which fails otherwise.
        self.failing = False

    def fails(self, share: float) -> bool:
        return self.failing and self.random.random() < share

    def pause_s(self) -> float:
        return self.random.choice((0.0, 0.0, self.random.random() * PAUSE_S))


class Loader:
    """The models of an engine."""

    def __init__(
        self,
        settings: Settings,
        report: Callable[[int, str], None],
        *,
        shared: bool,
        index: int,
        wake: Callable[[int], None],
    ) -> None:
        self.device = "cpu"
        self.loaded: set[int] = set()
        self.chances: Chances = Processes.current.chances

    async def load(self, command: LoadModel) -> tuple[ModelLoaded, Any, int]:
        await asyncio.sleep(self.chances.pause_s())
        if self.chances.fails(self.chances.load_failures):
            raise ServeError("it is damaged")
        self.loaded.add(command.key)
        loaded = ModelLoaded(
            command=command, engine=0, device="cpu", slots=8, frontends=2, bundle_hash="", application="app"
        )
        return loaded, None, os.memfd_create("table")

    def unload(self, key: int) -> None:
        self.loaded.discard(key)

    def tick(self) -> None:
        return None

    def close(self) -> None:
        return None


class FrontEnd:
    """The tables of a front-end, as `Attachments` keeps them, and the sockets that it accepts from."""

    def __init__(self, settings: Settings, listener: socket.socket, change: Any, **_: Any) -> None:
        self.chances = Processes.current.chances
        self.models = ModelRegistry(change, loading=True)
        self.models.starting = True
        self.tables: dict[int, Any] = {}
        self.attachments = SimpleNamespace(has_imported=self._has_imported, collect=lambda: 0)
        self.http = SimpleNamespace(
            accept_from=self._accept_from, release=self._release, watch=lambda others: None, note_work=lambda: None
        )
        self.accepts: set[int] = set()
        self.listening = False

    def _has_imported(self, command: LoadModel) -> bool:
        return command.key in self.tables

    def _accept_from(self, index: int, listener: socket.socket) -> None:
        listener.close()
        self.accepts.add(index)

    def _release(self, index: int) -> None:
        self.accepts.discard(index)

    def attach(self, loaded: ModelLoaded, memory: int) -> None:
        key = loaded.command.key
        if key not in self.tables:
            if self.chances.fails(self.chances.attach_failures):
                raise ServeError("it holds another bundle now")
            served = SimpleNamespace(name=loaded.command.name, version=loaded.command.version, engine_lost=False)
            self.tables[key] = served
        self.models.put(self.tables[key])

    async def retire(self, key: int) -> None:
        if key in self.tables:
            self.models.take_out(self.tables[key])
        await asyncio.sleep(self.chances.pause_s())
        self.tables.pop(key, None)

    def lose_engine(self, engine: int) -> None:
        for served in self.tables.values():
            served.engine_lost = True

    def listen(self) -> None:
        self.listening = True

    async def started(self) -> None:
        self.models.starting = False

    async def drain(self, hurry: Callable[[], bool]) -> None:
        self.models.draining = True
        await asyncio.sleep(self.chances.pause_s())

    def check(self) -> None:
        """Check that a front-end which is ready finds every model that is said to be ready."""
        try:
            self.models.reject_unready()
        except PenstockError:
            return
        for state in self.models.states_here:
            if state.state == "READY":
                try:
                    self.models.named(state.name, state.version)
                except UnknownRoute as error:
                    raise AssertionError((state, self.tables)) from error


@final
class Process:
    """Takes the place of `subprocess.Popen`."""

    def __init__(self, command: list[str], **_: Any) -> None:
        name, index, _, channel, descriptors = json.loads(command[3])
        self.name, self.settings = name, Settings.from_json(command[4])
        # As the supervisor's model numbers them.
        self.number = 0 if name.startswith("engine") else index + 1
        self.end, self.descriptors = socket.socket(fileno=os.dup(channel)), descriptors
        self.exit_fd, self.returncode = os.eventfd(0, os.EFD_NONBLOCK), 0
        self.side: Any = None
        self.task: asyncio.Task[None] | None = None
        self.gone = False
        self.processes = Processes.current
        self.processes.all.append(self)
        self.pid = FIRST_PID + len(self.processes.all)
        asyncio.get_running_loop().call_later(self.processes.chances.pause_s(), self._begin)

    def _begin(self) -> None:
        if self.gone:
            return
        own, *others = self.descriptors
        if self.number:
            count = self.settings.frontend_processes
            *engines, own = self.descriptors[:-count]
            self.side = frontend_process.FrontendProcess(
                self.settings, self.end, self.number - 1, own, engines, [self.end] * count
            )
        else:
            self.side = engine_process.EngineProcess(self.settings, self.end, 0, own, others)
        self.own, self._heartbeats = own, 0
        channel: Any = self.side._channel
        channel.send = partial(self._say, channel.send)
        self.task = asyncio.get_running_loop().create_task(self.side.run())
        self.task.add_done_callback(lambda _: self.kill())

    def _say(self, send: Callable[..., None], message: Message, descriptors: tuple[int, ...] = ()) -> None:
        first = isinstance(message, Heartbeat) and not self.number and not self._heartbeats
        self._heartbeats += isinstance(message, Heartbeat)
        if first or not isinstance(message, Heartbeat):
            self.processes.said(self.number, message)
        send(message, descriptors)

    @property
    def serves(self) -> bool:
        """Whether clients can ask it for changes."""
        return not self.gone and self.number > 0 and self.side is not None and not self.side._front.models.starting

    def kill(self) -> None:
        """End it as `SIGKILL` does; what it sent can still be read."""
        if self.gone:
            return
        self.gone = True
        if self.side is not None:
            channel: Channel = self.side._channel
            channel.close()
            asyncio.get_running_loop().remove_reader(self.own)
            assert self.task is not None
            self.task.cancel()
            for task in self.side._tasks._tasks:
                task.cancel()
        self.end.close()
        asyncio.get_running_loop().call_later(self.processes.chances.pause_s(), os.eventfd_write, self.exit_fd, 1)

    def wait(self) -> int:
        return -9


@final
class Processes:
    """All processes of a supervisor that is run in a test.

    Args:
        chances: Their pauses and faults.
        said: Called with the number of a process and each of its messages, when it is sent; of an engine's heartbeats
            with the first.
        monkeypatch: Puts them in the place of real ones.
    """

    current: "Processes"

    def __init__(self, chances: Chances, said: Callable[[int, Message], None], monkeypatch: pytest.MonkeyPatch) -> None:
        Processes.current = self
        self.chances, self.said = chances, said
        self.all: list[Process] = []
        monkeypatch.setattr(child.subprocess, "Popen", Process)
        monkeypatch.setattr(os, "pidfd_open", lambda pid: os.dup(self.all[pid - FIRST_PID - 1].exit_fd))
        monkeypatch.setattr(child.RestartPauses, "pause_s", lambda *_, **__: chances.pause_s())
        monkeypatch.setattr(supervisor, "on_stop_signal", lambda stop: None)
        monkeypatch.setattr(supervisor, "announce", lambda *_: None)
        monkeypatch.setattr(model_restores, "MIN_RETRY_S", PAUSE_S)
        # Their kills, without pauses, are no sign of a fatal load.
        monkeypatch.setattr(fatal_loads, "MAX_KILLS", 1 << 30)
        monkeypatch.setattr(engine_process, "ModelLoader", Loader)
        monkeypatch.setattr(frontend_process, "FrontEnd", FrontEnd)
        monkeypatch.setattr(frontend_process, "import_application", lambda reference, pinned: None)
        # There is no process that could be forked.
        monkeypatch.setattr(supervisor.ForkServer, "start", lambda forks: None)
        monkeypatch.setattr(supervisor.BundleTrials, "check", _no_trial)
        monkeypatch.setattr(supervisor.NetworkExports, "is_needed", self._is_needed)
        monkeypatch.setattr(supervisor.NetworkExports, "export", self._export)
        find = model_repository.ModelRepository._found

        async def found(models: model_repository.ModelRepository, name: str) -> list[ModelFolder]:
            await asyncio.sleep(chances.pause_s())
            if chances.fails(chances.find_failures):
                raise chances.random.choice((UnknownRoute("it was removed"), BundleError("it is damaged")))
            return await find(models, name)

        monkeypatch.setattr(model_repository.ModelRepository, "_found", found)

    async def _is_needed(self, bundle: Path) -> bool:
        await asyncio.sleep(self.chances.pause_s())
        return self.chances.fails(self.chances.exports)

    async def _export(self, bundle: Path, app: str, report: Callable[[str], None]) -> str:
        for step in (AWAITING_EXPORT, EXPORTING):
            await asyncio.sleep(self.chances.pause_s())
            report(step)
        await asyncio.sleep(self.chances.pause_s())
        return self.chances.random.choice(("", "it cannot be exported"))

    def alive(self) -> list[Process]:
        """Those that have not been killed."""
        return [process for process in self.all if not process.gone]

    def close(self) -> None:
        """Release what they held."""
        for process in self.all:
            os.close(process.exit_fd)


async def _no_trial(trials: Any, bundle: Any, before: Any) -> None:
    await asyncio.sleep(0)
