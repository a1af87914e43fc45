"""Restarts of a process that died: the backoff, and the load of its models."""

import asyncio
import os
from pathlib import Path

import pytest

from penstock.serve.control.child import EARLY_DEATH_S, MAX_BACKOFF_S, Backoff, ChildProcess
from penstock.serve.control.repository import ModelRepository
from penstock.serve.control.supervisor import _Supervisor
from penstock.serve.messages import Heartbeat
from penstock.serve.settings import ExecutionSettings, ModelSettings, Settings

LONG_LIFE_S = 10 * EARLY_DEATH_S


def test_a_process_that_dies_early_each_time_is_restarted_with_growing_pauses() -> None:
    backoff = Backoff()
    pauses_s = [backoff.pause_s(1.0, ready=True) for _ in range(12)]
    assert pauses_s[0] == 0.0
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[-1] == MAX_BACKOFF_S
    # A process that lived for long is restarted at once.
    assert backoff.pause_s(LONG_LIFE_S, ready=True) == 0.0


def test_a_process_that_dies_before_it_is_ready_is_restarted_with_growing_pauses() -> None:
    backoff = Backoff()
    assert [backoff.pause_s(LONG_LIFE_S, ready=False) for _ in range(12)][-1] == MAX_BACKOFF_S


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
        assert supervisor.engines == (0, 1)
        for child in (first, second):
            supervisor._receive(child, Heartbeat(), [])
        second.starts, second.ready = 2, False
        assert supervisor.engines == (0,)
        await asyncio.sleep(0)
        assert restored == []
        for _ in range(2):
            supervisor._receive(second, Heartbeat(), [])
            await asyncio.sleep(0)
        assert (restored, supervisor.engines) == ([1], (0, 1))
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
