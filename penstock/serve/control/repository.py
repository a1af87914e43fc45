"""Models of a server: found in folders, loaded by the engines, attached by the front-ends, replaced and unloaded.

A model directory has a folder for each model, which is a bundle or holds numbered versions, each a bundle:

    models/digits/manifest.json ...        the model `digits`
    models/speech/3/manifest.json ...      the model `speech`; its highest version is served

Each engine has a replica of each model. A new version replaces the old one only when it is ready in all engines; the
old one is unloaded when the last of its requests has been answered.
"""

import asyncio
import itertools
import logging
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, final

from penstock.core.application import is_url_safe
from penstock.core.bundle import MANIFEST
from penstock.core.errors import EngineLost, InvalidInput, Overloaded, PenstockError, ServeError, UnknownRoute
from penstock.serve.background import BackgroundTasks
from penstock.serve.messages import RESTART_S, RESTARTING, ChainLoaded, LoadModel, ModelLoaded, ModelState
from penstock.serve.settings import ModelSettings
from penstock.serve.table.slots import SlotTable

log = logging.getLogger(__name__)

# A private table, or the descriptor of a shared one.
TableMemory = SlotTable | int
# Replicas of a model, by engine.
Replicas = dict[int, tuple[ModelLoaded, TableMemory]]

# Pauses between attempts to load a model into a restarted engine; they double from the first to the last.
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0

DIED_AFTER_LOAD = "the engine's process ended after it loaded the model; its log says why."


class ServerProcesses(Protocol):
    """The engines, and all front-ends together, as the repository uses them."""

    @property
    def engines(self) -> tuple[int, ...]:
        """Indices of the engines that run, or start for the first time."""
        ...

    async def load(self, command: LoadModel, engine: int) -> tuple[ModelLoaded, TableMemory]:
        """Load a model into one engine.

        Raises:
            EngineLost: The engine's process ended meanwhile.
            PenstockError: The model cannot be loaded.
        """
        ...

    async def unload(self, key: int) -> None:
        """Unload a table from its engine."""

    async def attach(self, loaded: ModelLoaded, memory: TableMemory) -> None:
        """Serve a table under its model's name; returns when all front-ends do.

        Raises:
            PenstockError: One front-end cannot serve it.
        """

    async def load_chain(self, reference: str) -> ChainLoaded:
        """Serve a chain of the models; returns when all front-ends do.

        Raises:
            PenstockError: One front-end cannot serve it.
        """
        ...

    async def retire(self, key: int) -> None:
        """Submit nothing more to a table; returns when no request waits for it any more."""

    def publish_state(self, state: ModelState) -> None:
        """Publish the state of a model."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on disk.

    Args:
        name: The name that requests use; empty takes the application's own.
        version: `"1"` where versions are not numbered.
        bundle: Its bundle folder.
    """

    name: str
    version: str
    bundle: Path


def find_model(directory: Path, name: str) -> ModelFolder:
    """Find the newest version of a model in a model directory.

    Raises:
        UnknownRoute: There is no such model.
    """
    folder = directory / name
    if not is_url_safe(name) or not folder.is_dir():
        raise UnknownRoute(f"There is no folder {name!r} in the model directory.")
    if (folder / MANIFEST).is_file():
        return ModelFolder(name, "1", folder)
    numbers = [each for each in folder.iterdir() if each.name.isascii() and each.name.isdecimal() and each.is_dir()]
    if not numbers:
        raise UnknownRoute(f"The folder {name!r} of the model directory is no bundle and has no numbered versions.")
    newest = max(numbers, key=lambda each: int(each.name))
    return ModelFolder(name, str(int(newest.name)), newest)


def model_names(directory: Path) -> list[str]:
    """List the models of a model directory.

    Raises:
        ServeError: It is no directory.
    """
    if not directory.is_dir():
        raise ServeError(f"{directory} is not a directory; name the folder that holds the models' folders.")
    return sorted(each.name for each in directory.iterdir() if each.is_dir() and is_url_safe(each.name))


@dataclass(slots=True)
class _LoadedModel:
    """A model that is served, or was until its last engine died.

    Args:
        folder: Its folder, with the name that requests use.
        number: Identifies this version, see `LoadModel.model`.
        replicas: By engine.
        keys: Keys of its tables; of the last ones where no engine is left.
    """

    folder: ModelFolder
    number: int
    replicas: Replicas
    keys: list[int]


