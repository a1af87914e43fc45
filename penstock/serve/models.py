"""The models of a server, as one front-end sees them."""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, final

from penstock.core.errors import Forbidden, Overloaded, UnknownRoute
from penstock.serve.served import Served

# Why a model is not ready that was ready before its engine died.
RESTARTING = "the engine is being started again"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelState:
    """A model of the repository.

    Args:
        name: What requests call it.
        version: The one that is served, or that failed.
        state: `READY`, `LOADING`, `UNLOADING` or `UNAVAILABLE`, as the Open Inference Protocol has it.
        reason: Why it is not ready.
    """

    name: str
    version: str
    state: str
    reason: str = ""


class Repository(Protocol):
    """Loads and unloads models, for all front-ends of the server."""

    async def load(self, name: str) -> None:
        """Serve the newest version of a model; the one before it answers until then.

        Raises:
            RequestError: There is none of that name, or it cannot be loaded.
        """

    async def unload(self, name: str) -> None:
        """Serve a model no more.

        Raises:
            RequestError: There is none of that name.
        """


@final
class Models:
    """By name, what answers.

    Args:
        repository: Loads and unloads.
        loading: Whether models may be loaded and unloaded by request.

    Attributes:
        epoch: Another number whenever what answers to some name may be another.
        states: Of every model, as the repository last said.
        draining: Whether the server is going down.
    """

    def __init__(self, repository: Repository, *, loading: bool) -> None:
        self._repository = repository
        self._loading = loading
        self.epoch = 0
        self.states: tuple[ModelState, ...] = ()
        self.draining = False
        self._served: dict[str, Served] = {}
        self._changes: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Served]:
        return iter(list(self._served.values()))

    def put(self, served: Served) -> Served | None:
        """Let a model answer to its name from now on; gives the one that did before."""
        before = self._served.get(served.name)
        self._served[served.name] = served
        self.epoch += 1
        return before

    def tell(self, states: tuple[ModelState, ...]) -> None:
        """What the repository holds now."""
        self.states = states
        self.epoch += 1

    def take_out(self, served: Served) -> None:
        """Let a model answer no more, unless another one already answers to its name."""
        if self._served.get(served.name) is served:
            del self._served[served.name]
        self.epoch += 1

    def named(self, name: str, version: str = "") -> Served:
        """The model of a name, and of a version where one is asked for.

        Raises:
            UnknownRoute: There is none.
        """
        served = self._served.get(name)
        if served is None:
            if any(state.name == name and state.state == "LOADING" for state in self.states):
                raise Overloaded(f"Model {name!r} is being loaded; come back later.", 3.0)
            there = ", ".join(map(repr, self._served)) or "none"
            raise UnknownRoute(f"There is no model {name!r} here; there is {there}.")
        if version not in ("", served.version):
            raise UnknownRoute(f"Model {name!r} is served in version {served.version} alone, not {version}.")
        return served

    def refuse_unready(self) -> None:
        """Say why the server should not be asked now.

        Raises:
            Overloaded: It is going down, or an engine is being started again.
        """
        if self.draining:
            raise Overloaded("The server is going down; ask another one.", 5.0)
        lost = {served.name for served in self if served.engine_lost}
        # A front-end that was started after the engine had died never had the table.
        lost |= {state.name for state in self.states if state.reason.startswith(RESTARTING)}
        if lost:
            raise Overloaded(f"The engine of {', '.join(sorted(lost))} is being started again.", 3.0)

    def index(self) -> list[tuple[str, str, str, str]]:
        """Name, version, state and reason of every model of the repository."""
        return [(state.name, state.version, state.state, state.reason) for state in self.states]

    async def load(self, name: str) -> None:
        """Serve the newest version of a model, see `Repository.load`."""
        self.refuse_change()
        await self._whole(self._repository.load(name))

    async def unload(self, name: str) -> None:
        """Serve a model no more, see `Repository.unload`."""
        self.refuse_change()
        await self._whole(self._repository.unload(name))

    async def _whole(self, change: Coroutine[Any, Any, None]) -> None:
        # A client that gives up does not stop a change half-way.
        task = asyncio.get_running_loop().create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    def refuse_change(self) -> None:
        """Say that nothing can be loaded or unloaded, where that is so.

        Raises:
            Forbidden: The server has no model directory.
        """
        if not self._loading:
            raise Forbidden("This server was started with its models named; start it with --models to load more.")
