"""Which models a server has: found in folders, loaded by the engine, handed to the front-ends, replaced and let go.

A model directory has a folder for each model, which is a bundle or holds numbered versions, each a bundle:

    models/digits/manifest.json ...        the model `digits`
    models/speech/3/manifest.json ...      the model `speech`, of which the highest version is served

A new version takes over only when it is ready everywhere; the old one goes when its last client has its answer.
"""

import asyncio
import itertools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

from penstock.core.bundle import MANIFEST
from penstock.core.errors import EngineLost, InvalidInput, Overloaded, PenstockError, ServeError, UnknownRoute
from penstock.serve.messages import Loaded, Order
from penstock.serve.models import RESTARTING, ModelState
from penstock.serve.served import RESTART_S
from penstock.serve.slots import SlotTable

log = logging.getLogger(__name__)

Memory = SlotTable | int

# A model that was served is tried again so long after it failed to load, and then after twice the time, up to:
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class EngineSide(Protocol):
    """What the repository asks of the engine."""

    async def load(self, order: Order) -> tuple[Loaded, Memory]:
        """Make a model ready; gives its table, or the descriptor of its memory.

        Raises:
            EngineLost: The engine's process ended meanwhile.
            PenstockError: It cannot be loaded.
        """
        ...

    async def unload(self, key: int) -> None:
        """Forget a model."""
        ...


