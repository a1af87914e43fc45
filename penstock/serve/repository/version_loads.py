"""Loads of a version of a model into all engines, in the place of the version that was served before."""

import asyncio
import itertools
import time
from dataclasses import replace
from typing import final

from penstock.core.bundles.bundle_application import ComparedSources
from penstock.core.errors import EngineLost, ServeError
from penstock.serve.background import BackgroundTasks
from penstock.serve.messages import RESTARTING
from penstock.serve.pinned_content import PinnedModels
from penstock.serve.repository.fatal_loads import FatalLoads
from penstock.serve.repository.loaded_models import LoadedModel, LoadedModels
from penstock.serve.repository.loading_states import LoadingStates
from penstock.serve.repository.model_directory import ModelFolder
from penstock.serve.repository.replica_loads import ReplicaLoads, keys_of
from penstock.serve.repository.server_processes import ServerProcesses


@final
class VersionLoads:
    """Loads versions of models into all engines, and takes them out of service.

    Args:
        processes: The engines.
        models: What is served.
        replicas: Loads and attaches replicas.
        states: States of models while they are loaded.
        fatal: Says which models are left out.
        pins: Copies of what is loaded, for processes that are restarted; None where none is.
    """

    def __init__(
        self,
        processes: ServerProcesses,
        models: LoadedModels,
        replicas: ReplicaLoads,
        states: LoadingStates,
        fatal: FatalLoads,
        pins: PinnedModels | None,
    ) -> None:
        self._processes = processes
        self._models = models
        self._replicas = replicas
        self._states = states
        self._fatal = fatal
        self._pins = pins
        self._numbers = itertools.count()
        self._retiring = BackgroundTasks()

    async def load(self, folder: ModelFolder, compared: ComparedSources | None = None, unexported: str = "") -> None:
        """Load a version that was tried, and retire the one before it; the lock is held.

        Args:
            folder: The version.
            compared: See `PinnedModels.pin`.
            unexported: See `LoadModel.unexported`.

        Raises:
            PenstockError: An engine cannot load it, a front-end cannot attach it, or no engine runs.
        """
        engines = self._processes.engines
        if not engines:
            raise EngineLost(f"{RESTARTING}.")
        pinned = "" if self._pins is None else str(await asyncio.to_thread(self._pins.pin, folder.bundle, compared))
        try:
            await self._load_pinned(folder, engines, pinned, unexported)
        except BaseException:
            await self._replicas.release(pinned)
            raise

    def remove(self, model: LoadedModel) -> None:
        """Forget a version, whose tables are to be retired."""
        self._models.remove(model)
        self._fatal.forget(model.number)

    def drop(self, model: LoadedModel) -> None:
        """Let a version go that its policy does not ask for any more."""
        self.remove(model)
        self._states.withdraw(model.folder.key)
        self._retiring.start(self._replicas.retire(model.keys, model.pinned))

    async def _load_pinned(self, folder: ModelFolder, engines: tuple[int, ...], pinned: str, unexported: str) -> None:
        number = next(self._numbers)
        replicas = await self._replicas.load(folder, number, engines, pinned, unexported)
        name = next(loaded.command.name for loaded, _ in replicas.values())
        if not folder.name and self._models.versions_of(name):
            await self._replicas.unload(keys_of(replicas))
            raise ServeError(
                f"two bundles are of application {name!r}; put them into a model directory, where folders name them."
            )
        folder = replace(folder, name=name)
        before = self._models.get(folder.key)
        replicas = await self._replicas.attach(replicas, {} if before is None else before.replicas)
        model = LoadedModel(
            folder=folder,
            number=number,
            replicas=replicas,
            keys=keys_of(replicas),
            loaded_ns=time.monotonic_ns(),
            pinned=pinned,
        )
        self._models.put(model)
        self._states.note_ready(model)
        if before is not None:
            self._fatal.forget(before.number)
            self._retiring.start(self._replicas.retire(keys_of(before.replicas), before.pinned))
