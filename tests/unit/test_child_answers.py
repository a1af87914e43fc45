"""Engines and front-ends answer every command of the supervisor, whatever is raised there."""

import asyncio
import itertools
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import pytest

from penstock.core.errors import ComputeFailed
from penstock.core.machine.start_pace import StartPace
from penstock.serve import messages
from penstock.serve.channel import Channel, channel_pair
from penstock.serve.control import frontend_process
from penstock.serve.control.frontend_process import FrontendProcess
from penstock.serve.engine import model_loader
from penstock.serve.engine.engine_process import EngineProcess
from penstock.serve.messages import LoadModel, Message, ModelLoaded
from penstock.serve.settings import ModelSettings, Settings

SETTINGS = Settings(models=ModelSettings(bundles=(Path("bundle"),)))
COMMAND = LoadModel(key=3, model=3, name="only", version="1", bundle="bundle")
LOADED = ModelLoaded(
    command=COMMAND, engine=0, device="cpu", slots=8, frontends=1, bundle_hash="", application="app.py"
)


@final
class Supervising:
    """The supervisor's end of the channel of a process."""

    def __init__(self) -> None:
        self._mine, self.end = channel_pair()
        self.own = os.eventfd(0, os.EFD_NONBLOCK)
        self._came: asyncio.Queue[Message] = asyncio.Queue()
        self.channel = Channel(self._mine, self._receive, lambda: None)

    def _receive(self, message: Message, descriptors: list[int]) -> None:
        self._came.put_nowait(message)
        for descriptor in descriptors:
            os.close(descriptor)

    async def answer(self) -> Message:
        while isinstance(message := await self._came.get(), messages.Heartbeat):
            pass
        return message

    def close(self, end: Any) -> None:
        asyncio.get_running_loop().remove_reader(self.own)
        end._channel.close()
        self.channel.close()
        os.close(self.own)


def run(scene: Callable[[Supervising], Awaitable[None]]) -> None:
    async def supervised() -> None:
        await asyncio.wait_for(scene(Supervising()), 10)

    asyncio.run(supervised())


