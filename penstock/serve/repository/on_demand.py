"""Models that are loaded on first use: which one makes room for another, and when one that failed is tried again."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

from penstock.core.errors import Overloaded, PenstockError, ServeError
from penstock.core.wording.counted import counted
from penstock.serve.background import BackgroundTasks
from penstock.serve.messages import ON_DEMAND, EngineUse
from penstock.serve.repository.bundle_preparation import SourcesByBundle
from penstock.serve.repository.model_states import ModelStates
from penstock.serve.settings import ModelSettings

log = logging.getLogger(__name__)

# A model that was just loaded is kept for so long without a request: clients come back after their retry time.
UNUSED_S = 10.0
# Pauses between attempts to load a model that failed; they double from the first to the last.
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelUse:
    """Use of a loaded model.

    Args:
        name: Its name.
        loaded_ns: Monotonic time at which it was loaded.
        used_ns: Monotonic time of its last batch; 0 if it ran none.
        busy: Whether requests wait for it, or live streams are open.
    """

    name: str
    loaded_ns: int
    used_ns: int
    busy: bool

    @classmethod
    def of(cls, name: str, loaded_ns: int, tables: Iterable[int], engines: Iterable[EngineUse]) -> "ModelUse":
        """Sum the reports of all engines up.

        Args:
            name: Name of the model.
            loaded_ns: Monotonic time at which it was loaded.
            tables: Keys of its tables.
            engines: Reports of the engines.
        """
        mine = set(tables)
        found = [
            (used_ns, busy)
            for engine in engines
            for key, used_ns, busy in zip(engine.tables, engine.used_ns, engine.busy, strict=True)
            if key in mine
        ]
        used_ns = max((used_ns for used_ns, _ in found), default=0)
        return cls(name=name, loaded_ns=loaded_ns, used_ns=used_ns, busy=any(busy for _, busy in found))


def least_recently_used(models: Iterable[ModelUse], now_ns: int) -> str | None:
    """Choose the model to unload: without requests or live streams, and used longest ago.

    A model that is not used yet stays for `UNUSED_S`, so that models do not replace one another before any of them has
    given an answer.

    Args:
        models: Loaded models that may be unloaded.
        now_ns: Monotonic time.

    Returns:
        Its name; None if all must stay.
    """
    free = [
        model
        for model in models
        if not model.busy and (model.used_ns or now_ns - model.loaded_ns > int(UNUSED_S * 1e9))
    ]
    return min(free, key=lambda model: max(model.used_ns, model.loaded_ns)).name if free else None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A loaded model that may be unloaded to make room.

    Args:
        loaded_ns: Monotonic time at which it was loaded.
        tables: Keys of its tables.
        memory_bytes: Growth of an engine's memory when it was loaded, the largest of all engines.
    """

    loaded_ns: int
    tables: tuple[int, ...]
    memory_bytes: int


