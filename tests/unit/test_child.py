"""A process that the supervisor starts and watches: its limits, its messages, and the load of its models."""

import asyncio
import errno
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.serve.channel import channel_pair, packets_of
from penstock.serve.control import child as module
from penstock.serve.control.child import START_TIMEOUT_S, ChildProcess, is_hung
from penstock.serve.control.fork_server import ForkServer
from penstock.serve.control.supervisor import _Supervisor
from penstock.serve.messages import FrontendReady, Heartbeat, Message, ReleaseListener, TakeOverListener
from penstock.serve.repository.model_repository import ModelRepository
from penstock.serve.settings import ExecutionSettings, ModelSettings, Settings


def test_a_process_that_starts_is_judged_by_its_cpu_time() -> None:
    # It waited for a loaded machine.
    assert not is_hung(60.0, 1.0, serving=False, watchdog_s=3.0)
    assert is_hung(60.0, 1.0, serving=True, watchdog_s=3.0)
    assert is_hung(4.0, 3.5, serving=False, watchdog_s=3.0)
    # One that waits for ever uses no CPU time.
    assert is_hung(START_TIMEOUT_S + 1, 0.0, serving=False, watchdog_s=3.0)


def test_a_listener_is_handed_back_only_to_a_front_end_that_has_attached_every_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[str, Message]] = []
    monkeypatch.setattr(ChildProcess, "send", lambda child, message, _=(): sent.append((child.name, message)))

    async def scene() -> None:
        sockets = [socket.socket() for _ in range(2)]
        supervisor = _Supervisor(Settings(models=ModelSettings(bundles=(Path("bundle"),))), sockets)
        first, second = supervisor._frontends
        supervisor._started, first.serving, second.serving = True, False, True
        supervisor._arrange_takeovers()
        assert sent == [("front-end 1", TakeOverListener(index=0))]
        sent.clear()
        # Its event loop runs, and it still imports applications.
        supervisor._receive(first, Heartbeat(), [])
        assert sent == []
        supervisor._receive(first, FrontendReady(), [])
        assert sent == [("front-end 1", ReleaseListener(index=0))]
        for each in sockets:
            each.close()
        for wake in {descriptor for child in supervisor._engines for descriptor in child.descriptors}:
            os.close(wake)

    asyncio.run(asyncio.wait_for(scene(), 5))


def test_the_start_of_a_front_end_gives_way_to_others_that_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[object] = []

    def fork(_: ForkServer, target: str, argument: str, descriptors: Sequence[int]) -> None:
        starts.append(json.loads(argument))

    monkeypatch.setattr(ForkServer, "fork", fork)

    async def scene() -> None:
        sockets = [socket.socket() for _ in range(2)]
        supervisor = _Supervisor(Settings(models=ModelSettings(bundles=(Path("bundle"),))), sockets)
        first, second = supervisor._frontends
        for serving, stalled in ((False, False), (True, True), (True, False)):
            second.serving, second.stalled = serving, stalled
            assert first._forked(sockets[0]) is None
        settings = supervisor._settings.to_json()
        assert starts == [["front-end 0", 0, settings, gives_way] for gives_way in (False, False, True)]
        for each in sockets:
            each.close()
        for wake in {descriptor for child in supervisor._engines for descriptor in child.descriptors}:
            os.close(wake)

    asyncio.run(asyncio.wait_for(scene(), 5))


def test_another_front_end_accepts_the_connections_of_a_stalled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, Message]] = []
    monkeypatch.setattr(ChildProcess, "send", lambda child, message, _=(): sent.append((child.name, message)))

    def taken() -> list[tuple[str, Message]]:
        now = list(sent)
        sent.clear()
        return now

    async def scene() -> None:
        sockets = [socket.socket() for _ in range(3)]
        supervisor = _Supervisor(Settings(models=ModelSettings(bundles=(Path("bundle"),))), sockets)
        first, second, third = supervisor._frontends
        supervisor._started = first.serving = second.serving = third.serving = True
        first._set_stalled(True)
        assert taken() == [("front-end 1", TakeOverListener(index=0))]
        # The one that stands in stalls too: a third stands in for both.
        second._set_stalled(True)
        assert taken() == [
            ("front-end 1", ReleaseListener(index=0)),
            ("front-end 2", TakeOverListener(index=0)),
            ("front-end 2", TakeOverListener(index=1)),
        ]
        supervisor._receive(second, Heartbeat(), [])
        assert taken() == [("front-end 2", ReleaseListener(index=1))]
        third._set_stalled(True)
        second._set_stalled(True)
        sent.clear()
        # Nobody is left to stand in, until one goes on.
        supervisor._receive(first, Heartbeat(), [])
        assert ("front-end 0", TakeOverListener(index=1)) in sent
        assert ("front-end 0", TakeOverListener(index=2)) in sent
        for each in sockets:
            each.close()
        for wake in {descriptor for child in supervisor._engines for descriptor in child.descriptors}:
            os.close(wake)

    asyncio.run(asyncio.wait_for(scene(), 5))


