"""What the supervisor sends to its processes, and in which order."""

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import EngineLost, ServeError
from penstock.serve import messages
from penstock.serve.control.child import ChildProcess
from penstock.serve.control.supervisor import _Supervisor
from penstock.serve.messages import LoadModel, Message, ModelLoaded
from penstock.serve.settings import ModelSettings, Settings


def loaded(key: int) -> ModelLoaded:
    command = LoadModel(key=key, model=key, name="only", version="1", bundle="bundle")
    return ModelLoaded(command=command, engine=0, device="cpu", slots=8, frontends=2, bundle_hash="", application="")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Message]]:
    """Messages with the names of their processes, which all run."""
    sent: list[tuple[str, Message]] = []
    monkeypatch.setattr(ChildProcess, "send", lambda child, message, _=(): sent.append((child.name, message)))
    monkeypatch.setattr(ChildProcess, "alive", True)
    return sent


def run(scene: Callable[[_Supervisor], Coroutine[Any, Any, None]]) -> None:
    """Run a scene with a supervisor of one engine and of two front-ends."""

    async def with_supervisor() -> None:
        sockets = [socket.socket() for _ in range(2)]
        supervisor = _Supervisor(Settings(models=ModelSettings(bundles=(Path("bundle"),))), sockets)
        supervisor._started = True
        await scene(supervisor)
        for each in sockets:
            each.close()
        for wake in {descriptor for child in supervisor._engines for descriptor in child.descriptors}:
            os.close(wake)

    asyncio.run(asyncio.wait_for(with_supervisor(), 5))


async def attach(supervisor: _Supervisor, key: int, *, fails: str = "") -> None:
    """Attach a table, which the front-end 0 cannot do if it `fails`."""
    commands = supervisor._commands
    commands._tables.setdefault(key, (loaded(key), os.memfd_create("table")))
    attaching = asyncio.create_task(commands.attach(*commands._tables[key]))
    await asyncio.sleep(0)
    first, second = supervisor._frontends
    failed = messages.CommandFailed(key=key, error=fails)
    supervisor._receive(first, failed if fails else messages.CommandDone(key=key), [])
    supervisor._receive(second, messages.CommandDone(key=key), [])
    await attaching


def test_a_front_end_that_starts_while_a_name_is_given_back_gives_it_to_the_same_table(
    sent: list[tuple[str, Message]],
) -> None:
    async def scene(supervisor: _Supervisor) -> None:
        await attach(supervisor, 0)
        with pytest.raises(ServeError, match="no such file"):
            await attach(supervisor, 1, fails="no such file")
        # The repository gives the name back to table 0, and has not retired table 1 yet.
        await attach(supervisor, 0)
        sent.clear()
        supervisor._frontend_restarted(supervisor._frontends[1])
        tables = [message.command.key for _, message in sent if isinstance(message, ModelLoaded)]
        assert tables == [1, 0]

    run(scene)


def test_a_model_is_not_ready_any_more_when_its_table_goes(
    sent: list[tuple[str, Message]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front-end that was started meanwhile has the state, and never had the table."""

    async def scene(supervisor: _Supervisor) -> None:
        async def load(command: LoadModel, engine: int) -> tuple[ModelLoaded, int]:
            tables = supervisor._commands._tables
            tables[command.key] = loaded(command.key), os.memfd_create("table")
            return tables[command.key]

        monkeypatch.setattr(supervisor._commands, "load", load)
        supervisor._engines[0].starts = 1
        loading = asyncio.create_task(supervisor._repository.load_all())
        while not any(isinstance(message, ModelLoaded) for _, message in sent):
            await asyncio.sleep(0)
        for child in supervisor._frontends:
            supervisor._receive(child, messages.CommandDone(key=0), [])
        await loading
        sent.clear()
        supervisor._engine_exited(supervisor._engines[0])
        for child in supervisor._frontends:
            seen = [message for name, message in sent if name == child.name]
            assert [type(message) for message in seen] == [messages.ModelState, messages.DropEngine]

    run(scene)


def test_an_engine_that_ends_while_it_measures_its_use_ends_no_load_of_the_same_number(
    sent: list[tuple[str, Message]], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[LoadModel] = []

    def record_load(engine: ChildProcess, command: LoadModel) -> str:
        recorded.append(command)
        return "it ended"

    async def scene(supervisor: _Supervisor) -> None:
        engine, commands = supervisor._engines[0], supervisor._commands
        monkeypatch.setattr(supervisor._ended_loads, "record_load", record_load)
        monkeypatch.setattr(commands, "loading", {0: loaded(0).command}.get)
        reporting = asyncio.create_task(commands.report_use(0))
        await asyncio.sleep(0)
        assert isinstance(sent[-1][1], messages.ReportUse)
        supervisor._engine_exited(engine)
        with pytest.raises(EngineLost):
            await reporting
        assert not recorded
        waiting = supervisor._pending.send(engine, loaded(0).command, 0)
        supervisor._engine_exited(engine)
        with pytest.raises(EngineLost, match="it ended"):
            await waiting
        assert recorded == [loaded(0).command]

    run(scene)


def test_whatever_an_engine_or_a_change_raises_is_an_answer(
    sent: list[tuple[str, Message]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(supervisor: _Supervisor) -> None:
        engine, frontend = supervisor._engines[0], supervisor._frontends[0]
        reporting = asyncio.create_task(supervisor._commands.report_use(0))
        await asyncio.sleep(0)
        _, asked = sent.pop()
        assert isinstance(asked, messages.ReportUse)
        supervisor._receive(engine, messages.UseUnknown(key=asked.key, error="the driver"), [])
        with pytest.raises(ServeError, match="the driver"):
            await reporting
        # An answer that nobody waits for any more.
        supervisor._receive(engine, messages.UseUnknown(key=asked.key, error="the driver"), [])

        async def change(name: str, unload: bool) -> None:
            raise KeyError(name)

        monkeypatch.setattr(supervisor._repository, "change", change)
        sent.clear()
        supervisor._receive(frontend, messages.ChangeModel(token=7, name="only", unload=False), [])
        while not sent:
            await asyncio.sleep(0)
        _, answer = sent.pop()
        assert isinstance(answer, messages.CommandFailed)
        assert (answer.key, answer.status) == (7, 500)

    run(scene)
