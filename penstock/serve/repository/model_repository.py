"""Models of a server: found in folders, loaded by the engines, attached by the front-ends, replaced and unloaded.

Each engine has a replica of each version that is served. A new version replaces an old one only when it is ready in all
engines; the old one is unloaded when the last of its requests has been answered.
"""

import asyncio
import logging
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import final

from penstock.core.application import MAX_NAME
from penstock.core.bundles.bundle import read_manifest
from penstock.core.errors import (
    OF_BUNDLE,
    BundleError,
    EngineLost,
    InvalidInput,
    Overloaded,
    PenstockError,
    ServeError,
    StorageError,
    UnknownRoute,
)
from penstock.serve.messages import MAX_TEXT, ON_DEMAND, RESTART_S, EngineUse, ModelLoaded, ModelState
from penstock.serve.pinned_content import PinnedModels
from penstock.serve.repository.bundle_preparation import BundlePreparation, RememberedFailure, SourcesByBundle
from penstock.serve.repository.fatal_loads import FatalLoads
from penstock.serve.repository.left_out_models import LeftOutModels
from penstock.serve.repository.loaded_models import Key, LoadedModels
from penstock.serve.repository.loading_states import LoadingStates
from penstock.serve.repository.model_directory import ModelFolder, model_directory
from penstock.serve.repository.model_restores import ModelRestores
from penstock.serve.repository.model_states import ModelStates
from penstock.serve.repository.on_demand import Loaded, OnDemand
from penstock.serve.repository.replica_loads import ReplicaLoads, keys_of
from penstock.serve.repository.server_processes import ServerProcesses, TableMemory
from penstock.serve.repository.version_loads import VersionLoads
from penstock.serve.settings import ModelSettings

log = logging.getLogger(__name__)


