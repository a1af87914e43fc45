"""Which models a server has: found in folders, loaded by the engines, handed to the front-ends, replaced and let go.

A model directory has a folder for each model, which is a bundle or holds numbered versions, each a bundle:

    models/digits/manifest.json ...        the model `digits`
    models/speech/3/manifest.json ...      the model `speech`, of which the highest version is served

Each engine has a replica of each model. A new version takes over only when it is ready everywhere; the old one goes
when its last client has its answer.
"""

import asyncio
import itertools
import logging
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
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
# The same model in several engines, by engine.
Replicas = dict[int, tuple[Loaded, Memory]]

# A model that was served is tried again so long after it failed to load, and then after twice the time, up to:
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class EngineSide(Protocol):
    """What the repository asks of the engines."""

    @property
    def engines(self) -> tuple[int, ...]:
        """Those that are there, or are started for the first time."""
        ...

    async def load(self, order: Order, engine: int) -> tuple[Loaded, Memory]:
        """Make a model ready in one engine; gives its table, or the descriptor of its memory.

        Raises:
            EngineLost: The engine's process ended meanwhile.
            PenstockError: It cannot be loaded.
        """
        ...

    async def unload(self, key: int) -> None:
        """Let the engine that has a table forget it."""
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


@dataclass(slots=True)
class _Model:
    """A model that answers, or did until its last engine died.

    Args:
        found: Where it came from, under the name that it answers to.
        number: What its replicas share, see `Order`.
        replicas: By engine.
        keys: Of their tables; of the last one that there was, where no engine is left.
    """

    found: Found
    number: int
    replicas: Replicas
    keys: list[int]


