"""The model repository between engines and front-ends that die at the worst moments."""

import asyncio
import errno
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import pytest

from penstock.core.errors import BundleError, EngineLost, InvalidInput, Overloaded, ServeError, UnknownRoute
from penstock.runtime.loading_steps import EXPORTING
from penstock.serve.messages import (
    ON_DEMAND,
    RESTARTING,
    WITHDRAWN,
    ChainLoaded,
    EngineUse,
    LoadModel,
    ModelLoaded,
    ModelState,
)
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.repository import model_restores
from penstock.serve.repository.bundle_preparation import NO_GRAPH, BundlePreparation
from penstock.serve.repository.fatal_loads import MAX_KILLS
from penstock.serve.repository.model_directory import LocalModels, ModelFolder
from penstock.serve.repository.model_repository import ModelRepository
from penstock.serve.repository.server_processes import TableMemory
from penstock.serve.settings import ModelSettings

# Growth of an engine's memory with each model.
MODEL_BYTES = 300


class Sides:
    """Engines and a front-end that remember what they were told; `fails` says what befalls the next orders.

    Tables are known by key, with the engine that has them; names by the keys of the tables that answer to them.
    """

    def __init__(self, *engines: int) -> None:
        self.engines = engines or (0,)
        self.fails: list[Exception | None] = []
        self.attach_fails: list[Exception | None] = []
        self.use_fails: list[Exception | None] = []
        self.while_loading: Callable[[LoadModel, int], None] = lambda command, engine: None
        self.while_attaching: Callable[[ModelLoaded], None] = lambda loaded: None
        self.tables: dict[int, int] = {}
        self.answering: dict[str, set[int]] = {}
        self.models: dict[int, int] = {}
        self.versions: dict[int, str] = {}
        self.states: dict[tuple[str, str], ModelState] = {}
        # Use of tables by key.
        self.used_ns: dict[int, int] = {}
        self.busy: set[int] = set()
        self.unloaded_before: list[int] = []

    async def load(self, command: LoadModel, engine: int) -> tuple[ModelLoaded, TableMemory]:
        await asyncio.sleep(0)
        self.while_loading(command, engine)
        if self.fails and (error := self.fails.pop(0)) is not None:
            raise error
        self.tables[command.key] = engine
        self.models[command.key], self.versions[command.key] = command.model, command.version
        loaded = ModelLoaded(
            command=replace(command, name=command.name or "only"),
            engine=engine,
            device="cpu",
            slots=8,
            frontends=1,
            bundle_hash="",
            application="",
            memory_bytes=MODEL_BYTES,
        )
        return loaded, command.key

    async def report_use(self, engine: int) -> EngineUse:
        await asyncio.sleep(0)
        if self.use_fails and (error := self.use_fails.pop(0)) is not None:
            raise error
        keys = tuple(key for key, there in self.tables.items() if there == engine)
        return EngineUse(
            key=0,
            tables=keys,
            used_ns=tuple(self.used_ns.get(key, 0) for key in keys),
            busy=tuple(key in self.busy for key in keys),
            used_bytes=100 + len(self.tables) * MODEL_BYTES,
            total_bytes=1000,
        )

    async def unload(self, key: int) -> None:
        self.tables.pop(key, None)

    async def attach(self, loaded: ModelLoaded, memory: TableMemory) -> None:
        command = loaded.command
        await asyncio.sleep(0)
        self.while_attaching(loaded)
        if command.key not in self.tables:
            raise EngineLost("it ended")
        if self.attach_fails and (error := self.attach_fails.pop(0)) is not None:
            raise error
        others = {
            key
            for key in self.answering.get(command.name, ())
            if self.models[key] == command.model or self.versions[key] != command.version
        }
        self.answering[command.name] = others | {command.key}

    async def load_chain(self, reference: str) -> ChainLoaded:
        return ChainLoaded(key=0, name="both", parts=("first", "second"))

    async def retire(self, key: int) -> None:
        left = {name: keys - {key} for name, keys in self.answering.items()}
        self.answering = {name: keys for name, keys in left.items() if keys}
        await asyncio.sleep(0)

    def publish_state(self, state: ModelState) -> None:
        if state.state == WITHDRAWN:
            del self.states[state.name, state.version]
        else:
            self.states[state.name, state.version] = state

    def state(self, name: str) -> tuple[str, str]:
        newest = max((version for other, version in self.states if other == name), key=int)
        return self.states[name, newest].state, self.states[name, newest].reason

    def die(self, engine: int, repository: ModelRepository) -> None:
        self.tables = {key: there for key, there in self.tables.items() if there != engine}
        repository.drop_engine(engine)

    def serving(self, name: str) -> set[int]:
        """The engines whose tables answer to a name."""
        return {self.tables[key] for key in self.answering.get(name, ()) if key in self.tables}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_restores, "MIN_RETRY_S", 0.01)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("first", "second"):
        (tmp_path / name / "1").mkdir(parents=True)
    return tmp_path


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 20))


