"""When a process that died is started again, and who is waited for meanwhile."""

import asyncio
import os
from pathlib import Path

import pytest

from penstock.serve.child import QUICK_S, SLOWEST_S, Backoff, Child
from penstock.serve.messages import Alive
from penstock.serve.repository import ModelRepository
from penstock.serve.settings import Settings
from penstock.serve.supervisor import _Supervisor

LONG_S = 10 * QUICK_S


def test_one_that_dies_at_once_every_time_is_started_ever_more_slowly() -> None:
    backoff = Backoff()
    pauses_s = [backoff.after(1.0, ready=True) for _ in range(12)]
    assert pauses_s[0] == 0.0
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[-1] == SLOWEST_S
    # One that was there for long is no reason to wait.
    assert backoff.after(LONG_S, ready=True) == 0.0


def test_one_that_dies_late_in_its_start_is_started_ever_more_slowly_too() -> None:
    backoff = Backoff()
    assert [backoff.after(LONG_S, ready=False) for _ in range(12)][-1] == SLOWEST_S


def test_an_engine_that_is_started_again_is_given_models_once_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[int] = []

    async def restore(repository: ModelRepository, engine: int) -> None:
        restored.append(engine)

    monkeypatch.setattr(ModelRepository, "restore", restore)
    monkeypatch.setattr(Child, "alive", True)

    async def scene() -> None:
        supervisor = _Supervisor(Settings(bundles=(Path("bundle"),), device="cpu,cpu"), [])
        first, second = supervisor._engines
        first.starts = second.starts = 1
        # At the start of the server all are waited for.
        assert supervisor.engines == (0, 1)
        for child in (first, second):
            supervisor._heard(child, Alive(), [])
        second.starts, second.ready = 2, False
        assert supervisor.engines == (0,)
        await asyncio.sleep(0)
        assert restored == []
        for _ in range(2):
            supervisor._heard(second, Alive(), [])
            await asyncio.sleep(0)
        assert (restored, supervisor.engines) == ([1], (0, 1))
        for wake in {descriptor for child in supervisor._engines for descriptor in child._descriptors}:
            os.close(wake)

    asyncio.run(asyncio.wait_for(scene(), 5))