@final
class ModelRepository:
    """Loads, replaces and unloads models, one change at a time.

    Args:
        bundles: Served from the start.
        directory: A model directory, or None.
        engines: Make them ready.
        frontends: Answer for them.
    """

    def __init__(
        self, bundles: tuple[Path, ...], directory: Path | None, engines: EngineSide, frontends: FrontendSide
    ) -> None:
        self._bundles = bundles
        self._directory = directory
        self._engines = engines
        self._frontends = frontends
        self._keys, self._numbers = itertools.count(), itertools.count()
        self._one_at_a_time = asyncio.Lock()
        self._models: dict[str, _Model] = {}
        # What is handed to the front-ends now.
        self._coming: Replicas = {}
        self._states: dict[str, ModelState] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    @property
    def loaded(self) -> list[tuple[Loaded, Memory]]:
        """Every replica of a model that answers, with its table."""
        return [replica for model in self._models.values() for replica in model.replicas.values()]

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

    def lose(self, engine: int) -> None:
        """An engine is gone, and with it its replica of every model until `restore`."""
        self._coming.pop(engine, None)
        for name, model in self._models.items():
            model.replicas.pop(engine, None)
            if model.replicas:
                model.keys = _keys_of(model.replicas)
            else:
                self._set_state(name, model.found.version, "LOADING", RESTARTING)

    async def restore(self, engine: int) -> None:
        """Load what is served in an engine that was started anew; what fails is tried again and again.

        What others serve too is handed out when all is loaded: new streams come here at once, and would be slow beside
        what is still to be loaded.
        """
        pause_s = FIRST_PAUSE_S
        while missing := await self._missing(engine):
            try:
                made = [await self._made_again(name, engine) for name in missing]
                for each in made:
                    if each is not None:
                        await self._joined(*each, engine)
            except EngineLost:
                return  # the engine's next start calls this anew
            if await self._missing(engine):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _missing(self, engine: int) -> list[str]:
        # A change that is under way may have begun when that engine was not there.
        async with self._one_at_a_time:
            missing = [name for name, model in self._models.items() if engine not in model.replicas]
            return sorted(missing, key=lambda name: bool(self._models[name].replicas))

    async def _made_again(self, name: str, engine: int) -> tuple[_Model, Replicas] | None:
        """A model with its new replica, unless that serves already or cannot be made."""
        async with self._one_at_a_time:
            model = self._models.get(name)
            if model is None or engine in model.replicas:
                return None
            with self._telling(model, engine):
                replicas = await self._made(model.found, model.number, (engine,))
                if model.replicas:
                    return model, replicas
                await self._join(model, replicas)
        return None

    async def _joined(self, model: _Model, replicas: Replicas, engine: int) -> None:
        async with self._one_at_a_time:
            # It may have been replaced or unloaded meanwhile.
            if self._models.get(model.found.name) is not model or engine in model.replicas:
                await self._forget(_keys_of(replicas))
                return
            with self._telling(model, engine):
                await self._join(model, replicas)

    async def _join(self, model: _Model, replicas: Replicas) -> None:
        model.replicas |= await self._hand_out(replicas, None)
        model.keys = _keys_of(model.replicas)
        self._set_state(model.found.name, model.found.version, "READY")

    @contextmanager
    def _telling(self, model: _Model, engine: int) -> Generator[None]:
        name = model.found.name
        try:
            yield
        except PenstockError as error:
            if not model.replicas:
                self._set_state(name, model.found.version, "LOADING", f"{RESTARTING}: {error}")
            if isinstance(error, EngineLost):
                raise
            log.error("engine %d does not serve %s, and tries again: %s", engine, name, error)

    async def load(self, name: str) -> None:
        """Serve the newest version of a model; the one before it answers until then.

        Raises:
            UnknownRoute: There is none of that name.
            InvalidInput: It cannot be loaded.
            Overloaded: No engine is there, or one was lost meanwhile.
        """
        assert self._directory is not None, "front-ends refuse this"
        async with self._one_at_a_time:
            found = find_model(self._directory, name)
            there = name in self._models
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
            model = self._models.pop(name, None)
            if model is None:
                raise UnknownRoute(f"There is no model {name!r} to unload.")
            self._set_state(name, model.found.version, "UNLOADING")
            await self._let_go(model.keys)
            self._set_state(name, model.found.version, "UNAVAILABLE", "unloaded")

    async def _take_in(self, found: Found) -> None:
        engines = self._engines.engines
        if not engines:
            raise EngineLost("the engine's process is being started again.")
        number = next(self._numbers)
        replicas = await self._made(found, number, engines)
        name = next(loaded.order.name for loaded, _ in replicas.values())
        if not found.name and name in self._models:
            await self._forget(_keys_of(replicas))
            raise ServeError(
                f"two bundles are of application {name!r}; put them into a model directory, where folders name them."
            )
        before = self._models.get(name)
        replicas = await self._hand_out(replicas, before)
        found = replace(found, name=name)
        self._models[name] = _Model(found, number, replicas, _keys_of(replicas))
        self._set_state(name, found.version, "READY")
        if before is not None and before.replicas:
            task = asyncio.get_running_loop().create_task(self._let_go(_keys_of(before.replicas)))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def _made(self, found: Found, number: int, engines: tuple[int, ...]) -> Replicas:
        """A model made ready in some engines; those that end meanwhile get it when they are back."""
        orders = [
            Order(key=next(self._keys), model=number, name=found.name, version=found.version, bundle=str(found.bundle))
            for _ in engines
        ]
        loads = (self._engines.load(order, engine) for order, engine in zip(orders, engines, strict=True))
        done = await asyncio.gather(*loads, return_exceptions=True)
        failures = [each for each in done if isinstance(each, BaseException)]
        # What is wrong with the model says more than that an engine ended.
        worst = min(failures, key=lambda error: isinstance(error, EngineLost), default=None)
        if worst is not None and (len(failures) == len(done) or not isinstance(worst, EngineLost)):
            await self._forget([order.key for order in orders])
            raise worst
        made = zip(engines, done, strict=True)
        return {engine: each for engine, each in made if not isinstance(each, BaseException)}

    async def _hand_out(self, replicas: Replicas, before: _Model | None) -> Replicas:
        """Let the front-ends take replicas in, all or none; gives those whose engines are still there."""
        self._coming = dict(replicas)
        try:
            for engine, replica in replicas.items():
                try:
                    await self._frontends.attach(*replica)
                except EngineLost:
                    self._coming.pop(engine, None)
            if not self._coming:
                raise EngineLost("the engine's process ended when it had loaded; its log says why.")
        except PenstockError:
            # Some front-ends may have taken it, and given its name to it.
            for replica in [] if before is None else list(before.replicas.values()):
                with suppress(EngineLost):
                    await self._frontends.attach(*replica)
            await self._let_go(_keys_of(replicas))
            raise
        return dict(self._coming)

    async def _let_go(self, keys: list[int]) -> None:
        await asyncio.gather(*(self._frontends.retire(key) for key in keys))
        await self._forget(keys)

    async def _forget(self, keys: list[int]) -> None:
        for key in keys:
            await self._engines.unload(key)

    def _set_state(self, name: str, version: str, state: str, reason: str = "") -> None:
        self._states[name] = ModelState(name=name, version=version, state=state, reason=reason)
        self._frontends.tell(self.states)


def _keys_of(replicas: Replicas) -> list[int]:
    return [loaded.order.key for loaded, _ in replicas.values()]