@final
@dataclass(kw_only=True, eq=False)
class OnDemand:
    """Loads models when requests come for them, one at a time, and unloads others to make room.

    Args:
        models: The limits.
        states: States of the models.
        change_lock: Held during each change of the models.
        load_found: Loads a model as it lies on disk, with what `trial` returned; the lock is held.
        trial: Tries a model and exports its network, so that `load_found` need not; the lock is not held.
        unload: Unloads a model, which a request loads again; the lock is held.
        loaded: Returns the models that may be unloaded, by name.
        disk_bytes: Returns the size of a model's files.
        use: Reports the use of all engines.
    """

    models: ModelSettings
    states: ModelStates
    change_lock: asyncio.Lock
    load_found: Callable[[str, SourcesByBundle], Awaitable[None]]
    trial: Callable[[str], Awaitable[SourcesByBundle]]
    unload: Callable[[str], Awaitable[None]]
    loaded: Callable[[], Mapping[str, Loaded]]
    disk_bytes: Callable[[str], Awaitable[int]]
    use: Callable[[], Awaitable[list[EngineUse]]]
    # Models that wait to be loaded, or are being loaded.
    _demanded: set[str] = field(default_factory=set[str], init=False)
    # Pause after the next failure of a model that failed before.
    _pauses_s: dict[str, float] = field(default_factory=dict[str, float], init=False)
    # Smallest growth of the memory when a model was loaded: the first load of a process has its libraries too.
    _grown_bytes: dict[str, int] = field(default_factory=dict[str, int], init=False)
    _tasks: BackgroundTasks = field(default_factory=BackgroundTasks, init=False)

    def offer(self, key: tuple[str, str]) -> None:
        """Let requests load a version of a model, unless one has done so already."""
        if key[0] not in self._demanded:
            self.states.set(key, "UNAVAILABLE", ON_DEMAND, on_demand_ns=0)

    def refuse(self, name: str, error: Exception) -> None:
        """Report a folder in which no model is found; a request after a pause tries again."""
        log.warning("%s is not offered: %s", name, error)
        self.states.set((name, "1"), "UNAVAILABLE", str(error))
        self._postpone(name, error)

    def demand(self, name: str) -> None:
        """Load a model for a request, unless that is under way or was tried just now."""
        keys = self.states.on_demand(name, time.monotonic_ns())
        if name in self._demanded or not keys:
            return
        self._demanded.add(name)
        for key in keys:
            self.states.set(key, "LOADING", "waiting for its turn", since_ns=time.monotonic_ns())
        self._tasks.start(self._load_demanded(name))

    async def _load_demanded(self, name: str) -> None:
        try:
            compared = await self.trial(name)
            async with self.change_lock:
                # A request to load it may have come first.
                if name not in self.loaded():
                    await self.load(name, compared)
        except Overloaded as error:
            # The engine or other models, which are no fault of this one.
            log.info("%s is not loaded yet: %s", name, error)
        except (PenstockError, OSError) as error:
            log.warning("%s is not loaded: %s", name, error)
        except Exception as error:
            # A request after a pause tries again, whatever is wrong here.
            log.exception("%s is not loaded", name)
            self._postpone(name, error)
        finally:
            self._demanded.discard(name)

    async def load(self, name: str, compared: SourcesByBundle) -> None:
        """Load a model, after others were unloaded where there is no room; the lock is held.

        Args:
            name: Its name.
            compared: What `trial` returned.

        Raises:
            RequestError: It cannot be loaded; a request after a pause tries again.
        """
        try:
            if name not in self.loaded():
                await self._make_room(name)
            await self.load_found(name, compared)
        except (PenstockError, OSError) as error:
            self._postpone(name, error)
            raise
        self._pauses_s.pop(name, None)
        if name in (loaded := self.loaded()):
            grown = loaded[name].memory_bytes
            self._grown_bytes[name] = min(grown, self._grown_bytes.get(name, grown))
        await self._shrink(name)

    async def _make_room(self, name: str) -> None:
        """Unload models until there is room for another one.

        Raises:
            Overloaded: All others are in use.
            ServeError: There is no room even without any other.
        """
        needed_bytes = 0
        if self.models.memory_fraction is not None:
            needed_bytes = max(await self.disk_bytes(name), self._grown_bytes.get(name, 0))
        while True:
            engines = await self.use()
            limit = self._count_reached() or self._memory_reached(engines, needed_bytes)
            if not limit:
                return
            if not self.loaded():
                raise ServeError(f"{limit}, without any other model; raise the limit.")
            if not await self._unload_one(name, engines):
                raise Overloaded(f"{limit}, and each has requests or live streams, or was just loaded.", MIN_PAUSE_S)

    async def _shrink(self, name: str) -> None:
        """Unload others where a model took more memory than its files led to expect."""
        while self.models.memory_fraction is not None:
            engines = await self.use()
            limit = self._memory_reached(engines, 0)
            if not limit:
                return
            if not await self._unload_one(name, engines):
                log.warning("with %s, %s, and no other model can be unloaded now", name, limit)
                return

    async def _unload_one(self, name: str, engines: list[EngineUse]) -> bool:
        """Unload the least recently used model for another one; returns whether one could be."""
        others = {other: each for other, each in self.loaded().items() if other != name}
        uses = [ModelUse.of(other, each.loaded_ns, each.tables, engines) for other, each in others.items()]
        unused = least_recently_used(uses, time.monotonic_ns())
        if unused is None:
            return False
        log.info("%s is unloaded, to make room for %s", unused, name)
        await self.unload(unused)
        return True

    def _count_reached(self) -> str:
        """Say how many models are loaded if that is as many as may be; empty otherwise."""
        count = len(self.loaded()) + len(self.models.bundles)
        if self.models.max_models is None or count < self.models.max_models:
            return ""
        return f"{counted(count, 'model is', 'models are')} loaded, as many as --max-models allows"

    def _memory_reached(self, engines: list[EngineUse], needed_bytes: int) -> str:
        """Say how much memory is in use if so much more would exceed the limit; empty otherwise."""
        if self.models.memory_fraction is None:
            return ""
        for each in engines:
            allowed_bytes = int(self.models.memory_fraction * each.total_bytes)
            if each.used_bytes + needed_bytes > allowed_bytes:
                needed = f", and {needed_bytes / 1e6:,.0f} MB more are needed" if needed_bytes else ""
                return (
                    f"{each.used_bytes / 1e6:,.0f} MB are in use of the {allowed_bytes / 1e6:,.0f} MB that "
                    f"--memory-fraction allows{needed}"
                )
        return ""

    def _postpone(self, name: str, error: Exception) -> None:
        """Let a request try again after a pause."""
        if isinstance(error, Overloaded):
            pause_s = error.retry_after_s
        else:
            pause_s = self._pauses_s.get(name, MIN_PAUSE_S)
            self._pauses_s[name] = min(2 * pause_s, MAX_PAUSE_S)
        reason = str(error).removeprefix(f"Model {name!r} cannot be loaded: ")
        for key in self.states.not_ready(name):
            self.states.set(
                key,
                "UNAVAILABLE",
                f"{ON_DEMAND}; the last load failed: {reason}",
                on_demand_ns=time.monotonic_ns() + int(pause_s * 1e9),
            )