def test_a_restarted_engine_loads_models_once_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[int] = []

    async def restore(repository: ModelRepository, engine: int) -> None:
        restored.append(engine)

    monkeypatch.setattr(ModelRepository, "restore", restore)
    monkeypatch.setattr(ChildProcess, "alive", True)

    async def scene() -> None:
        models, execution = ModelSettings(bundles=(Path("bundle"),)), ExecutionSettings(device="cpu,cpu")
        supervisor = _Supervisor(Settings(models=models, execution=execution), [])
        first, second = supervisor._engines
        first.starts = second.starts = 1
        # The first start waits for all engines.
        assert supervisor._commands.engines == (0, 1)
        for child in (first, second):
            supervisor._receive(child, Heartbeat(), [])
        second.starts, second.ready = 2, False
        assert supervisor._commands.engines == (0,)
        await asyncio.sleep(0)
        assert restored == []
        for _ in range(2):
            supervisor._receive(second, Heartbeat(), [])
            await asyncio.sleep(0)
        assert (restored, supervisor._commands.engines) == ([1], (0, 1))
        for wake in {descriptor for child in supervisor._engines for descriptor in child.descriptors}:
            os.close(wake)

    asyncio.run(asyncio.wait_for(scene(), 5))


def test_a_process_is_restarted_whatever_its_last_message_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    monkeypatch.setattr(ChildProcess, "_restart", lambda child: started.append(True))
    monkeypatch.setattr(ChildProcess, "_watch", lambda child, process: None)
    told: list[object] = []

    def fail(*given: object) -> None:
        raise AssertionError(given)

    async def scene() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context.get("exception")))
        settings = Settings(models=ModelSettings(bundles=(Path("bundle"),)))
        child = ChildProcess("engine", 0, settings, [], on_message=fail, on_exit=fail, on_restart=None)
        # Its process ends at once, with a message: the descriptors that it was started with are none.
        child.start()
        while not started:
            await asyncio.sleep(0.01)
        assert not child.alive

    asyncio.run(asyncio.wait_for(scene(), 30))
    assert any(isinstance(error, AssertionError) for error in told)


def test_a_heartbeat_that_is_read_after_the_end_does_not_count_for_the_next_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first heartbeat of the next engine has its models loaded: it must be known as the first."""
    monkeypatch.setattr(ChildProcess, "_restart", lambda child: None)
    monkeypatch.setattr(ChildProcess, "_watch", lambda child, process: None)
    seen: list[bool] = []
    received: list[Message] = []

    async def scene() -> None:
        settings = Settings(models=ModelSettings(bundles=(Path("bundle"),)))

        def receive(child: ChildProcess, message: Message, descriptors: list[int]) -> None:
            received.append(message)
            child.record_heartbeat()

        child = ChildProcess(
            "engine",
            0,
            settings,
            [],
            on_message=receive,
            on_exit=lambda child: seen.append(child.ready),
            on_restart=None,
        )
        ends: list[socket.socket] = []

        def kept_pair() -> tuple[socket.socket, socket.socket]:
            ours, theirs = channel_pair()
            ends.append(theirs.dup())
            return ours, theirs

        monkeypatch.setattr(module, "channel_pair", kept_pair)
        child.start()
        child.record_heartbeat()
        assert child._channel is not None
        # Its last heartbeat is read when it has ended.
        asyncio.get_running_loop().remove_reader(child._channel._end)
        ends[0].send(packets_of(Heartbeat())[0])
        await child.wait_exit()
        ends[0].close()
        assert not child.ready

    asyncio.run(asyncio.wait_for(scene(), 30))
    assert received == [Heartbeat()]
    assert seen == [False]


def test_a_process_whose_end_cannot_be_watched_is_not_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def no_descriptor(pid: int) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    async def scene() -> None:
        settings = Settings(models=ModelSettings(bundles=(Path("bundle"),)))
        child = ChildProcess(
            "engine", 0, settings, [], on_message=lambda *_: None, on_exit=lambda _: None, on_restart=None
        )
        monkeypatch.setattr(os, "pidfd_open", no_descriptor)
        with pytest.raises(OSError, match="Too many open files"):
            child.start()
        assert (child.alive, child.starts) == (False, 0)

    asyncio.run(asyncio.wait_for(scene(), 30))
    assert not Path(f"/proc/{started[0]}").exists()
