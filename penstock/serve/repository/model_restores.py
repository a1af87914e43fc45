"""Loads of the served models into an engine that was restarted."""

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import final

from penstock.core.errors import EngineLost, PenstockError
from penstock.serve.background import BackgroundTasks
from penstock.serve.pinned_content import pinned_bundle
from penstock.serve.repository.bundle_preparation import BundlePreparation
from penstock.serve.repository.fatal_loads import FatalLoads
from penstock.serve.repository.loaded_models import Key, LoadedModel, LoadedModels
from penstock.serve.repository.loading_states import LoadingStates
from penstock.serve.repository.replica_loads import ReplicaLoads, Replicas, keys_of

log = logging.getLogger(__name__)

# Pauses between attempts to load a model into a restarted engine; they double from the first to the last.
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


@final
class ModelRestores:
    """Loads the served models into engines that lack them.

    Args:
        models: What is served.
        replicas: Loads and attaches replicas.
        preparation: Exports networks before engines load them.
        states: States of models while they are loaded.
        fatal: Says which models are left out.
    """

    def __init__(
        self,
        models: LoadedModels,
        replicas: ReplicaLoads,
        preparation: BundlePreparation,
        states: LoadingStates,
        fatal: FatalLoads,
    ) -> None:
        self._models = models
        self._replicas = replicas
        self._preparation = preparation
        self._states = states
        self._fatal = fatal
        self._exporting = BackgroundTasks()

    async def restore(self, engine: int) -> None:
        """Load the served models into an engine that was restarted; retry those that fail.

        Models that other engines serve too are attached last, when all are loaded: new streams go to the new engine at
        once, and loading would slow them down.

        Args:
            engine: Index of the engine.
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
        async with self._models.change_lock:
            missing = [
                model
                for model in self._models.all
                if engine not in model.replicas and not self._fatal.left_s(model.number)
            ]
            return [model.folder.key for model in sorted(missing, key=lambda model: bool(model.replicas))]

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
                    report = partial(self._states.note_restored, model)
                    export = await self._preparation.find_export(model.folder.bundle, model.pinned, report)
                    if export is not None:
                        exports[key] = self._exporting.start(export)
        running = {key: task for key in keys if (task := exports.get(key)) is not None and not task.done()}
        if len(running) < len(keys):
            return [key for key in keys if key not in running]
        await asyncio.wait(running.values(), return_when=asyncio.FIRST_COMPLETED)
        return None

    async def _reload(self, key: Key, engine: int) -> tuple[LoadedModel, Replicas] | None:
        """Load a model again; returns its replica if it is still to be attached."""
        async with self._models.change_lock:
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

    async def _rejoin(self, model: LoadedModel, replicas: Replicas, engine: int) -> None:
        async with self._models.change_lock:
            # The model may have been replaced or unloaded meanwhile.
            if self._models.get(model.folder.key) is not model or engine in model.replicas:
                await self._replicas.unload(keys_of(replicas))
                return
            with self._reporting(model, engine):
                await self._join(model, replicas)

    async def _join(self, model: LoadedModel, replicas: Replicas) -> None:
        model.replicas |= await self._replicas.attach(replicas, {})
        model.keys = keys_of(model.replicas)
        self._states.note_ready(model)

    @contextmanager
    def _reporting(self, model: LoadedModel, engine: int) -> Generator[None]:
        try:
            yield
        except PenstockError as error:
            self._states.note_unrestored(model, error)
            if isinstance(error, EngineLost):
                raise
            log.error("engine %d cannot serve %s, and tries again: %s", engine, model.folder.name, error)