@final
class ModelRepository:
    """Loads, replaces and unloads models, one change at a time.

    Args:
        models: Bundles and model directory.
        processes: They load models and serve them.
        pins: Copies of what is loaded, for processes that are restarted; None where none is.
        preparation: Tries bundles, and exports their networks, before engines load them.

    Attributes:
        left_out: Models that are left out, since their loads end processes.
    """

    def __init__(
        self,
        models: ModelSettings,
        processes: ServerProcesses,
        *,
        pins: PinnedModels | None = None,
        preparation: BundlePreparation | None = None,
    ) -> None:
        self._bundles = models.bundles
        self._chain_references = models.chains
        self._directory = model_directory(models)
        # Models whose versions the operator has named.
        self._chosen = set(models.policies)
        self._processes = processes
        self._preparation = preparation or BundlePreparation()
        self._models = LoadedModels()
        self._replicas = ReplicaLoads(processes, pins)
        self._states = ModelStates(processes.publish_state)
        fatal = FatalLoads()
        self._loading = LoadingStates(self._states, self._models, fatal)
        # Bundles that failed in the preparation of a load that has not reported it yet.
        self._failed_now: set[Path] = set()
        self._loads = VersionLoads(processes, self._models, self._replicas, self._loading, fatal, pins)
        self._restores = ModelRestores(self._models, self._replicas, self._preparation, self._loading, fatal)
        self.left_out = LeftOutModels(processes, self._models, self._replicas, self._states, self._restores, fatal)
        self._on_demand: OnDemand | None = None
        if models.on_demand:
            self._on_demand = OnDemand(
                models=models,
                states=self._states,
                change_lock=self._models.change_lock,
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
        return [replica for model in self._models.all for replica in model.replicas.values()]

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
        given = [ModelFolder("", "1", bundle) for bundle in self._bundles]
        found = await self._found_at_start()
        errors: dict[Key, PenstockError] = {}
        compared: SourcesByBundle = {}
        async with self._models.change_lock:
            for folder in (*given, *found):
                self._states.set(folder.named().key, "LOADING", "waiting for its turn")
            # Those of the command line were chosen by the operator, and nothing is served yet that they could hold up.
            checks = (self._preparation.check(folder.bundle) for folder in found)
            for folder, tried in zip(found, await asyncio.gather(*checks, return_exceptions=True), strict=True):
                if isinstance(tried, PenstockError):
                    errors[folder.key] = tried
                elif isinstance(tried, BaseException):
                    raise tried
                elif tried is not None:
                    compared[folder.bundle] = tried
            for folder in (*given, *found):
                if folder.key not in errors:
                    await self._load_at_start(folder, compared, errors)
            if not self._models.all and (error := next(iter(errors.values()), None)) is not None:
                # There is nothing to serve.
                raise error
            for folder in found:
                if folder.key in errors:
                    self._leave_out(folder.key, errors[folder.key])
            for reference in self._chain_references:
                loaded = await self._processes.load_chain(reference)
                self._states.add_chain(loaded.name, loaded.parts)

    async def _found_at_start(self) -> list[ModelFolder]:
        """Find the models of the directory; those that are loaded on first use are offered.

        Raises:
            PenstockError: It is no directory, or all that is in it is wrong.
        """
        if self._directory is None:
            return []
        folders: list[ModelFolder] = []
        wrong: dict[str, PenstockError | OSError] = {}
        for name in await asyncio.to_thread(self._directory.names):
            try:
                if self._on_demand is None:
                    folders += await self._found(name)
                    continue
                versions = await asyncio.to_thread(self._directory.list_versions, name)
            except (PenstockError, OSError) as error:
                if name in self._chosen:
                    raise
                wrong[name] = error
                continue
            for version in versions:
                self._on_demand.offer((name, version))
        if self._on_demand is None and not folders and not self._bundles and wrong:
            raise next(iter(wrong.values()))
        for name, error in wrong.items():
            # The others are served. With `on_demand`, a request for it looks again.
            if self._on_demand is None:
                self._leave_out((name, "1"), error)
            else:
                self._on_demand.refuse(name, error)
        return folders

    async def _load_at_start(
        self, folder: ModelFolder, compared: SourcesByBundle, errors: dict[Key, PenstockError]
    ) -> None:
        """Load a model; an error of one of the directory is kept."""
        try:
            await self._loads.load(folder, compared.get(folder.bundle))
        except OF_BUNDLE as error:
            # What is wrong with an engine is no fault of the model.
            if not folder.name:
                raise
            errors[folder.key] = error
        else:
            self._loading.withdraw(folder.named().key)

    def _leave_out(self, key: Key, error: PenstockError | OSError) -> None:
        """Serve the others without a model of the directory, and say why."""
        reason = str(error)[:MAX_TEXT]
        self._states.set(key, "UNAVAILABLE", reason)
        log.error("version %s of model %r is left out, and the others are served: %s", key[1], key[0], reason)

    def note_progress(self, key: int, activity: str) -> None:
        """Publish what an engine does to load a model that nothing serves yet.

        Args:
            key: Key of the table.
            activity: The present step.
        """
        folder = self._replicas.folder_of(key)
        if folder is not None:
            self._loading.note_step(folder, activity)

    def drop_engine(self, engine: int) -> None:
        """Forget the replicas of an engine that died, until `restore`."""
        self._replicas.drop_engine(engine)
        for model in self._models.all:
            model.replicas.pop(engine, None)
            if model.replicas:
                model.keys = keys_of(model.replicas)
            else:
                self._loading.note_lost(model)

    async def restore(self, engine: int) -> None:
        """Load the served models into an engine that was restarted, see `ModelRestores.restore`."""
        await self._restores.restore(engine)

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
        compared = await self._prepare_found(name)
        async with self._models.change_lock:
            try:
                await (self._load_found if self._on_demand is None else self._on_demand.load)(name, compared)
            except PenstockError as error:
                # With `on_demand`, the states follow with the time of the next attempt.
                if self._on_demand is None:
                    self._loading.end(name, error)
                raise
            except OSError as error:
                # A folder that the server may not read, or a network drive that is gone.
                unread = InvalidInput(
                    f"Model {name!r} cannot be loaded: {error.filename or 'its folder'} cannot be read "
                    f"({error.strerror or error})."
                )
                if self._on_demand is None:
                    self._loading.end(name, unread)
                raise unread from None

    async def _prepare_found(self, name: str) -> SourcesByBundle:
        """Try a model and export its network before the lock is taken, since both may take any time.

        A failure is reported by the load, which gets the same one. Whatever has changed meanwhile, the load begins anew
        from the bundles on disk, what is served and which engines run.

        Returns:
            The sources of the bundles that were tried.
        """
        compared: SourcesByBundle = {}
        with suppress(PenstockError, OSError):
            for folder in await self._found(name):
                self._failed_now.discard(folder.bundle)
                try:
                    tried = await self._preparation.prepare(folder.bundle, partial(self._loading.note_step, folder))
                except RememberedFailure:
                    raise
                except PenstockError:
                    self._failed_now.add(folder.bundle)
                    raise
                if tried is not None:
                    compared[folder.bundle] = tried
        return compared

    async def _load_found(self, name: str, compared: SourcesByBundle) -> None:
        try:
            folders, served = await self._found(name), self._models.versions_of(name)
        except (StorageError, BundleError) as error:
            raise InvalidInput(f"Model {name!r} cannot be loaded: {error}") from None
        wanted = {folder.key for folder in folders}
        for key in self._states.versions(name):
            if key not in wanted:
                self._loading.withdraw(key)
        for folder in folders:
            if not folder.several or not self._is_current(folder):
                await self._load_one(folder, compared, is_new=not served)
        for model in served:
            if model.folder.key not in wanted:
                self._loads.drop(model)

    async def unload(self, name: str) -> None:
        """Stop serving a model; accepted requests are still answered.

        Raises:
            UnknownRoute: It is not loaded.
        """
        async with self._models.change_lock:
            if not self._models.versions_of(name):
                raise UnknownRoute(f"There is no model {name[:MAX_NAME]!r} to unload.")
            await self._unload(name, "unloaded", None)

    async def _unload(self, name: str, reason: str, on_demand_ns: int | None) -> None:
        models = self._models.versions_of(name)
        for model in models:
            self._loads.remove(model)
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
        for model in self._models.all:
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

    def _is_current(self, folder: ModelFolder) -> bool:
        """Check whether a version is served as it lies on disk."""
        model = self._models.get(folder.key)
        if model is None or not model.replicas:
            return False
        served = {loaded.bundle_hash for loaded, _ in model.replicas.values()}
        with suppress(BundleError):
            return {read_manifest(folder.bundle).content_hash} == served
        return False

    async def _load_one(self, folder: ModelFolder, compared: SourcesByBundle, *, is_new: bool) -> None:
        if is_new:
            self._states.set(folder.key, "LOADING")
        try:
            tried = await self._preparation.check(folder.bundle, compared.get(folder.bundle))
            await self._loads.load(folder, tried, self._preparation.reason_unexported(folder.bundle))
        except PenstockError as error:
            reason = answer = str(error)[:MAX_TEXT]
            remembered = False
            if isinstance(error, RememberedFailure):
                # The state outlives the time until it is tried again.
                reason = error.reason[:MAX_TEXT]
                remembered = folder.bundle not in self._failed_now
                answer = answer if remembered else reason
            self._failed_now.discard(folder.bundle)
            # With `on_demand`, the state follows with the time from which a request tries again: a front-end that saw
            # one without it would answer that there is no such model.
            if is_new and self._on_demand is None:
                self._states.set(folder.key, "UNAVAILABLE", reason)
            if isinstance(error, EngineLost):
                raise Overloaded(f"Model {folder.name!r} is not loaded: {reason}", RESTART_S) from None
            # The failure was logged when it was new.
            log.log(logging.INFO if remembered else logging.WARNING, "%s cannot be loaded: %s", folder.name, answer)
            raise InvalidInput(f"Model {folder.name!r} cannot be loaded: {answer}") from None
