"""The models of a front-end by name."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict
from typing import Any, final

from penstock.core.errors import Forbidden, Overloaded, UnknownRoute
from penstock.serve.background import BackgroundTasks
from penstock.serve.messages import RESTARTING, ModelState
from penstock.serve.registry.served_chain import Served, ServedChain
from penstock.serve.registry.served_model import ServedModel

# `change(name, unload)` of the repository: serve the newest version of a model, or stop serving it. It raises
# `RequestError` if there is none of that name, or it cannot be loaded.
Change = Callable[[str, bool], Coroutine[Any, Any, None]]


@final
class ModelRegistry:
    """Served models by name.

    Args:
        change: Loads and unloads models.
        loading: Whether models may be loaded and unloaded by request.

    Attributes:
        epoch: Changes whenever the model behind a name may have changed.
        states: State of every model by its name, as last reported by the repository.
        draining: Whether the server is shutting down.
    """

    def __init__(self, change: Change, *, loading: bool) -> None:
        self._change = change
        self._loading = loading
        self.epoch = 0
        self.states: dict[str, ModelState] = {}
        self.draining = False
        self._served: dict[str, Served] = {}
        self._changes = BackgroundTasks()

    def __iter__(self) -> Iterator[Served]:
        return iter(list(self._served.values()))

    @property
    def max_body_bytes(self) -> int:
        """Largest body that any model takes."""
        return max((served.application.max_body_bytes for served in self), default=0)

    def put(self, served: Served) -> None:
        """Serve a model under its name, instead of the model that had the name before."""
        self._served[served.name] = served
        self.epoch += 1

    def set_state(self, state: ModelState) -> None:
        """Set the state of one of the repository's models."""
        self.states[state.name] = state
        self.epoch += 1

    def take_out(self, served: Served) -> None:
        """Remove a model, unless another one has its name already."""
        if self._served.get(served.name) is served:
            del self._served[served.name]
        self.epoch += 1

    @property
    def served_models(self) -> list[ServedModel]:
        """The models without the chains."""
        return [served for served in self if isinstance(served, ServedModel)]

    def has_model(self, name: str) -> bool:
        """True if a model of this name is served, which is no chain."""
        return isinstance(self._served.get(name), ServedModel)

    def model(self, name: str) -> ServedModel:
        """Find a part of a chain by name.

        Raises:
            UnknownRoute: There is none.
            Overloaded: It is being loaded.
        """
        served = self.named(name)
        if isinstance(served, ServedChain):
            raise UnknownRoute(f"{name!r} is a chain, which is no part of another one.")
        return served

    def named(self, name: str, version: str = "") -> Served:
        """Find a model or chain by name, and by version if one is given.

        Raises:
            UnknownRoute: There is none.
            Overloaded: It is being loaded.
        """
        served = self._served.get(name)
        if served is None:
            if name in self.states and self.states[name].state == "LOADING":
                raise Overloaded(f"Model {name!r} is being loaded; come back later.", 3.0)
            there = ", ".join(map(repr, self._served)) or "none"
            raise UnknownRoute(f"There is no model {name!r} here; there is {there}.")
        if version not in ("", served.version):
            raise UnknownRoute(f"Model {name!r} is served in version {served.version} alone, not {version}.")
        return served

    def reject_unready(self) -> None:
        """Reject requests while the server is not ready.

        Raises:
            Overloaded: It is shutting down, or an engine is being started again.
        """
        if self.draining:
            raise Overloaded("The server is shutting down; retry elsewhere.", 5.0)
        lost = {served.name for served in self if served.engine_lost}
        # A front-end that started after the engine died never had the table.
        lost |= {state.name for state in self.states.values() if state.reason.startswith(RESTARTING)}
        if lost:
            raise Overloaded(f"The engine of {', '.join(sorted(lost))} is being started again.", 3.0)

    def index(self) -> list[dict[str, str]]:
        """Name, version, state and reason of every model of the repository."""
        return [asdict(state) for state in self.states.values()]

    async def change(self, name: str, *, unload: bool) -> None:
        """Load or unload a model, see `Change`; a client that gives up does not stop it half-way."""
        self.reject_change()
        await asyncio.shield(self._changes.start(self._change(name, unload)))

    def reject_change(self) -> None:
        """Reject loading and unloading where that is not allowed.

        Raises:
            Forbidden: The server has no model directory.
        """
        if not self._loading:
            raise Forbidden("This server was started with its models named; start it with --models to load more.")