class Front:
    """Takes the place of what a front-end serves with."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.attachments = self.models = self.http = self
        self.error: BaseException | None = None
        self.starting = self.refuses_some = False

    def hand_over(self, most: int) -> Iterator[int | None]:
        return (os.open(os.devnull, os.O_RDONLY) for _ in range(most))

    async def movable(self, since_ns: int) -> tuple[int, int]:
        return 3, 7

    def has_imported(self, command: LoadModel) -> bool:
        return False

    def attach(self, loaded: ModelLoaded, memory: int) -> None:
        if self.error is not None:
            raise self.error

    def watch(self, others: Sequence[socket.socket]) -> None:
        assert not others

    async def retire(self, key: int) -> None:
        raise KeyError(key)


def frontend(
    supervising: Supervising, monkeypatch: pytest.MonkeyPatch, pace: StartPace | None = None
) -> FrontendProcess:
    monkeypatch.setattr(frontend_process, "FrontEnd", Front)
    return FrontendProcess(SETTINGS, supervising.end, 0, supervising.own, [], [supervising.end], pace)


def test_an_engine_answers_when_its_memory_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: str) -> None:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(model_loader, "memory_use", fails)

    async def scene(supervising: Supervising) -> None:
        engine = EngineProcess(SETTINGS, supervising.end, 0, supervising.own, [])
        supervising.channel.send(messages.ReportUse(key=5))
        assert await supervising.answer() == messages.UseUnknown(key=5, error="the driver is gone")
        supervising.close(engine)

    run(scene)


def test_an_engine_answers_a_load_that_is_cancelled_by_its_application(monkeypatch: pytest.MonkeyPatch) -> None:
    def cancelled(*_: Any, **__: Any) -> None:
        raise asyncio.CancelledError("by the application")

    monkeypatch.setattr(model_loader, "make_runnable", cancelled)

    async def scene(supervising: Supervising) -> None:
        engine = EngineProcess(SETTINGS, supervising.end, 0, supervising.own, [])
        supervising.channel.send(COMMAND)
        answer = await supervising.answer()
        assert isinstance(answer, messages.CommandFailed)
        assert "CancelledError" in answer.error
        supervising.close(engine)

    run(scene)


def test_a_front_end_answers_when_a_table_cannot_be_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(supervising: Supervising) -> None:
        front = frontend(supervising, monkeypatch)
        supervising.channel.send(messages.RetireTable(key=5))
        assert await supervising.answer() == messages.TableRetired(key=5)
        supervising.close(front)

    run(scene)


def test_a_front_end_answers_requests_while_it_hands_over_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_process, "HAND_OVER_PAUSE_S", 60.0)

    async def scene(supervising: Supervising) -> None:
        front = frontend(supervising, monkeypatch)
        supervising.channel.send(messages.HandOver(count=20, target=1))
        supervising.channel.send(messages.RetireTable(key=5))
        answers = [await supervising.answer() for _ in range(frontend_process.HANDED_OVER + 1)]
        # The others come later.
        assert answers.count(messages.TableRetired(key=5)) == 1
        assert answers.count(messages.HandedOver(target=1)) == frontend_process.HANDED_OVER
        (task,) = front._tasks._tasks
        task.cancel()
        supervising.close(front)

    run(scene)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_front_end_that_refuses_what_others_answer_has_no_room(
    monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """It has little to do, and would be given more and more connections."""
    monkeypatch.setattr(frontend_process, "USE_S", 0.001)

    async def scene(supervising: Supervising) -> None:
        front = frontend(supervising, monkeypatch)
        front._front.models.refuses_some = refuses  # type: ignore[misc]
        task = asyncio.create_task(front._report_use())
        use = await supervising.answer()
        assert isinstance(use, messages.FrontendUse)
        assert (use.movable, use.room) == (3, 0 if refuses else 7)
        task.cancel()
        supervising.close(front)

    run(scene)


IMPORTS = messages.LoadProgress(key=3, activity="importing the application")


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), KeyError("it")])
def test_a_front_end_answers_whatever_an_application_raises(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(reference: str, pinned: str) -> None:
        raise error

    monkeypatch.setattr(frontend_process, "import_application", fails)

    async def scene(supervising: Supervising) -> None:
        front = frontend(supervising, monkeypatch)
        memory = os.memfd_create("table")
        supervising.channel.send(LOADED, (memory,))
        os.close(memory)
        supervising.channel.send(messages.RetireTable(key=5))
        # The supervisor knows what a front-end imports when it ends.
        assert await supervising.answer() == IMPORTS
        assert await supervising.answer() == messages.CommandDone(key=3)
        assert await supervising.answer() == messages.TableRetired(key=5)
        # It raises when it is attached too.
        fake: Any = front._front
        fake.error = error
        memory = os.memfd_create("table")
        supervising.channel.send(LOADED, (memory,))
        os.close(memory)
        assert await supervising.answer() == IMPORTS
        answer = await supervising.answer()
        assert isinstance(answer, messages.CommandFailed)
        assert answer.key == 3
        supervising.close(front)

    run(scene)


def test_a_front_end_that_starts_beside_others_pauses_before_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_process, "import_application", lambda reference, pinned: None)
    # Whenever it is read, it has used and waited for more of the core.
    used_ns = itertools.count(0, 2_000_000)
    slept_s: list[float] = []
    pace = StartPace(lambda: round(sum(slept_s) * 1e9), lambda: next(used_ns), lambda: next(used_ns))
    sleep = asyncio.sleep

    async def sleeps(seconds: float) -> None:
        slept_s.append(seconds)
        await sleep(0)

    async def scene(supervising: Supervising) -> None:
        front = frontend(supervising, monkeypatch, pace)
        monkeypatch.setattr(frontend_process.asyncio, "sleep", sleeps)
        for pauses in (1, 2, 2):
            memory = os.memfd_create("table")
            supervising.channel.send(LOADED, (memory,))
            os.close(memory)
            assert await supervising.answer() == IMPORTS
            assert await supervising.answer() == messages.CommandDone(key=3)
            assert slept_s == [pytest.approx(8 * 4e-3)] * pauses
            # It serves from the second one on.
            front._is_ready = pauses == 2
        monkeypatch.setattr(frontend_process.asyncio, "sleep", sleep)
        supervising.close(front)

    run(scene)


def test_a_change_is_answered_to_a_client_that_is_there_and_to_none_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(supervising: Supervising) -> None:
        front = frontend(supervising, monkeypatch)
        wrong: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        gone, there = (asyncio.create_task(front._change("only", False)) for _ in range(2))
        tokens: list[int] = []
        for _ in range(2):
            asked = await supervising.answer()
            assert isinstance(asked, messages.ChangeModel)
            tokens.append(asked.token)
        gone.cancel()
        await asyncio.sleep(0)
        supervising.channel.send(messages.CommandDone(key=tokens[0]))
        supervising.channel.send(messages.CommandFailed(key=tokens[1], error="it failed", status=500))
        with pytest.raises(ComputeFailed, match="it failed"):
            await there
        assert not wrong
        supervising.close(front)

    run(scene)
