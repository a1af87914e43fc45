"""Loads that fail with the system, or again while they are undone: nothing is left, and they can be tried again."""

import asyncio
import errno
import logging
from pathlib import Path

import pytest

from penstock.core.errors import InvalidInput, Overloaded, ServeError
from penstock.serve.messages import ON_DEMAND
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.repository.bundle_preparation import BundlePreparation, RememberedFailure
from penstock.serve.repository.model_repository import ModelRepository
from penstock.serve.settings import ModelSettings
from tests.unit.test_repository import Sides, models, run, short_pauses

__all__ = ["models", "short_pauses"]


async def no_process(bundle: Path, before: object) -> None:
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


def test_a_version_that_cannot_be_given_its_name_back_leaves_no_table_of_the_new_one(models: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        tables = dict(sides.tables)
        # A front-end was started meanwhile, and cannot attach any version.
        sides.attach_fails = [ServeError("replaced while it was loaded"), ServeError("holds another bundle now")]
        with pytest.raises(InvalidInput, match="replaced while it was loaded"):
            await repository.load("first")
        assert sides.tables == tables

    run(scene)


def test_a_remembered_failure_is_said_to_be_one_and_is_not_logged_as_new(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[ServeError] = []

    async def trial(bundle: Path, before: object) -> None:
        if failures:
            raise failures.pop(0)

    async def scene() -> None:
        sides = Sides()
        repository = ModelRepository(ModelSettings(directory=models), sides, preparation=BundlePreparation(trial))
        await repository.load_all()
        (models / "third" / "1").mkdir(parents=True)
        # Each load asks twice: in its preparation, and when it is its turn.
        failures.extend([ServeError("It is broken."), *(RememberedFailure("It is broken.", 3.2) for _ in range(3))])
        with pytest.raises(InvalidInput, match=r"It is broken\.$"):
            await repository.load("third")
        with pytest.raises(InvalidInput, match=r"It is broken \(remembered; it is tried again in 4 s\)\.$"):
            await repository.load("third")
        # That outlives the four seconds.
        assert sides.state("third") == ("UNAVAILABLE", "It is broken.")

    run(scene)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["third cannot be loaded: It is broken."]


def test_a_server_is_ready_after_a_load_that_was_refused_while_the_engine_was_gone(models: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        repository = ModelRepository(ModelSettings(directory=models), sides)
        registry = ModelRegistry(repository.change, loading=True)
        await repository.load_all()
        (models / "third" / "1").mkdir(parents=True)
        sides.die(0, repository)
        sides.engines = ()
        with pytest.raises(Overloaded, match="the engine is being started again"):
            await repository.load("third")
        sides.engines = (0,)
        for state in sides.states.values():
            registry.set_state(state)
        with pytest.raises(Overloaded, match="The engine of first, second is being started again"):
            registry.reject_unready()
        await repository.restore(0)
        for state in sides.states.values():
            registry.set_state(state)
        registry.reject_unready()

    run(scene)


def test_a_trial_that_cannot_be_started_fails_the_load_and_not_its_state(models: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        (models / "third" / "1").mkdir(parents=True)
        repository._preparation._trial = no_process
        with pytest.raises(InvalidInput, match=r"third/1 cannot be tried \(Resource temporarily unavailable\)"):
            await repository.load("third")
        assert sides.state("third")[0] == "UNAVAILABLE"
        repository._preparation._trial = None
        await repository.load("third")
        assert sides.state("third") == ("READY", "")

    run(scene)


def test_a_request_can_load_a_model_after_the_system_failed(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the state that says it is being loaded, no request would load it again."""

    async def scene() -> None:
        sides = Sides()
        repository = ModelRepository(ModelSettings(directory=models, on_demand=True, memory_fraction=0.9), sides)
        await repository.load_all()

        async def unreadable(name: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

        assert repository._on_demand is not None
        monkeypatch.setattr(repository._on_demand, "disk_bytes", unreadable)
        repository.demand("first")
        while sides.state("first")[0] == "LOADING":
            await asyncio.sleep(0.001)
        state, reason = sides.state("first")
        assert (state, "Input/output error" in reason) == ("UNAVAILABLE", True)
        assert reason.startswith(ON_DEMAND)

    run(scene)
