"""The model repository between an engine and front-ends that die at the worst moments."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, final

import pytest

from penstock.core.errors import EngineLost, InvalidInput, Overloaded, ServeError, UnknownRoute
from penstock.serve import repository as module
from penstock.serve.messages import Loaded, Order
from penstock.serve.models import RESTARTING, ModelState
from penstock.serve.repository import Memory, ModelRepository


@final
class Sides:
    """An engine and a front-end that remember what they were told; `fails` says what befalls the next orders."""

    def __init__(self) -> None:
        self.fails: list[Exception] = []
        self.attach_fails: list[Exception] = []
        self.before_answer: Callable[[], None] = lambda: None
        self.tables: list[int] = []
        self.answering: dict[str, int] = {}
        self.states: tuple[ModelState, ...] = ()

    async def load(self, order: Order) -> tuple[Loaded, Memory]:
        await asyncio.sleep(0)
        if self.fails:
            raise self.fails.pop(0)
        self.tables.append(order.key)
        named = Order(key=order.key, name=order.name or "only", version=order.version, bundle=order.bundle)
        return Loaded(order=named, slots=8, frontends=1, bundle_hash="", application=""), order.key

    async def unload(self, key: int) -> None:
        if key in self.tables:
            self.tables.remove(key)

    async def attach(self, loaded: Loaded, memory: Memory) -> None:
        self.answering[loaded.order.name] = loaded.order.key
        await asyncio.sleep(0)
        if self.attach_fails:
            raise self.attach_fails.pop(0)

    async def retire(self, key: int) -> None:
        self.answering = {name: taken for name, taken in self.answering.items() if taken != key}
        await asyncio.sleep(0)

    def tell(self, states: tuple[ModelState, ...]) -> None:
        self.states = states

    def state(self, name: str) -> tuple[str, str]:
        return next((state.state, state.reason) for state in self.states if state.name == name)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("first", "second"):
        (tmp_path / name / "1").mkdir(parents=True)
    return tmp_path


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 5))


def test_an_engine_that_dies_again_while_it_loads_loses_no_model(models: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        repository = ModelRepository((), models, sides, sides)
        await repository.load_all()
        repository.lose()
        assert sides.state("first") == ("LOADING", RESTARTING)
        sides.fails = [EngineLost("it died")]
        await repository.restore()
        assert repository.loaded == []
        repository.lose()
        await repository.restore()
        assert {loaded.order.name for loaded, _ in repository.loaded} == {"first", "second"}
        assert sides.state("first") == sides.state("second") == ("READY", "")

    run(scene)


def test_what_was_served_is_tried_until_it_loads_again(models: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        repository = ModelRepository((), models, sides, sides)
        await repository.load_all()
        repository.lose()
        sides.fails = [
            ServeError("too slow just now"),
            ServeError("too slow just now"),
            ServeError("too slow just now"),
        ]
        await repository.restore()
        assert {loaded.order.name for loaded, _ in repository.loaded} == {"first", "second"}

    run(scene)


def test_a_version_that_a_front_end_cannot_take_gives_the_name_back(models: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        repository = ModelRepository((), models, sides, sides)
        await repository.load_all()
        before, tables = dict(sides.answering), list(sides.tables)
        sides.attach_fails = [ServeError("replaced while it was loaded")]
        with pytest.raises(InvalidInput, match="replaced while it was loaded"):
            await repository.load("first")
        assert (sides.answering, sides.tables) == (before, tables)
        assert sides.state("first") == ("READY", "")

    run(scene)


def test_changes_while_the_engine_is_gone(models: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        repository = ModelRepository((), models, sides, sides)
        await repository.load_all()
        repository.lose()
        await repository.unload("first")
        assert sides.state("first") == ("UNAVAILABLE", "unloaded")
        assert "first" not in sides.answering
        with pytest.raises(UnknownRoute):
            await repository.unload("first")
        sides.fails = [EngineLost("it is being started again")]
        with pytest.raises(Overloaded):
            await repository.load("first")
        await repository.restore()
        assert [loaded.order.name for loaded, _ in repository.loaded] == ["second"]

    run(scene)