class FrontendSide(Protocol):
    """What the repository asks of all front-ends together."""

    async def attach(self, loaded: Loaded, memory: Memory) -> None:
        """Let a model answer to its name, again if another one took it; returns when it does so everywhere.

        Raises:
            PenstockError: One front-end cannot serve it.
        """
        ...

    async def retire(self, key: int) -> None:
        """Put nothing more into a table; returns when nobody waits for it any more."""
        ...

    def tell(self, states: tuple[ModelState, ...]) -> None:
        """Say what the repository holds."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """A model on disk.

    Args:
        name: What requests call it; empty takes the application's own.
        version: `"1"` where versions are not numbered.
        bundle: Its folder.
    """

    name: str
    version: str
    bundle: Path


def find_model(directory: Path, name: str) -> Found:
    """The newest version of a model in a model directory.

    Raises:
        UnknownRoute: There is none of that name.
    """
    folder = directory / name
    if not _stands_in_a_folder(name) or not folder.is_dir():
        raise UnknownRoute(f"There is no folder {name!r} in the model directory.")
    if (folder / MANIFEST).is_file():
        return Found(name, "1", folder)
    numbers = [each for each in folder.iterdir() if each.name.isascii() and each.name.isdecimal() and each.is_dir()]
    if not numbers:
        raise UnknownRoute(f"The folder {name!r} of the model directory is no bundle and has no numbered versions.")
    newest = max(numbers, key=lambda each: int(each.name))
    return Found(name, str(int(newest.name)), newest)


def model_names(directory: Path) -> list[str]:
    """The models of a model directory.

    Raises:
        ServeError: It is no directory.
    """
    if not directory.is_dir():
        raise ServeError(f"{directory} is not a directory; name the folder that holds the models' folders.")
    return sorted(each.name for each in directory.iterdir() if each.is_dir() and _stands_in_a_folder(each.name))


def _stands_in_a_folder(name: str) -> bool:
    return name != "" and all(c.isascii() and (c.isalnum() or c in "-_") for c in name)


@final
class ModelRepository:
    """Loads, replaces and unloads models, one change at a time.

    Args:
        bundles: Served from the start.
        directory: A model directory, or None.
        engine: Makes them ready.
        frontends: Answer for them.
    """

    def __init__(
        self, bundles: tuple[Path, ...], directory: Path | None, engine: EngineSide, frontends: FrontendSide
    ) -> None:
        self._bundles = bundles
        self._directory = directory
        self._engine = engine
        self._frontends = frontends
        self._keys = itertools.count()
        self._one_at_a_time = asyncio.Lock()
        self._loaded: dict[str, tuple[Loaded, Memory]] = {}
        # What answered until the engine died, and must again.
        self._lost: dict[str, Loaded] = {}
        self._states: dict[str, ModelState] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def loaded(self) -> list[tuple[Loaded, Memory]]:
        """Every model that answers, with its table."""
        return list(self._loaded.values())

    @property
    def states(self) -> tuple[ModelState, ...]:
        """Of every model that was asked for, or lies in the model directory."""
        return tuple(self._states.values())

    async def load_all(self) -> None:
        """Load what the server was started with.

        Raises:
            PenstockError: One of them cannot be loaded.
        """
        found = [Found("", "1", bundle) for bundle in self._bundles]
        if self._directory is not None:
            found += [find_model(self._directory, name) for name in model_names(self._directory)]
        async with self._one_at_a_time:
            for each in found:
                await self._take_in(each)

    def lose(self) -> None:
        """The engine is gone, and with it every model until `restore`."""
        self._lost |= {name: loaded for name, (loaded, _) in self._loaded.items()}
        self._loaded.clear()
        for name, loaded in self._lost.items():
            self._set_state(name, loaded.order.version, "LOADING", RESTARTING)

    async def restore(self) -> None:
        """Load again what was loaded, on an engine that was started anew; what fails is tried again and again."""
        pause_s = FIRST_PAUSE_S
        while self._lost:
            for name in list(self._lost):
                try:
                    await self._restore(name)
                except EngineLost:
                    return  # the next engine's start calls this anew
                except PenstockError as error:
                    log.error("%s is not served now, and tried again in %g s: %s", name, pause_s, error)
            if self._lost:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _restore(self, name: str) -> None:
        async with self._one_at_a_time:
            if name in self._lost:
                order = self._lost[name].order
                try:
                    await self._take_in(Found(order.name, order.version, Path(order.bundle)))
                except PenstockError as error:
                    self._set_state(name, order.version, "LOADING", f"{RESTARTING}: {error}")
                    raise

    async def load(self, name: str) -> None:
        """Serve the newest version of a model; the one before it answers until then.

        Raises:
            UnknownRoute: There is none of that name.
            InvalidInput: It cannot be loaded.
            Overloaded: The engine is being started again.
        """
        assert self._directory is not None, "front-ends refuse this"
        async with self._one_at_a_time:
            found = find_model(self._directory, name)
            there = name in self._loaded or name in self._lost
            if not there:
                self._set_state(name, found.version, "LOADING")
            try:
                await self._take_in(found)
            except EngineLost as error:
                if not there:
                    self._set_state(name, found.version, "UNAVAILABLE", str(error))
                raise Overloaded(f"Model {name!r} is not loaded: {error}", RESTART_S) from None
            except PenstockError as error:
                log.warning("%s cannot be loaded: %s", name, error)
                if not there:
                    self._set_state(name, found.version, "UNAVAILABLE", str(error))
                raise InvalidInput(f"Model {name!r} cannot be loaded: {error}") from None

    async def unload(self, name: str) -> None:
        """Serve a model no more; who waits for it still gets an answer.

        Raises:
            UnknownRoute: It is not loaded.
        """
        async with self._one_at_a_time:
            if name in self._lost:
                loaded = self._lost.pop(name)
            elif name in self._loaded:
                loaded, _ = self._loaded.pop(name)
            else:
                raise UnknownRoute(f"There is no model {name!r} to unload.")
            self._set_state(name, loaded.order.version, "UNLOADING")
            await self._let_go(loaded)
            self._set_state(name, loaded.order.version, "UNAVAILABLE", "unloaded")

    async def _take_in(self, found: Found) -> None:
        order = Order(key=next(self._keys), name=found.name, version=found.version, bundle=str(found.bundle))
        loaded, memory = await self._engine.load(order)
        name = loaded.order.name
        if not found.name and name in self._loaded:
            await self._engine.unload(order.key)
            raise ServeError(
                f"two bundles are of application {name!r}; put them into a model directory, where folders name them."
            )
        before = self._loaded.get(name)
        try:
            await self._frontends.attach(loaded, memory)
        except PenstockError:
            # Some front-ends may have taken it, and given its name to it.
            if before is not None:
                await self._frontends.attach(*before)
            await self._let_go(loaded)
            raise
        self._lost.pop(name, None)
        self._loaded[name] = loaded, memory
        self._set_state(name, found.version, "READY")
        if before is not None:
            task = asyncio.get_running_loop().create_task(self._let_go(before[0]))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def _let_go(self, loaded: Loaded) -> None:
        await self._frontends.retire(loaded.order.key)
        await self._engine.unload(loaded.order.key)

    def _set_state(self, name: str, version: str, state: str, reason: str = "") -> None:
        self._states[name] = ModelState(name=name, version=version, state=state, reason=reason)
        self._frontends.tell(self.states)
