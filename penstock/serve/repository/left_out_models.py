"""Models that are left out for a while, since their loads end processes or do not end: no engine loads them."""

import asyncio
import logging
import time
from typing import final

from penstock.serve.background import BackgroundTasks
from penstock.serve.repository.fatal_loads import FatalLoads
from penstock.serve.repository.loaded_models import LoadedModels
from penstock.serve.repository.model_restores import ModelRestores
from penstock.serve.repository.model_states import ModelStates
from penstock.serve.repository.replica_loads import ReplicaLoads
from penstock.serve.repository.server_processes import ServerProcesses

log = logging.getLogger(__name__)


@final
class LeftOutModels:
    """Leaves models out, and has the engines load them again after a pause.

    Args:
        processes: The engines.
        models: What is served.
        replicas: Retires replicas.
        states: States of the models.
        restores: Loads models into engines after the pause.
        fatal: Counts the loads that ended processes.
    """

    def __init__(
        self,
        processes: ServerProcesses,
        models: LoadedModels,
        replicas: ReplicaLoads,
        states: ModelStates,
        restores: ModelRestores,
        fatal: FatalLoads,
    ) -> None:
        self._processes = processes
        self._models = models
        self._replicas = replicas
        self._states = states
        self._restores = restores
        self._fatal = fatal
        self._tasks = BackgroundTasks()

    def note_end(self, model: int, process: str, reason: str, *, killed: bool, everywhere: bool) -> None:
        """Note that an engine or front-end ended while it loaded a model, which is left out if that repeats itself.

        The only model is not left out because of kills: there is no other to protect, and its process is started again
        with pauses of its own.

        Args:
            model: Number of the model, see `LoadModel.model`.
            process: Name of the process.
            reason: What happened, as a sentence.
            killed: Whether SIGKILL ended it.
            everywhere: Whether it is left out of the engines that serve it, too.
        """
        # A first load is answered with the reason, and not repeated.
        served = self._models.of_number(model) is not None
        is_only = len(self._models.all) == 1
        counts = served and not (killed and is_only)
        pause_s = self._fatal.record_end(model, process, killed=killed) if counts else 0.0
        if pause_s:
            self._tasks.start(self._pause(model, reason, pause_s, everywhere=everywhere))

    def note_loaded(self, model: int, process: str) -> None:
        """Note that an engine or front-end loaded a model and lives.

        Args:
            model: Number of the model, see `LoadModel.model`.
            process: Name of the process.
        """
        self._fatal.record_loaded(model, process)

    def leave_out(self, model: int, reason: str) -> None:
        """Load a model into no engine until after a pause; nothing if it is not served yet.

        Args:
            model: Its number, see `LoadModel.model`.
            reason: What happened, as a sentence.
        """
        if self._models.of_number(model) is not None:
            self._tasks.start(self._pause(model, reason, self._fatal.leave_out(model), everywhere=False))

    async def _pause(self, number: int, reason: str, pause_s: float, *, everywhere: bool) -> None:
        async with self._models.change_lock:
            model = self._models.of_number(number)
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
            self._tasks.start(self._restores.restore(engine))