def test_an_engine_that_dies_again_while_it_loads_loses_no_model(models: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        repository.drop_engine(0)
        assert sides.state("first") == ("LOADING", RESTARTING)
        sides.fails = [EngineLost("it died")]
        await repository.restore(0)
        assert repository.loaded == []
        repository.drop_engine(0)
        await repository.restore(0)
        assert {loaded.command.name for loaded, _ in repository.loaded} == {"first", "second"}
        assert sides.state("first") == sides.state("second") == ("READY", "")

    run(scene)


def test_what_was_served_is_tried_until_it_loads_again(models: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        repository.drop_engine(0)
        sides.fails = [
            ServeError("too slow just now"),
            ServeError("too slow just now"),
            ServeError("too slow just now"),
        ]
        await repository.restore(0)
        assert {loaded.command.name for loaded, _ in repository.loaded} == {"first", "second"}

    run(scene)


@pytest.mark.parametrize("engines", [(0,), (0, 1)])
def test_a_version_that_a_front_end_cannot_take_gives_the_name_back(models: Path, engines: tuple[int, ...]) -> None:
    async def scene() -> None:
        sides = Sides(*engines)
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        before, tables = dict(sides.answering), dict(sides.tables)
        # The last of its replicas.
        sides.attach_fails = [*[None] * (len(engines) - 1), ServeError("replaced while it was loaded")]
        with pytest.raises(InvalidInput, match="replaced while it was loaded"):
            await repository.load("first")
        assert (sides.answering, sides.tables) == (before, tables)
        assert sides.state("first") == ("READY", "")

    run(scene)


def test_a_name_of_any_length_is_refused_and_the_next_change_goes_on(models: Path) -> None:
    long = "n" * 300_000

    async def scene() -> None:
        sides = Sides()
        repository = ModelRepository(ModelSettings(directory=models), sides)
        registry = ModelRegistry(repository.change, loading=True)
        await repository.load_all()
        for unload in (False, True):
            with pytest.raises(UnknownRoute) as refusal:
                await repository.change(long, unload)
            with pytest.raises(UnknownRoute, match="A name of 300,000 characters came"):
                await registry.change(long, unload=unload)
        assert len(str(refusal.value)) < 1000
        await repository.change("first", True)
        await repository.change("first", False)
        assert sides.state("first") == ("READY", "")

    run(scene)


def test_a_trial_delays_no_other_load_and_its_failure_is_the_load_s(models: Path) -> None:
    tried: list[str] = []
    started: list[bool] = []

    async def scene() -> None:
        sides, slow = Sides(), asyncio.Event()

        async def trial(bundle: Path, before: object) -> None:
            tried.append(bundle.parent.name)
            if bundle.parent.name == "first" and started:
                await slow.wait()
                raise ServeError("it never ends")

        repository = ModelRepository(ModelSettings(directory=models), sides, preparation=BundlePreparation(trial))
        await repository.load_all()
        started.append(True)
        slow_load = asyncio.create_task(repository.load("first"))
        await asyncio.sleep(0)
        before = sides.answering["second"]
        await repository.load("second")
        assert sides.answering["second"] != before
        assert not slow_load.done()
        slow.set()
        with pytest.raises(InvalidInput, match="it never ends"):
            await slow_load
        # The version before is still served.
        assert (sides.state("first"), sides.serving("first")) == (("READY", ""), {0})

    run(scene)
    assert set(tried) == {"first", "second"}


@final
class Exporting:
    """Exports that end when they are let, with a reason for each; each bundle of a `needed` name is exported once."""

    def __init__(self, *needed: str) -> None:
        self.needed = set(needed)
        self.let = {name: asyncio.Event() for name in needed}
        self.reasons: dict[str, str] = {}
        self.begun: list[str] = []
        self.ended: set[Path] = set()
        self.reports: list[Callable[[str], None]] = []

    def repository(self, models: Path, sides: Sides, versions: tuple[str, ...] = ()) -> ModelRepository:
        settings = ModelSettings(directory=models, versions=versions)
        return ModelRepository(settings, sides, preparation=BundlePreparation(exports=self))

    async def is_needed(self, bundle: Path) -> bool:
        return bundle.parent.name in self.needed and bundle not in self.ended

    async def export(self, bundle: Path, app: str, report: Callable[[str], None]) -> str:
        name = bundle.parent.name
        self.begun.append(name)
        self.reports.append(report)
        report(EXPORTING)
        await self.let[name].wait()
        self.ended.add(bundle)
        return self.reasons.get(name, "")


async def begun(exports: Exporting, count: int = 1) -> None:
    while len(exports.begun) < count:
        await asyncio.sleep(0.001)


def test_an_export_delays_no_other_change_and_the_load_takes_its_turn_again(models: Path) -> None:
    async def scene() -> None:
        sides, exports = Sides(), Exporting()
        repository = exports.repository(models, sides)
        await repository.load_all()
        assert exports.begun == [], "the engine exports those of the start"
        reasons: list[str] = []
        sides.while_loading = lambda command, _: reasons.append(command.unexported)
        exports.needed, exports.let = {"first"}, {"first": asyncio.Event()}
        exports.reasons["first"] = "it slept"
        slow_load = asyncio.create_task(repository.load("first"))
        await begun(exports)
        # Others are loaded, this one is unloaded, and the engine is restarted, all meanwhile.
        await repository.load("second")
        await repository.unload("first")
        sides.die(0, repository)
        await repository.restore(0)
        assert sides.serving("second") == {0}
        assert not slow_load.done()
        exports.let["first"].set()
        await slow_load
        assert (sides.state("first"), sides.serving("first")) == (("READY", ""), {0})
        # An engine that serves exports nothing itself.
        assert reasons == [NO_GRAPH, NO_GRAPH, "it slept"]

    run(scene)


def test_a_model_that_is_removed_while_it_is_exported_has_no_state_left(models: Path) -> None:
    async def scene() -> None:
        sides, exports = Sides(), Exporting("third")
        repository = exports.repository(models, sides)
        await repository.load_all()
        (models / "third" / "1").mkdir(parents=True)
        load = asyncio.create_task(repository.load("third"))
        await begun(exports)
        assert sides.state("third") == ("LOADING", EXPORTING)
        (models / "third" / "1").rmdir()
        (models / "third").rmdir()
        exports.let["third"].set()
        with pytest.raises(UnknownRoute):
            await load
        assert {name for name, _ in sides.states} == {"first", "second"}

    run(scene)


def test_a_folder_that_cannot_be_read_any_more_is_a_sentence_and_leaves_no_model_loading(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_versions(self: LocalModels, name: str) -> list[ModelFolder]:
        raise OSError(errno.ESTALE, "Stale file handle", str(models / name))

    async def scene() -> None:
        sides, exports = Sides(), Exporting("third")
        repository = exports.repository(models, sides)
        await repository.load_all()
        (models / "third" / "1").mkdir(parents=True)
        load = asyncio.create_task(repository.load("third"))
        await begun(exports)
        monkeypatch.setattr(LocalModels, "find_versions", find_versions)
        exports.let["third"].set()
        sentence = f"Model 'third' cannot be loaded: {models}/third cannot be read (Stale file handle)."
        with pytest.raises(InvalidInput) as refusal:
            await load
        assert str(refusal.value) == sentence
        assert sides.state("third") == ("UNAVAILABLE", sentence)

    run(scene)


def test_of_versions_that_are_exported_none_is_loading_after_the_load_has_failed(models: Path) -> None:
    async def scene() -> None:
        sides, exports = Sides(), Exporting("third")
        repository = exports.repository(models, sides, versions=("third=all",))
        await repository.load_all()
        for version in ("1", "2"):
            (models / "third" / version).mkdir(parents=True)
        exports.let["third"].set()
        sides.fails = [ServeError("it is damaged")]
        with pytest.raises(InvalidInput, match="it is damaged"):
            await repository.load("third")
        assert exports.begun == ["third"] * 2
        assert {version: sides.states["third", version].state for version in ("1", "2")} == {
            "1": "UNAVAILABLE",
            "2": "UNAVAILABLE",
        }

    run(scene)


def test_two_loads_of_a_model_share_the_reason_why_it_was_not_exported(models: Path) -> None:
    async def scene() -> None:
        sides, exports = Sides(), Exporting()
        repository = exports.repository(models, sides)
        await repository.load_all()
        reasons: list[str] = []
        sides.while_loading = lambda command, _: reasons.append(command.unexported)
        exports.needed, exports.let = {"first"}, {"first": asyncio.Event()}
        exports.reasons["first"] = "it slept"
        loads = [asyncio.create_task(repository.load("first")) for _ in range(2)]
        await begun(exports, 2)
        exports.let["first"].set()
        await asyncio.gather(*loads)
        assert reasons == ["it slept"] * 2
        assert sides.state("first") == ("READY", "")

    run(scene)


def test_a_model_that_is_unloaded_while_it_is_exported_for_a_restarted_engine_stays_unloaded(models: Path) -> None:
    async def scene() -> None:
        sides, exports = Sides(), Exporting()
        repository = exports.repository(models, sides)
        await repository.load_all()
        exports.needed, exports.let = {"first"}, {"first": asyncio.Event()}
        sides.die(0, repository)
        restoring = asyncio.create_task(repository.restore(0))
        await begun(exports)
        await repository.unload("first")
        for report in exports.reports:
            report(EXPORTING)
        exports.let["first"].set()
        await restoring
        assert sides.state("first") == ("UNAVAILABLE", "unloaded")
        assert sides.serving("second") == {0}

    run(scene)


def test_a_restarted_engine_has_the_other_models_while_one_is_exported_again(models: Path) -> None:
    async def scene() -> None:
        sides, exports = Sides(), Exporting()
        repository = exports.repository(models, sides)
        await repository.load_all()
        exports.needed, exports.let = {"first"}, {"first": asyncio.Event()}
        sides.die(0, repository)
        restoring = asyncio.create_task(repository.restore(0))
        await begun(exports)
        while sides.state("second") != ("READY", ""):
            await asyncio.sleep(0.001)
        assert sides.state("first") == ("LOADING", f"{RESTARTING}: {EXPORTING}")
        # The lock is free.
        await repository.load("second")
        assert not restoring.done()
        exports.let["first"].set()
        await restoring
        assert sides.serving("first") == sides.serving("second") == {0}
        assert exports.begun == ["first"]

    run(scene)


def test_changes_while_the_engine_is_gone(models: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        repository.drop_engine(0)
        await repository.unload("first")
        assert sides.state("first") == ("UNAVAILABLE", "unloaded")
        assert "first" not in sides.answering
        with pytest.raises(UnknownRoute):
            await repository.unload("first")
        sides.fails = [EngineLost("it is being started again")]
        with pytest.raises(Overloaded):
            await repository.load("first")
        sides.engines = ()
        with pytest.raises(Overloaded):
            await repository.load("first")
        await repository.restore(0)
        assert [loaded.command.name for loaded, _ in repository.loaded] == ["second"]

    run(scene)


def test_every_engine_has_every_model_and_a_replacement(models: Path) -> None:
    async def scene() -> None:
        sides = Sides(0, 1, 2)
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        assert sides.serving("first") == sides.serving("second") == {0, 1, 2}
        before = sides.answering["first"]
        await repository.load("first")
        while len(sides.tables) > 6:
            await asyncio.sleep(0)
        assert sides.serving("first") == {0, 1, 2}
        assert before.isdisjoint(sides.answering["first"])
        await repository.unload("first")
        assert (sides.serving("first"), len(sides.tables)) == (set(), 3)

    run(scene)


def test_a_model_is_ready_as_long_as_one_engine_has_it(models: Path) -> None:
    async def scene() -> None:
        sides = Sides(0, 1)
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        kept = {key for key, engine in sides.tables.items() if engine == 0}
        sides.die(1, repository)
        assert sides.state("first") == ("READY", "")
        await repository.restore(1)
        assert sides.serving("first") == sides.serving("second") == {0, 1}
        assert kept <= sides.tables.keys()
        sides.die(0, repository)
        sides.die(1, repository)
        assert sides.state("first") == ("LOADING", RESTARTING)
        # Whoever comes back first is enough, whatever becomes of the other.
        await repository.restore(1)
        assert sides.state("first") == sides.state("second") == ("READY", "")
        await repository.restore(0)
        assert sides.serving("first") == {0, 1}

    run(scene)


def test_what_one_engine_cannot_load_none_serves(models: Path) -> None:
    async def scene() -> None:
        sides = Sides(0, 1)
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        before, tables = dict(sides.answering), dict(sides.tables)
        sides.fails = [None, ServeError("engine 1 on cuda:1: no memory")]
        with pytest.raises(InvalidInput, match="engine 1 on cuda:1: no memory"):
            await repository.load("first")
        assert (sides.answering, sides.tables) == (before, tables)
        # That an engine ended is less than what is wrong with the model.
        sides.fails = [EngineLost("it ended"), ServeError("no memory")]
        with pytest.raises(InvalidInput, match="no memory"):
            await repository.load("first")
        assert (sides.answering, sides.tables) == (before, tables)

    run(scene)


def test_an_engine_that_cannot_load_ends_the_start_while_another_still_exports(models: Path) -> None:
    async def scene() -> None:
        given_up: list[int] = []

        @final
        class Exporting(Sides):
            async def load(self, command: LoadModel, engine: int) -> tuple[ModelLoaded, TableMemory]:
                try:
                    await asyncio.sleep(0 if engine else 1000)
                except asyncio.CancelledError:
                    given_up.append(engine)
                    raise
                return await super().load(command, engine)

        sides = Exporting(0, 1, 2)
        sides.fails = [EngineLost("it ended"), ServeError("engine 2 on cuda:99: there is no such GPU")]
        repository = ModelRepository(ModelSettings(directory=models), sides)
        async with asyncio.timeout(5):
            with pytest.raises(ServeError, match="there is no such GPU"):
                await repository.load_all()
        assert given_up == [0]
        assert sides.tables == {}

    run(scene)


@pytest.mark.parametrize("moment", ["loading", "attaching"])
def test_an_engine_that_dies_while_a_model_comes_leaves_it_to_the_others(models: Path, moment: str) -> None:
    async def scene() -> None:
        sides = Sides(0, 1)
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        before = sides.answering["first"]
        deaths: list[int] = []

        def die(loaded: LoadModel | ModelLoaded, engine: int = 0) -> None:
            # When the other engine's is attached, the first one's was.
            if not deaths and (isinstance(loaded, LoadModel) or loaded.engine == 1):
                deaths.append(1 if moment == "loading" else 0)
                sides.die(deaths[0], repository)

        if moment == "loading":
            sides.fails = [None, EngineLost("it ended")]
            sides.while_loading = die
        else:
            sides.while_attaching = die
        await repository.load("first")
        assert before.isdisjoint(sides.answering["first"])
        assert sides.serving("first") == {1 - deaths[0]}
        assert set(sides.tables.values()) == {1 - deaths[0]}
        await repository.restore(deaths[0])
        assert sides.serving("first") == sides.serving("second") == {0, 1}
        assert len(sides.tables) == 4

    run(scene)


@pytest.mark.parametrize("moment", ["loading", "attaching"])
def test_engines_that_all_die_while_a_model_comes_leave_the_version_before(models: Path, moment: str) -> None:
    async def scene() -> None:
        sides = Sides(0, 1)
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        (models / "first" / "2").mkdir()

        def die(loaded: ModelLoaded) -> None:
            for engine in (0, 1):
                sides.die(engine, repository)

        if moment == "loading":
            sides.fails = [EngineLost("it ended"), EngineLost("it ended")]
        else:
            sides.while_attaching = die
        with pytest.raises(Overloaded):
            await repository.load("first")
        sides.while_attaching = lambda loaded: None
        for engine in (0, 1):
            await repository.restore(engine)
        assert sides.serving("first") == {0, 1}
        assert {loaded.command.version for loaded, _ in repository.loaded} == {"1"}

    run(scene)


def test_an_engine_that_comes_back_takes_nothing_before_all_its_models_are_loaded(models: Path) -> None:
    async def scene() -> None:
        sides = Sides(0, 1)
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        sides.die(1, repository)
        loaded: list[int] = []
        sides.while_attaching = lambda _: loaded.append(list(sides.tables.values()).count(1))
        await repository.restore(1)
        assert loaded == [2, 2]
        assert sides.serving("first") == sides.serving("second") == {0, 1}
        # What nobody else serves does not wait.
        sides.die(0, repository)
        sides.die(1, repository)
        loaded.clear()
        await repository.restore(1)
        assert loaded == [1, 2]

    run(scene)


@pytest.mark.parametrize("restarted", [True, False])
def test_an_engine_that_dies_between_loading_and_serving_serves_nothing(models: Path, restarted: bool) -> None:
    async def scene() -> None:
        sides = Sides(0, 1)
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        if restarted:
            sides.die(1, repository)
        deaths: list[asyncio.Task[None]] = []

        async def die() -> None:
            sides.die(1, repository)

        def die_soon(command: LoadModel, engine: int) -> None:
            if engine == 1 and command.name == "second" and not deaths:
                deaths.append(asyncio.create_task(die()))

        sides.while_loading = die_soon
        await (repository.restore(1) if restarted else repository.load("second"))
        await deaths[0]
        assert {loaded.engine for loaded, _ in repository.loaded} == {0}
        await repository.restore(1)
        assert sides.serving("first") == sides.serving("second") == {0, 1}

    run(scene)


def test_what_is_unloaded_or_replaced_while_an_engine_comes_back_is_let_go_there(models: Path) -> None:
    async def scene() -> None:
        sides = Sides(0, 1)
        (models / "third" / "1").mkdir(parents=True)
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        sides.die(1, repository)
        changes: list[asyncio.Task[None]] = []

        def change(command: LoadModel, engine: int) -> None:
            if command.name == "third" and not changes:
                changes.append(asyncio.create_task(repository.unload("first")))
                changes.append(asyncio.create_task(repository.load("second")))

        sides.while_loading = change
        await repository.restore(1)
        await asyncio.gather(*changes)
        while len(sides.tables) > 4:
            await asyncio.sleep(0)
        assert sides.serving("first") == set()
        assert sides.serving("second") == sides.serving("third") == {0, 1}

    run(scene)


def test_an_engine_that_comes_back_during_a_load_gets_that_model_too(models: Path) -> None:
    async def scene() -> None:
        sides = Sides(0, 1)
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        sides.die(1, repository)
        sides.engines = (0,)
        restored: list[asyncio.Task[None]] = []

        def come_back(command: LoadModel, engine: int) -> None:
            if not restored:
                sides.engines = (0, 1)
                restored.append(asyncio.create_task(repository.restore(1)))

        (models / "third" / "1").mkdir(parents=True)
        sides.while_loading = come_back
        await repository.load("third")
        await restored[0]
        assert sides.serving("first") == sides.serving("second") == sides.serving("third") == {0, 1}

    run(scene)


def test_models_of_a_lost_engine_can_be_replaced_while_it_is_gone(models: Path) -> None:
    async def scene() -> None:
        sides = Sides(0, 1)
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        sides.die(0, repository)
        sides.engines = (1,)
        before = sides.answering["first"]
        (models / "first" / "2").mkdir()
        await repository.load("first")
        assert sides.serving("first") == {1}
        sides.engines = (0, 1)
        await repository.restore(0)
        assert sides.serving("first") == {0, 1}
        assert before.isdisjoint(sides.tables)
        versions = {loaded.command.version for loaded, _ in repository.loaded if loaded.command.name == "first"}
        assert versions == {"2"}

    run(scene)


def test_a_chain_is_as_ready_as_its_parts(models: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        repository = ModelRepository(ModelSettings(directory=models, chains=("chain.py",)), sides)
        await repository.load_all()
        assert repository.chains == ["both"]
        assert sides.state("both") == ("READY", "")
        await repository.unload("second")
        assert sides.state("both") == ("UNAVAILABLE", "unloaded (part 'second')")
        await repository.load("second")
        assert sides.state("both") == ("READY", "")
        sides.die(0, repository)
        with pytest.raises(InvalidInput, match="'both' is a chain"):
            await repository.load("both")
        # `reject_unready` knows a restart by the beginning of the reason.
        assert sides.state("both") == ("LOADING", f"{RESTARTING} (part 'first')")
        await repository.restore(0)
        assert sides.state("both") == ("READY", "")

    run(scene)


def test_a_bundle_whose_application_has_another_name_leaves_no_state_behind(tmp_path: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        said: list[str] = []
        sides.while_loading = lambda command, engine: said.extend(name for name, _ in sides.states)
        repository = ModelRepository(ModelSettings(bundles=(tmp_path / "moved",)), sides)
        await repository.load_all()
        assert said == ["moved"]
        assert [state.name for state in repository.states] == ["only"]
        registry = ModelRegistry(repository.change, loading=False)
        registry.set_state(ModelState(name="moved", version="1", state="LOADING"))
        registry.set_state(ModelState(name="moved", version="1", state=WITHDRAWN))
        assert list(sides.states) == [("only", "1")]
        assert registry.index() == []

    run(scene)


def served(repository: ModelRepository) -> set[tuple[str, str]]:
    return {(loaded.command.name, loaded.command.version) for loaded, _ in repository.loaded}


def test_a_model_of_the_directory_that_cannot_be_loaded_leaves_the_others_served(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (models / "notes").mkdir()
    (models / "third" / "1").mkdir(parents=True)
    damaged = BundleError("its weights are damaged")

    async def tried(bundle: Path, before: object) -> None:
        if "third" in bundle.parts:
            raise InvalidInput("it does not import")

    async def scene() -> tuple[ModelRepository, Sides]:
        sides = Sides()
        sides.fails = [damaged]
        repository = ModelRepository(ModelSettings(directory=models), sides, preparation=BundlePreparation(tried))
        await repository.load_all()
        return repository, sides

    repository, sides = asyncio.run(scene())
    assert served(repository) == {("second", "1")}
    assert sides.state("first") == ("UNAVAILABLE", "its weights are damaged")
    assert sides.state("third") == ("UNAVAILABLE", "it does not import")
    assert "no numbered versions" in sides.state("notes")[1]
    for name in ("first", "third", "notes"):
        assert f"version 1 of model '{name}' is left out, and the others are served: " in caplog.text


def test_a_directory_in_which_nothing_can_be_loaded_ends_the_start(models: Path) -> None:
    sides = Sides()
    sides.fails = [BundleError("its weights are damaged"), BundleError("these too")]
    repository = ModelRepository(ModelSettings(directory=models), sides)
    with pytest.raises(BundleError, match="its weights are damaged"):
        asyncio.run(repository.load_all())


def test_the_newest_version_is_served_unless_others_are_chosen(models: Path) -> None:
    for version in ("2", "10"):
        (models / "first" / version).mkdir()

    async def scene(*versions: str) -> set[tuple[str, str]]:
        repository = ModelRepository(ModelSettings(directory=models, versions=versions), Sides())
        await repository.load_all()
        return served(repository)

    second = ("second", "1")
    assert asyncio.run(scene()) == {("first", "10"), second}
    assert asyncio.run(scene("all")) == {("first", "1"), ("first", "2"), ("first", "10"), second}
    assert asyncio.run(scene("first=2")) == {("first", "2"), second}
    assert asyncio.run(scene("all", "first=1,10")) == {("first", "1"), ("first", "10"), second}
    with pytest.raises(UnknownRoute, match=r"Of model 'first', version 3 is not there; there is 1, 2, 10."):
        asyncio.run(scene("first=3"))


def test_a_version_that_was_added_or_removed_is_followed_by_a_load(models: Path) -> None:
    async def scene() -> None:
        sides = Sides(0, 1)
        repository = ModelRepository(ModelSettings(directory=models, versions=("first=all",)), sides)
        await repository.load_all()
        (models / "first" / "2").mkdir()
        await repository.load("first")
        assert served(repository) == {("first", "1"), ("first", "2"), ("second", "1")}
        sides.die(0, repository)
        await repository.restore(0)
        assert sides.serving("first") == {0, 1}
        assert len(repository.loaded) == 6
        (models / "first" / "1").rmdir()
        await repository.load("first")
        assert served(repository) == {("first", "2"), ("second", "1")}
        assert {version for name, version in sides.states if name == "first"} == {"2"}
        await repository.unload("first")
        assert sides.state("first") == ("UNAVAILABLE", "unloaded")
        while len(sides.tables) > 2:
            await asyncio.sleep(0.001)
        assert len(sides.tables) == 2

    run(scene)


def test_a_new_version_that_cannot_be_loaded_leaves_the_others(models: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        repository = ModelRepository(ModelSettings(directory=models, versions=("all",)), sides)
        await repository.load_all()
        (models / "first" / "2").mkdir()
        # The bundles are empty folders, so that a version that is served is loaded again first.
        sides.fails = [None, ServeError("it is damaged")]
        with pytest.raises(InvalidInput, match="it is damaged"):
            await repository.load("first")
        assert served(repository) == {("first", "1"), ("second", "1")}

    run(scene)


def test_a_change_during_the_start_is_refused_with_what_is_loaded() -> None:
    async def change(name: str, unload: bool) -> None:
        raise AssertionError(name)

    registry = ModelRegistry(change, loading=True)
    registry.starting = True
    registry.set_state(ModelState(name="speech", version="1", state="LOADING", reason="reading the bundle"))
    with pytest.raises(Overloaded, match=r"The server is starting and loads speech \(reading the bundle\)\."):
        asyncio.run(registry.change("digits", unload=False))


def test_a_start_names_the_versions_of_a_model_that_has_several() -> None:
    async def change(name: str, unload: bool) -> None:
        raise AssertionError(name)

    registry = ModelRegistry(change, loading=True)
    registry.starting = True
    for name, version, state in (("speech", "1", "READY"), ("speech", "2", "LOADING"), ("digits", "7", "LOADING")):
        registry.set_state(ModelState(name=name, version=version, state=state, reason=""))
    with pytest.raises(Overloaded, match=r"is starting and loads speech version 2, digits\."):
        registry.reject_unready()


def on_demand(models: Path, sides: Sides, **limits: Any) -> ModelRepository:
    return ModelRepository(ModelSettings(directory=models, on_demand=True, **limits), sides)


async def settled(sides: Sides, name: str) -> tuple[str, str]:
    """State of a model that was requested, once nothing loads it."""
    while sides.state(name)[0] not in ("READY", "UNAVAILABLE"):
        await asyncio.sleep(0.001)
    return sides.state(name)


def test_a_request_loads_a_model_once(models: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        repository = on_demand(models, sides)
        await repository.load_all()
        assert repository.loaded == []
        assert sides.state("first") == sides.state("second") == ("UNAVAILABLE", ON_DEMAND)
        for name in ("first", "nobody", "first"):
            repository.demand(name)
        assert sides.state("first") == ("LOADING", "waiting for its turn")
        assert await settled(sides, "first") == ("READY", "")
        repository.demand("first")
        await asyncio.sleep(0.01)
        assert len(sides.tables) == 1

    run(scene)


def test_the_model_used_longest_ago_makes_room(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.serve.repository.on_demand.MIN_PAUSE_S", 60.0)

    async def scene() -> None:
        (models / "third" / "1").mkdir(parents=True)
        sides = Sides()
        repository = on_demand(models, sides, max_models=2)
        await repository.load_all()
        for name in ("first", "second"):
            await repository.load(name)
        key = {name: next(iter(keys)) for name, keys in sides.answering.items()}
        sides.used_ns = {key["first"]: time.monotonic_ns() + 1_000_000_000, key["second"]: time.monotonic_ns()}
        sides.busy = {key["first"], key["second"]}
        repository.demand("third")
        state, reason = await settled(sides, "third")
        assert state == "UNAVAILABLE"
        assert "2 models are loaded, as many as --max-models allows" in reason
        # It is not tried again at once.
        repository.demand("third")
        assert sides.state("third")[0] == "UNAVAILABLE"
        sides.busy = set()
        await repository.load("third")
        assert {name: sides.state(name)[0] for name in ("first", "second", "third")} == {
            "first": "READY",
            "second": "UNAVAILABLE",
            "third": "READY",
        }

    run(scene)


def test_memory_limits_what_is_loaded(models: Path) -> None:
    async def scene() -> None:
        (models / "third" / "1").mkdir(parents=True)
        sides = Sides()
        repository = on_demand(models, sides, memory_fraction=0.75)
        await repository.load_all()
        for name in ("first", "second"):
            await repository.load(name)
            sides.used_ns = {key: time.monotonic_ns() for key in sides.tables}
        assert len(sides.tables) == 2
        # Its files are empty: it takes more than they led to expect, and another one goes afterwards.
        await repository.load("third")
        assert sides.state("first") == ("UNAVAILABLE", ON_DEMAND)
        sides.used_ns = {key: time.monotonic_ns() for key in sides.tables}
        # Known by now: another one goes before.
        sides.while_loading = lambda command, engine: sides.unloaded_before.append(len(sides.tables))
        await repository.load("first")
        assert sides.unloaded_before == [1]
        small = on_demand(models, Sides(), memory_fraction=0.05)
        await small.load_all()
        with pytest.raises(ServeError, match="without any other model; raise the limit"):
            await small.load("first")

    run(scene)


@pytest.mark.parametrize("error", [RuntimeError("the driver"), ServeError("the driver")])
def test_a_use_that_cannot_be_measured_fails_that_load_alone(models: Path, error: Exception) -> None:
    async def scene() -> None:
        sides = Sides()
        repository = on_demand(models, sides, max_models=2)
        await repository.load_all()
        sides.use_fails = [error]
        repository.demand("first")
        state, reason = await settled(sides, "first")
        assert state == "UNAVAILABLE"
        assert "the driver" in reason
        repository.demand("second")
        assert await settled(sides, "second") == ("READY", "")

    run(scene)


def test_a_load_that_fails_in_no_expected_way_is_tried_again(models: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        repository = on_demand(models, sides)
        await repository.load_all()
        sides.fails = [KeyError("no such thing")]
        repository.demand("first")
        assert (await settled(sides, "first"))[0] == "UNAVAILABLE"
        assert sides.states["first", "1"].on_demand_ns is not None

    run(scene)


def test_a_model_that_fails_is_tried_again_after_growing_pauses(models: Path) -> None:
    async def scene() -> None:
        sides = Sides()
        published: list[ModelState] = []
        put = sides.publish_state
        sides.publish_state = lambda state: (published.append(state), put(state))[1]  # type: ignore[method-assign]
        repository = on_demand(models, sides)
        await repository.load_all()
        for pause_s in (1, 2, 4):
            sides.fails = [ServeError("it is damaged")]
            before_ns = time.monotonic_ns()
            with pytest.raises(InvalidInput, match="it is damaged"):
                await repository.load("first")
            state = sides.states["first", "1"]
            assert state.reason == f"{ON_DEMAND}; the last load failed: it is damaged"
            assert state.on_demand_ns is not None
            assert before_ns <= state.on_demand_ns - pause_s * 1_000_000_000 <= time.monotonic_ns()
        # No front-end ever sees a state that it would answer with 404.
        assert len(published) > 6
        assert [each for each in published if each.state != "LOADING" and each.on_demand_ns is None] == []
        # An engine that dies meanwhile is not the model's fault.
        sides.fails = [EngineLost("it died")]
        with pytest.raises(Overloaded):
            await repository.load("first")
        assert not sides.states["first", "1"].reason.startswith(RESTARTING)
        await repository.load("first")
        assert sides.state("first") == ("READY", "")

    run(scene)


@pytest.mark.parametrize("alone", [False, True])
def test_kills_leave_out_a_model_only_where_there_are_others(models: Path, alone: bool) -> None:
    async def scene() -> None:
        if alone:
            (models / "second" / "1").rmdir()
            (models / "second").rmdir()
        sides = Sides()
        repository = ModelRepository(ModelSettings(directory=models), sides)
        await repository.load_all()
        number = next(loaded.command.model for loaded, _ in repository.loaded if loaded.command.name == "first")
        sides.die(0, repository)
        for _ in range(MAX_KILLS):
            repository.left_out.note_end(number, "engine", "somebody killed it", killed=True, everywhere=False)
        await asyncio.sleep(0.01)
        await repository.restore(0)
        others = set[str]() if alone else {"second"}
        served = {loaded.command.name for loaded, _ in repository.loaded}
        assert served == others | ({"first"} if alone else set())
        assert sides.state("first") == (("READY", "") if alone else ("UNAVAILABLE", "left out: somebody killed it"))

    run(scene)