@final
class ModelRepository:
    """Loads, replaces and unloads models, one change at a time.

    Args:
        models: Bundles and model directory.
        processes: They load models and serve them.
    """

    def __init__(self, models: ModelSettings, processes: ServerProcesses) -> None:
        self._bundles = models.bundles
        self._chain_references = models.chains
        self._directory = models.directory
        self._processes = processes
        self._keys, self._numbers = itertools.count(), itertools.count()
        self._change_lock = asyncio.Lock()
        self._models: dict[str, _LoadedModel] = {}
        # Replicas that the front-ends attach at this moment.
        self._attaching: Replicas = {}
        self._states: dict[str, ModelState] = {}
        self._retiring = BackgroundTasks()
        # By name: the parts of each chain.
        self._chains: dict[str, tuple[str, ...]] = {}

    @property
    def loaded(self) -> list[tuple[ModelLoaded, TableMemory]]:
        """Every replica of a served model, with its table."""
        return [replica for model in self._models.values() for replica in model.replicas.values()]

    @property
    def chains(self) -> list[str]:
        """Names of the chains."""
        return list(self._chains)

    @property
    def states(self) -> tuple[ModelState, ...]:
        """State of every model that was requested or lies in the model directory."""
        return tuple(self._states.values())

    async def load_all(self) -> None:
        """Load the models that the server was started with.

        Raises:
            PenstockError: One of them cannot be loaded.
        """
        folders = [ModelFolder("", "1", bundle) for bundle in self._bundles]
        if self._directory is not None:
            folders += [find_model(self._directory, name) for name in model_names(self._directory)]
        async with self._change_lock:
            for folder in folders:
                await self._load_version(folder)
            for reference in self._chain_references:
                loaded = await self._processes.load_chain(reference)
                self._chains[loaded.name] = loaded.parts
                self._set_chain_state(loaded.name)

    def drop_engine(self, engine: int) -> None:
        """Forget the replicas of an engine that died, until `restore`."""
        self._attaching.pop(engine, None)
        for model in self._models.values():
            model.replicas.pop(engine, None)
            if model.replicas:
                model.keys = _keys_of(model.replicas)
            else:
                self._set_state(model.folder, "LOADING", RESTARTING)

    async def restore(self, engine: int) -> None:
        """Load the served models into an engine that was restarted; retry those that fail.

        Models that other engines serve too are attached last, when all are loaded: new streams go to the new engine at
        once, and loading would slow them down.
        """
        pause_s = MIN_RETRY_S
        while missing := await self._missing(engine):
            try:
                reloaded = [await self._reload(name, engine) for name in missing]
                for each in reloaded:
                    if each is not None:
                        await self._rejoin(*each, engine)
            except EngineLost:
                return  # the engine's next start calls this again
            if await self._missing(engine):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _missing(self, engine: int) -> list[str]:
        # A change that is under way may have begun when that engine was not there.
        async with self._change_lock:
            missing = [name for name, model in self._models.items() if engine not in model.replicas]
            return sorted(missing, key=lambda name: bool(self._models[name].replicas))

    async def _reload(self, name: str, engine: int) -> tuple[_LoadedModel, Replicas] | None:
        """Load a model again; returns its replica if it is still to be attached."""
        async with self._change_lock:
            model = self._models.get(name)
            if model is None or engine in model.replicas:
                return None
            with self._reporting(model, engine):
                replicas = await self._load_replicas(model.folder, model.number, (engine,))
                if model.replicas:
                    return model, replicas
                await self._join(model, replicas)
        return None

    async def _rejoin(self, model: _LoadedModel, replicas: Replicas, engine: int) -> None:
        async with self._change_lock:
            # The model may have been replaced or unloaded meanwhile.
            if self._models.get(model.folder.name) is not model or engine in model.replicas:
                await self._unload_tables(_keys_of(replicas))
                return
            with self._reporting(model, engine):
                await self._join(model, replicas)

    async def _join(self, model: _LoadedModel, replicas: Replicas) -> None:
        model.replicas |= await self._attach(replicas, None)
        model.keys = _keys_of(model.replicas)
        self._set_state(model.folder, "READY")

    @contextmanager
    def _reporting(self, model: _LoadedModel, engine: int) -> Generator[None]:
        try:
            yield
        except PenstockError as error:
            if not model.replicas:
                self._set_state(model.folder, "LOADING", f"{RESTARTING}: {error}")
            if isinstance(error, EngineLost):
                raise
            log.error("engine %d cannot serve %s, and tries again: %s", engine, model.folder.name, error)

    async def change(self, name: str, unload: bool) -> None:
        """Load or unload a model, see `load` and `unload`."""
        await (self.unload(name) if unload else self.load(name))

    async def load(self, name: str) -> None:
        """Serve the newest version of a model; the version before it is served until then.

        Raises:
            UnknownRoute: There is no such model.
            InvalidInput: The model cannot be loaded.
            Overloaded: No engine runs, or one died meanwhile.
        """
        assert self._directory is not None, "front-ends refuse this without a model directory"
        if name in self._chains:
            raise InvalidInput(f"{name!r} is a chain, whose parts are loaded one by one; rename the folder of a model.")
        async with self._change_lock:
            folder = find_model(self._directory, name)
            served = name in self._models
            if not served:
                self._set_state(folder, "LOADING")
            try:
                await self._load_version(folder)
            except PenstockError as error:
                if not served:
                    self._set_state(folder, "UNAVAILABLE", str(error))
                if isinstance(error, EngineLost):
                    raise Overloaded(f"Model {name!r} is not loaded: {error}", RESTART_S) from None
                log.warning("%s cannot be loaded: %s", name, error)
                raise InvalidInput(f"Model {name!r} cannot be loaded: {error}") from None

    async def unload(self, name: str) -> None:
        """Stop serving a model; accepted requests are still answered.

        Raises:
            UnknownRoute: It is not loaded.
        """
        async with self._change_lock:
            model = self._models.pop(name, None)
            if model is None:
                raise UnknownRoute(f"There is no model {name!r} to unload.")
            self._set_state(model.folder, "UNLOADING")
            await self._retire(model.keys)
            self._set_state(model.folder, "UNAVAILABLE", "unloaded")

    async def _load_version(self, folder: ModelFolder) -> None:
        engines = self._processes.engines
        if not engines:
            raise EngineLost(f"{RESTARTING}.")
        number = next(self._numbers)
        replicas = await self._load_replicas(folder, number, engines)
        name = next(loaded.command.name for loaded, _ in replicas.values())
        if not folder.name and name in self._models:
            await self._unload_tables(_keys_of(replicas))
            raise ServeError(
                f"two bundles are of application {name!r}; put them into a model directory, where folders name them."
            )
        before = self._models.get(name)
        replicas = await self._attach(replicas, before)
        folder = replace(folder, name=name)
        self._models[name] = _LoadedModel(folder, number, replicas, _keys_of(replicas))
        self._set_state(folder, "READY")
        if before is not None and before.replicas:
            self._retiring.start(self._retire(_keys_of(before.replicas)))

    async def _load_replicas(self, folder: ModelFolder, number: int, engines: tuple[int, ...]) -> Replicas:
        """Load a model into engines; engines that die meanwhile get it when they are restarted."""
        bundle = str(folder.bundle)
        commands = [
            LoadModel(key=key, model=number, name=folder.name, version=folder.version, bundle=bundle)
            for key in itertools.islice(self._keys, len(engines))
        ]
        loads = (self._processes.load(command, engine) for command, engine in zip(commands, engines, strict=True))
        results = await asyncio.gather(*loads, return_exceptions=True)
        failures = [each for each in results if isinstance(each, BaseException)]
        # An error of the model is more informative than the death of an engine.
        worst = min(failures, key=lambda error: isinstance(error, EngineLost), default=None)
        if worst is not None and (len(failures) == len(results) or not isinstance(worst, EngineLost)):
            await self._unload_tables([command.key for command in commands])
            raise worst
        loaded = zip(engines, results, strict=True)
        return {engine: each for engine, each in loaded if not isinstance(each, BaseException)}

    async def _attach(self, replicas: Replicas, before: _LoadedModel | None) -> Replicas:
        """Have all front-ends attach all replicas, or none; returns those whose engines still run."""
        self._attaching = dict(replicas)
        try:
            for engine, replica in replicas.items():
                try:
                    await self._processes.attach(*replica)
                except EngineLost:
                    self._attaching.pop(engine, None)
            if not self._attaching:
                raise EngineLost(DIED_AFTER_LOAD)
        except PenstockError:
            # Some front-ends may have attached it already: give the name back to the version before.
            for replica in [] if before is None else list(before.replicas.values()):
                with suppress(EngineLost):
                    await self._processes.attach(*replica)
            await self._retire(_keys_of(replicas))
            raise
        return dict(self._attaching)

    async def _retire(self, keys: list[int]) -> None:
        await asyncio.gather(*(self._processes.retire(key) for key in keys))
        await self._unload_tables(keys)

    async def _unload_tables(self, keys: list[int]) -> None:
        for key in keys:
            await self._processes.unload(key)

    def _set_state(self, folder: ModelFolder, state: str, reason: str = "") -> None:
        now = ModelState(name=folder.name, version=folder.version, state=state, reason=reason)
        self._states[folder.name] = now
        self._processes.publish_state(now)
        for chain, parts in self._chains.items():
            if folder.name in parts:
                self._set_chain_state(chain)

    def _set_chain_state(self, name: str) -> None:
        """Publish the state of a chain: that of the first part which is not ready."""
        states = [self._states[part] for part in self._chains[name] if part in self._states]
        worst = next((state for state in states if state.state != "READY"), None)
        now = ModelState(name=name, version="1", state="READY")
        if worst is not None:
            # An unloaded part may come back.
            state = "UNAVAILABLE" if worst.state == "UNLOADING" else worst.state
            now = ModelState(
                name=name, version="1", state=state, reason=f"{worst.reason} (part {worst.name!r})".strip()
            )
        self._states[name] = now
        self._processes.publish_state(now)


def _keys_of(replicas: Replicas) -> list[int]:
    return [loaded.command.key for loaded, _ in replicas.values()]
