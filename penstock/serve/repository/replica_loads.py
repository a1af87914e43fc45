"""Replicas of a model, one in each engine: loaded at once, attached by the front-ends, and let go."""

import asyncio
import itertools
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, final

from penstock.core.errors import EngineLost, PenstockError
from penstock.serve.messages import LoadModel, ModelLoaded
from penstock.serve.pinned_content import PinnedModels
from penstock.serve.repository.model_directory import ModelFolder
from penstock.serve.repository.server_processes import ServerProcesses, TableMemory

T = TypeVar("T")
# Replicas of a model, by engine.
Replicas = dict[int, tuple[ModelLoaded, TableMemory]]

DIED_AFTER_LOAD = "the engine's process ended after it loaded the model; its log says why."


@final
class ReplicaLoads:
    """Loads the replicas of models, has all front-ends attach them, and lets them go.

    Args:
        processes: They load models and serve them.
        pins: Copies of what is loaded; None where none is.
    """

    def __init__(self, processes: ServerProcesses, pins: PinnedModels | None) -> None:
        self._processes = processes
        self._pins = pins
        self._keys = itertools.count()
        # Replicas that the front-ends attach at this moment.
        self._attaching: Replicas = {}
        # Models that engines load at this moment, by the key of the table.
        self._loading: dict[int, ModelFolder] = {}

    def folder_of(self, key: int) -> ModelFolder | None:
        """Return the folder of a model that engines load at this moment, by the key of its table."""
        return self._loading.get(key)

    def drop_engine(self, engine: int) -> None:
        """Forget what front-ends attach of an engine that died."""
        self._attaching.pop(engine, None)

    async def load(
        self, folder: ModelFolder, number: int, engines: tuple[int, ...], pinned: str, unexported: str = ""
    ) -> Replicas:
        """Load a model into engines; engines that die meanwhile get it when they are restarted.

        Args:
            folder: The model.
            number: See `LoadModel.model`.
            engines: Indices of the engines.
            pinned: See `LoadModel.pinned`.
            unexported: See `LoadModel.unexported`.

        Raises:
            PenstockError: An engine cannot load it, or all have died.
        """
        command = LoadModel(
            key=0,
            model=number,
            name=folder.name,
            version=folder.version,
            several=folder.several,
            bundle=str(folder.bundle),
            pinned=pinned,
            unexported=unexported,
        )
        commands = [replace(command, key=key) for key in itertools.islice(self._keys, len(engines))]
        loads = (self._processes.load(command, engine) for command, engine in zip(commands, engines, strict=True))
        named = folder.named()
        self._loading |= {command.key: named for command in commands}
        try:
            results = await wait_for_replicas(loads)
        finally:
            for command in commands:
                del self._loading[command.key]
        failures = [each for each in results if isinstance(each, BaseException)]
        # An error of the model is more informative than the end of an engine, or than a load given up because of it.
        uninformative = (EngineLost, asyncio.CancelledError)
        worst = min(failures, key=lambda error: isinstance(error, uninformative), default=None)
        if worst is not None and (len(failures) == len(results) or not isinstance(worst, EngineLost)):
            await self.unload([command.key for command in commands])
            raise worst
        loaded = zip(engines, results, strict=True)
        return {engine: each for engine, each in loaded if not isinstance(each, BaseException)}

    async def attach(self, replicas: Replicas, before: Replicas) -> Replicas:
        """Have all front-ends attach all replicas, or none.

        Args:
            replicas: The replicas.
            before: Replicas of the version that is served under the same name.

        Returns:
            The replicas whose engines still run.

        Raises:
            PenstockError: A front-end cannot attach one, or no engine is left.
        """
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
            for replica in list(before.values()):
                # A front-end that was started meanwhile may not be able to attach that one either; it says so itself.
                with suppress(PenstockError):
                    await self._processes.attach(*replica)
            await self.retire(keys_of(replicas))
            raise
        return dict(self._attaching)

    async def retire(self, keys: list[int], pinned: str = "") -> None:
        """Unload tables when their last requests are answered, and release the copies of their model."""
        await asyncio.gather(*(self._processes.retire(key) for key in keys))
        await self.unload(keys)
        await self.release(pinned)

    async def release(self, pinned: str) -> None:
        """Release the copies of a model, see `LoadModel.pinned`."""
        if self._pins is not None and pinned:
            await asyncio.to_thread(self._pins.release, Path(pinned))

    async def unload(self, keys: list[int]) -> None:
        """Unload tables for which no request waits."""
        for key in keys:
            await self._processes.unload(key)


def keys_of(replicas: Replicas) -> list[int]:
    """Return the keys of the tables of replicas."""
    return [loaded.command.key for loaded, _ in replicas.values()]


async def wait_for_replicas(loads: Iterable[Awaitable[T]]) -> list[T | BaseException]:
    """Wait until every engine has loaded a model or ended, or one of them cannot load it.

    The other engines are not waited for then, since no engine serves the model: one may export it for a minute.

    Args:
        loads: The loads, one for each engine. Those that are left are cancelled.

    Returns:
        The result or the error of each load, in their order; CancelledError for those that are left.
    """
    tasks = [asyncio.ensure_future(load) for load in loads]
    left = set(tasks)
    try:
        while left and not any(_cannot_load(task) for task in tasks):
            _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in left:
            task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


def _cannot_load(task: "asyncio.Future[T]") -> bool:
    """Tell whether a load failed for another reason than the end of its engine."""
    error = task.exception() if task.done() and not task.cancelled() else None
    return error is not None and not isinstance(error, EngineLost)
