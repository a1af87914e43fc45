"""Models of a server: found in folders, loaded by the engines, attached by the front-ends, replaced and unloaded.

Each engine has a replica of each version that is served. A new version replaces an old one only when it is ready in all
engines; the old one is unloaded when the last of its requests has been answered.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from penstock.core.application import MAX_NAME
from penstock.core.bundle import read_manifest
from penstock.core.errors import (
    BundleError,
    EngineLost,
    InvalidInput,
    Overloaded,
    PenstockError,
    ServeError,
    StorageError,
    UnknownRoute,
)
from penstock.serve.background import BackgroundTasks
from penstock.serve.control.bundle_preparation import BundlePreparation
from penstock.serve.control.fatal_loads import FatalLoads
from penstock.serve.control.model_directory import ModelFolder, model_directory
from penstock.serve.control.model_states import ModelStates
from penstock.serve.control.on_demand import Loaded, OnDemand
from penstock.serve.control.replica_loads import ReplicaLoads, Replicas, keys_of
from penstock.serve.control.server_processes import ServerProcesses, TableMemory
from penstock.serve.messages import (
    MAX_TEXT,
    ON_DEMAND,
    RESTART_S,
    RESTARTING,
    EngineUse,
    ModelLoaded,
    ModelState,
)
from penstock.serve.pinned_content import PinnedModels, pinned_bundle
from penstock.serve.settings import ModelSettings

log = logging.getLogger(__name__)

# Name and version of a model.
Key = tuple[str, str]

# Pauses between attempts to load a model into a restarted engine; they double from the first to the last.
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


@dataclass(slots=True)
class _LoadedModel:
    """A version of a model that is served, or was until its last engine died.

    Args:
        folder: Its folder, with the name that requests use.
        number: Identifies this version, see `LoadModel.model`.
        replicas: By engine.
        keys: Keys of its tables; of the last ones where no engine is left.
        loaded_ns: Monotonic time at which it was loaded.
        pinned: Folder of its copies, see `LoadModel.pinned`.
    """

    folder: ModelFolder
    number: int
    replicas: Replicas
    keys: list[int]
    loaded_ns: int
    pinned: str


@final
class ModelRepository:
    """Loads, replaces and unloads models, one change at a time.

    Args:
        models: Bundles and model directory.
        processes: They load models and serve them.
        pins: Copies of what is loaded, for processes that are restarted; None where none is.
        preparation: Tries bundles, and exports their networks, before engines load them.
    """

    def __init__(
        self,
        models: ModelSettings,
        processes: ServerProcesses,
        *,
        pins: PinnedModels | None = None,
        preparation: BundlePreparation | None = None,
    ) -> None:
        self._pins = pins
        self._bundles = models.bundles
        self._chain_references = models.chains
        self._directory = model_directory(models)
        self._processes = processes
        self._preparation = preparation or BundlePreparation()
        self._numbers = itertools.count()
        self._change_lock = asyncio.Lock()
        # By name and version.
        self._models: dict[Key, _LoadedModel] = {}
        self._replicas = ReplicaLoads(processes, pins)
        self._states = ModelStates(processes.publish_state)
        self._retiring = BackgroundTasks()
        self._fatal = FatalLoads()
        self._on_demand: OnDemand | None = None
        if models.on_demand:
            self._on_demand = OnDemand(
                models=models,
                states=self._states,
                change_lock=self._change_lock,
                load_found=self._load_found,
                trial=self._prepare_found,
                unload=partial(self._unload, reason=ON_DEMAND, on_demand_ns=0),
                loaded=self._replaceable,
                disk_bytes=self._disk_bytes,
                use=self._use,
            )

    @property
    def loaded(self) -> list[tuple[ModelLoaded, TableMemory]]:
        """Every replica of a served model, with its table."""
        return [replica for model in self._models.values() for replica in model.replicas.values()]

    @property
    def fallbacks(self) -> list[str]:
        """Reasons why networks run in a slower way than there is, one for each replica."""
        return [loaded.fallback for loaded, _ in self.loaded if loaded.fallback]

    @property
    def chains(self) -> list[str]:
        """Names of the chains."""
        return self._states.chains

    @property
    def announced(self) -> list[str]:
        """Names of the loaded models and chains, and the count of those loaded on first use, for the announcement."""
        names = [*(loaded.command.name for loaded, _ in self.loaded), *self.chains]
        later = len({state.name for state in self.states if state.on_demand_ns is not None})
        return [*names, *([f"{later} model{'s' if later > 1 else ''} on first use"] if later else [])]

    @property
    def states(self) -> tuple[ModelState, ...]:
        """State of every model that was requested or lies in the model directory."""
        return self._states.all

    async def load_all(self) -> None:
        """Load the models that the server was started with, but for those that are loaded on first use.

        Raises:
            PenstockError: One of them cannot be loaded.
        """
        folders = [ModelFolder("", "1", bundle) for bundle in self._bundles]
        if self._directory is not None:
            for name in await asyncio.to_thread(self._directory.names):
                if self._on_demand is None:
                    folders += await self._found(name)
                    continue
                try:
                    versions = await asyncio.to_thread(self._directory.list_versions, name)
                except (PenstockError, OSError) as error:
                    # The others are served. A request for it looks again.
                    self._on_demand.refuse(name, error)
                    continue
                for version in versions:
                    self._on_demand.offer((name, version))
        async with self._change_lock:
            for folder in folders:
                self._states.set(folder.named().key, "LOADING", "waiting for its turn")
            # Those of the command line were chosen by the operator, and nothing is served yet that they could hold up.
            await asyncio.gather(*(self._preparation.check(folder.bundle) for folder in folders if folder.name))
            for folder in folders:
                await self._load_tried(folder)
                self._withdraw(folder.named().key)
            for reference in self._chain_references:
                loaded = await self._processes.load_chain(reference)
                self._states.add_chain(loaded.name, loaded.parts)

    def note_progress(self, key: int, activity: str) -> None:
        """Publish what an engine does to load a model that nothing serves yet.

        Args:
            key: Key of the table.
            activity: The present step.
        """
        folder = self._replicas.folder_of(key)
        if folder is not None:
            self._note_step(folder, activity)

    def _note_step(self, folder: ModelFolder, activity: str) -> None:
        model = self._models.get(folder.key)
        if not self._versions_of(folder.name) or (
            model is not None and not model.replicas and self._fatal.was_left_out(model.number)
        ):
            self._states.set(folder.key, "LOADING", activity, since_ns=time.monotonic_ns())
        elif model is not None and not model.replicas:
            self._states.set(folder.key, "LOADING", f"{RESTARTING}: {activity}", since_ns=time.monotonic_ns())

    def _note_restored(self, model: _LoadedModel, activity: str) -> None:
        # It may have been replaced or unloaded while its network is exported.
        if self._models.get(model.folder.key) is model:
            self._note_step(model.folder, activity)

    def drop_engine(self, engine: int) -> None:
        """Forget the replicas of an engine that died, until `restore`."""
        self._replicas.drop_engine(engine)
        for model in self._models.values():
            model.replicas.pop(engine, None)
            if model.replicas:
                model.keys = keys_of(model.replicas)
            elif not self._fatal.left_s(model.number):
                self._states.set(model.folder.key, "LOADING", RESTARTING)

    def note_end(self, model: int, process: str, reason: str, *, killed: bool, everywhere: bool) -> None:
        """Note that an engine or front-end ended while it loaded a model, which is left out if that repeats itself.

        Args:
            model: Number of the model, see `LoadModel.model`.
            process: Name of the process.
            reason: What happened, as a sentence.
            killed: Whether SIGKILL ended it.
            everywhere: Whether it is left out of the engines that serve it, too.
        """
        # A first load is answered with the reason, and not repeated.
        pause_s = self._fatal.record_end(model, process, killed=killed) if self._number_is_served(model) else 0.0
        if pause_s:
            self._retiring.start(self._leave_out(model, reason, pause_s, everywhere=everywhere))

    def note_loaded(self, model: int, process: str) -> None:
        """Note that an engine or front-end loaded a model and lives."""
        self._fatal.record_loaded(model, process)

    def leave_out(self, model: int, reason: str) -> None:
        """Load a model into no engine until after a pause; nothing if it is not served yet.

        Args:
            model: Its number, see `LoadModel.model`.
            reason: What happened, as a sentence.
        """
        if self._number_is_served(model):
            self._retiring.start(self._leave_out(model, reason, self._fatal.leave_out(model), everywhere=False))

    def _number_is_served(self, number: int) -> bool:
        return any(model.number == number for model in self._models.values())

    async def _leave_out(self, number: int, reason: str, pause_s: float, *, everywhere: bool) -> None:
        async with self._change_lock:
            model = next((each for each in self._models.values() if each.number == number), None)
            if model is None:
                return
            log.error("%s is left out for %g s: %s", model.folder.name, pause_s, reason)
            if everywhere or not model.replicas:
                keys, model.replicas, model.keys = model.keys, {}, []
                from_ns = time.monotonic_ns() + int(pause_s * 1e9)
                self._states.set(model.folder.key, "UNAVAILABLE", f"left out: {reason}", on_demand_ns=from_ns)
                await self._replicas.retire(keys)
        await asyncio.sleep(pause_s)
        for engine in self._processes.engines:
            self._retiring.start(self.restore(engine))

    async def restore(self, engine: int) -> None:
        """Load the served models into an engine that was restarted; retry those that fail.

        Models that other engines serve too are attached last, when all are loaded: new streams go to the new engine at
        once, and loading would slow them down.
        """
        pause_s = MIN_RETRY_S
        # The cache may have lost graphs. Models with one are not to wait for those without.
        exports: dict[Key, asyncio.Task[None]] = {}
        while missing := await self._missing(engine):
            if (ready := await self._exported(missing, exports)) is None:
                continue
            try:
                reloaded = [await self._reload(key, engine) for key in ready]
                for each in reloaded:
                    if each is not None:
                        await self._rejoin(*each, engine)
            except EngineLost:
                return  # the engine's next start calls this again
            if await self._missing(engine):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _missing(self, engine: int) -> list[Key]:
        # A change that is under way may have begun when that engine was not there.
        async with self._change_lock:
            missing = [
                key
                for key, model in self._models.items()
                if engine not in model.replicas and not self._fatal.left_s(model.number)
            ]
            return sorted(missing, key=lambda key: bool(self._models[key].replicas))

    async def _exported(self, keys: list[Key], exports: dict[Key, asyncio.Task[None]]) -> list[Key] | None:
        """Choose the models that can be loaded again; None after a wait for an export, when all others are.

        Args:
            keys: Models that are to be loaded.
            exports: Their exports, to which those are added that are to be begun.
        """
        for key in keys:
            model = self._models.get(key)
            if key not in exports and model is not None:
                with suppress(PenstockError, OSError):
                    report = partial(self._note_restored, model)
                    export = await self._preparation.find_export(model.folder.bundle, model.pinned, report)
                    if export is not None:
                        exports[key] = self._retiring.start(export)
        running = {key: task for key in keys if (task := exports.get(key)) is not None and not task.done()}
        if len(running) < len(keys):
            return [key for key in keys if key not in running]
        await asyncio.wait(running.values(), return_when=asyncio.FIRST_COMPLETED)
        return None

    async def _reload(self, key: Key, engine: int) -> tuple[_LoadedModel, Replicas] | None:
        """Load a model again; returns its replica if it is still to be attached."""
        async with self._change_lock:
            model = self._models.get(key)
            if model is None or engine in model.replicas or self._fatal.left_s(model.number):
                return None
            with self._reporting(model, engine):
                bundle = pinned_bundle(model.pinned, str(model.folder.bundle))
                unexported = self._preparation.reason_unexported(bundle)
                replicas = await self._replicas.load(model.folder, model.number, (engine,), model.pinned, unexported)
                if model.replicas:
                    return model, replicas
                await self._join(model, replicas)
        return None

    async def _rejoin(self, model: _LoadedModel, replicas: Replicas, engine: int) -> None:
        async with self._change_lock:
            # The model may have been replaced or unloaded meanwhile.
            if self._models.get(model.folder.key) is not model or engine in model.replicas:
                await self._replicas.unload(keys_of(replicas))
                return
            with self._reporting(model, engine):
                await self._join(model, replicas)

    async def _join(self, model: _LoadedModel, replicas: Replicas) -> None:
        model.replicas |= await self._replicas.attach(replicas, {})
        model.keys = keys_of(model.replicas)
        self._states.set(model.folder.key, "READY")

    @contextmanager
    def _reporting(self, model: _LoadedModel, engine: int) -> Generator[None]:
        try:
            yield
        except PenstockError as error:
            if not model.replicas and not self._fatal.left_s(model.number):
                # A server is ready without a model that was left out.
                began = "" if self._fatal.was_left_out(model.number) else f"{RESTARTING}: "
                self._states.set(model.folder.key, "LOADING", f"{began}{error}")
            if isinstance(error, EngineLost):
                raise
            log.error("engine %d cannot serve %s, and tries again: %s", engine, model.folder.name, error)

    async def change(self, name: str, unload: bool) -> None:
        """Load or unload a model, see `load` and `unload`."""
        await (self.unload(name) if unload else self.load(name))

    def demand(self, name: str) -> None:
        """Load a model for a request that came for it, see `OnDemand`."""
        if self._on_demand is not None:
            self._on_demand.demand(name)

    async def load(self, name: str) -> None:
        """Serve the versions of a model that its policy asks for; those before them are served until then.

        A single version is loaded again in any case, one of several only if its bundle is another.

        Raises:
            UnknownRoute: There is no such model.
            InvalidInput: The model cannot be loaded.
            Overloaded: No engine runs, or one died meanwhile.
        """
        if name in self._states.chains:
            raise InvalidInput(f"{name!r} is a chain, whose parts are loaded one by one; rename the folder of a model.")
        await self._prepare_found(name)
        async with self._change_lock:
            try:
                await (self._load_found if self._on_demand is None else self._on_demand.load)(name)
            except PenstockError as error:
                # With `on_demand`, the states follow with the time of the next attempt.
                if self._on_demand is None:
                    self._end_loading(name, error)
                raise

    def _end_loading(self, name: str, error: PenstockError) -> None:
        """Set the states of versions that were exported for a load that did not come to them."""
        for key in self._states.loading(name):
            if isinstance(error, UnknownRoute):
                # It was removed meanwhile.
                self._withdraw(key)
            elif key not in self._models:
                self._states.set(key, "UNAVAILABLE", str(error)[:MAX_TEXT])

    async def _prepare_found(self, name: str) -> None:
        """Try a model and export its network before the lock is taken, since both may take any time.

        A failure is reported by the load, which gets the same one. Whatever has changed meanwhile, the load begins anew
        from what lies on disk, what is served and which engines run.
        """
        with suppress(PenstockError, OSError):
            for folder in await self._found(name):
                await self._preparation.prepare(folder.bundle, partial(self._note_step, folder))

    async def _load_found(self, name: str) -> None:
        try:
            folders, served = await self._found(name), self._versions_of(name)
        except (StorageError, BundleError) as error:
            raise InvalidInput(f"Model {name!r} cannot be loaded: {error}") from None
        wanted = {folder.key for folder in folders}
        for key in self._states.versions(name):
            if key not in wanted:
                self._withdraw(key)
        for folder in folders:
            if not folder.several or not self._is_current(folder):
                await self._load_one(folder, is_new=not served)
        for model in served:
            if model.folder.key not in wanted:
                self._drop(model)

    async def unload(self, name: str) -> None:
        """Stop serving a model; accepted requests are still answered.

        Raises:
            UnknownRoute: It is not loaded.
        """
        async with self._change_lock:
            if not self._versions_of(name):
                raise UnknownRoute(f"There is no model {name[:MAX_NAME]!r} to unload.")
            await self._unload(name, "unloaded", None)

    async def _unload(self, name: str, reason: str, on_demand_ns: int | None) -> None:
        models = self._versions_of(name)
        for model in models:
            del self._models[model.folder.key]
            self._fatal.forget(model.number)
            self._states.set(model.folder.key, "UNLOADING", reason, on_demand_ns=on_demand_ns)
        for model in models:
            await self._replicas.retire(model.keys, model.pinned)
            # A request may wait for it to be loaded again.
            if on_demand_ns is None or self._on_demand is None:
                self._states.set(model.folder.key, "UNAVAILABLE", reason)
            else:
                self._on_demand.offer(model.folder.key)

    def _replaceable(self) -> dict[str, Loaded]:
        """Models that lie in the model directory, by name."""
        found: dict[str, Loaded] = {}
        for model in self._models.values():
            if model.folder.bundle not in self._bundles:
                before = found.get(model.folder.name, Loaded(loaded_ns=0, tables=(), memory_bytes=0))
                grown_bytes = max((loaded.memory_bytes for loaded, _ in model.replicas.values()), default=0)
                found[model.folder.name] = Loaded(
                    loaded_ns=max(before.loaded_ns, model.loaded_ns),
                    tables=(*before.tables, *model.keys),
                    memory_bytes=before.memory_bytes + grown_bytes,
                )
        return found

    async def _disk_bytes(self, name: str) -> int:
        folders = await self._found(name)
        return sum(file.stat().st_size for folder in folders for file in folder.bundle.iterdir())

    async def _use(self) -> list[EngineUse]:
        reports = (self._processes.report_use(engine) for engine in self._processes.engines)
        uses = await asyncio.gather(*reports, return_exceptions=True)
        found: list[EngineUse] = []
        for use in uses:
            if isinstance(use, EngineUse):
                found.append(use)
            elif not isinstance(use, EngineLost):
                # Nothing is known of its tables: none may make room. Those of an engine that died are in no use.
                raise use if isinstance(use, PenstockError) else ServeError(f"an engine's use is not known: {use}")
        return found

    async def _found(self, name: str) -> list[ModelFolder]:
        assert self._directory is not None, "front-ends refuse changes without a model directory"
        # In a thread: a version at a URL is downloaded.
        return await asyncio.to_thread(self._directory.find_versions, name)

    def _versions_of(self, name: str) -> list[_LoadedModel]:
        return [model for model in self._models.values() if model.folder.name == name]

    def _is_current(self, folder: ModelFolder) -> bool:
        """Check whether a version is served as it lies on disk."""
        model = self._models.get(folder.key)
        if model is None or not model.replicas:
            return False
        served = {loaded.bundle_hash for loaded, _ in model.replicas.values()}
        with suppress(BundleError):
            return {read_manifest(folder.bundle).content_hash} == served
        return False

    async def _load_one(self, folder: ModelFolder, *, is_new: bool) -> None:
        if is_new:
            self._states.set(folder.key, "LOADING")
        try:
            await self._load_version(folder)
        except PenstockError as error:
            reason = str(error)[:MAX_TEXT]
            # With `on_demand`, the state follows with the time from which a request tries again: a front-end that saw
            # one without it would answer that there is no such model.
            if is_new and self._on_demand is None:
                self._states.set(folder.key, "UNAVAILABLE", reason)
            if isinstance(error, EngineLost):
                raise Overloaded(f"Model {folder.name!r} is not loaded: {reason}", RESTART_S) from None
            log.warning("%s cannot be loaded: %s", folder.name, reason)
            raise InvalidInput(f"Model {folder.name!r} cannot be loaded: {reason}") from None

    def _drop(self, model: _LoadedModel) -> None:
        """Let a version go that its policy does not ask for any more."""
        del self._models[model.folder.key]
        self._fatal.forget(model.number)
        self._withdraw(model.folder.key)
        self._retiring.start(self._replicas.retire(model.keys, model.pinned))

    def _withdraw(self, key: Key) -> None:
        """Withdraw the state of a version that is no more, or was loaded under another name, see `--app`."""
        if key not in self._models:
            self._states.withdraw(key)

    async def _load_version(self, folder: ModelFolder) -> None:
        await self._preparation.check(folder.bundle)
        await self._load_tried(folder, self._preparation.reason_unexported(folder.bundle))

    async def _load_tried(self, folder: ModelFolder, unexported: str = "") -> None:
        engines = self._processes.engines
        if not engines:
            raise EngineLost(f"{RESTARTING}.")
        pinned = "" if self._pins is None else str(await asyncio.to_thread(self._pins.pin, folder.bundle))
        try:
            await self._load_pinned(folder, engines, pinned, unexported)
        except BaseException:
            await self._replicas.release(pinned)
            raise

    async def _load_pinned(self, folder: ModelFolder, engines: tuple[int, ...], pinned: str, unexported: str) -> None:
        number = next(self._numbers)
        replicas = await self._replicas.load(folder, number, engines, pinned, unexported)
        name = next(loaded.command.name for loaded, _ in replicas.values())
        if not folder.name and self._versions_of(name):
            await self._replicas.unload(keys_of(replicas))
            raise ServeError(
                f"two bundles are of application {name!r}; put them into a model directory, where folders name them."
            )
        folder = replace(folder, name=name)
        before = self._models.get(folder.key)
        replicas = await self._replicas.attach(replicas, {} if before is None else before.replicas)
        loaded_ns = time.monotonic_ns()
        self._models[folder.key] = _LoadedModel(folder, number, replicas, keys_of(replicas), loaded_ns, pinned)
        self._states.set(folder.key, "READY")
        if before is not None:
            self._fatal.forget(before.number)
            self._retiring.start(self._replicas.retire(keys_of(before.replicas), before.pinned))
