"""The models of a front-end by name and version."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, final

from penstock.core.application import MAX_NAME
from penstock.core.errors import Forbidden, Overloaded, UnknownRoute
from penstock.serve.background import BackgroundTasks
from penstock.serve.messages import ON_DEMAND, RESTARTING, WITHDRAWN, ModelState
from penstock.serve.registry.served_chain import Served, ServedChain
from penstock.serve.registry.served_model import ServedModel

# `change(name, unload)` of the repository: serve a model as it lies on disk now, or stop serving it. It raises
# `RequestError` if there is none of that name, or it cannot be loaded.
Change = Callable[[str, bool], Coroutine[Any, Any, None]]
# `demand(name)` of the repository: load a model that is loaded on first use.
Demand = Callable[[str], None]

# Longest body that is read for a model that is not loaded, whose own limit is not known: the default of applications.
UNKNOWN_BODY_BYTES = 1 << 23
# Retry time while a model is loaded, in seconds.
RETRY_S = 3.0


@final
class ModelRegistry:
    """Served models by name and version.

    Args:
        change: Loads and unloads models.
        loading: Whether models may be loaded and unloaded by request.
        demand: Loads models on first use.

    Attributes:
        epoch: Changes whenever the model behind a name may have changed.
        states: State of every model by name and version, as last reported by the repository.
        starting: Whether the models of the start are still being loaded.
        leaving: Whether the server is about to shut down: it is not ready, and answers as before.
        draining: Whether the server is shutting down.
    """

    def __init__(self, change: Change, *, loading: bool, demand: Demand | None = None) -> None:
        self._change = change
        self._demand = demand
        self._loading = loading
        self.epoch = 0
        self.states: dict[tuple[str, str], ModelState] = {}
        # Why this front-end, which replaces another one, cannot serve a model, by name and version.
        self._not_attached: dict[tuple[str, str], str] = {}
        self.starting = False
        self.leaving = False
        self.draining = False
        # By name, then by version.
        self._served: dict[str, dict[str, Served]] = {}
        self._changes = BackgroundTasks()

    def __iter__(self) -> Iterator[Served]:
        return iter([served for versions in self._served.values() for served in versions.values()])

    @property
    def max_body_bytes(self) -> int:
        """Largest body that any model takes."""
        unloaded = any(state.on_demand_ns is not None for state in self.states.values())
        known = max((served.application.max_body_bytes for served in self), default=0)
        return max(known, UNKNOWN_BODY_BYTES) if unloaded else known

    @property
    def incomplete(self) -> bool:
        """True while models that are not served yet are loaded, or would be on first use."""
        return self.starting or any(
            state.state == "LOADING" or state.on_demand_ns is not None for state in self.states.values()
        )

    def put(self, served: Served) -> None:
        """Serve a model under its name and version, instead of the one that had them before."""
        self._served.setdefault(served.name, {})[served.version] = served
        self._not_attached.pop((served.name, served.version), None)
        self.epoch += 1

    def set_state(self, state: ModelState) -> None:
        """Set the state of one of the repository's models."""
        if state.state not in ("READY", "LOADING"):
            self._not_attached.pop((state.name, state.version), None)
        if state.state == WITHDRAWN:
            self.states.pop((state.name, state.version), None)
        else:
            self.states[state.name, state.version] = state
        self.epoch += 1

    def set_not_attached(self, name: str, version: str, reason: str) -> None:
        """Refuse requests for a model that others serve, until it is attached or unloaded, whatever its state."""
        self._not_attached[name, version] = reason
        self.epoch += 1

    @property
    def refuses_some(self) -> bool:
        """True if this front-end alone cannot serve a model."""
        return bool(self._not_attached)

    @property
    def states_here(self) -> list[ModelState]:
        """State of every model, unavailable where this front-end alone cannot serve it."""
        return [
            state
            if (reason := self._not_attached.get(key)) is None
            else replace(state, state="UNAVAILABLE", reason=reason)
            for key, state in self.states.items()
        ]

    def take_out(self, served: Served) -> None:
        """Remove a model, unless another one has its name and version already."""
        versions = self._served.get(served.name, {})
        if versions.get(served.version) is served:
            del versions[served.version]
            if not versions:
                del self._served[served.name]
        self.epoch += 1

    @property
    def ends(self) -> bool:
        """True if the server is shutting down, or about to."""
        return self.leaving or self.draining

    @property
    def newest(self) -> list[Served]:
        """The newest version of each model, which requests without a version get."""
        return [_newest(versions) for versions in self._served.values()]

    def versions(self, name: str) -> list[str]:
        """List the served versions of a model, the oldest first."""
        return sorted(self._served.get(name, ()), key=int)

    @property
    def served_models(self) -> list[ServedModel]:
        """The models without the chains."""
        return [served for served in self if isinstance(served, ServedModel)]

    def has_model(self, name: str) -> bool:
        """True if a model of this name is served, which is no chain."""
        return name in self._served and isinstance(_newest(self._served[name]), ServedModel)

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

    def named(self, name: str, version: str = "", *, first_use: bool = True) -> Served:
        """Find a model or chain by name, in its newest version if none is given.

        Args:
            name: Its name.
            version: Its version.
            first_use: Whether a model that is loaded on first use is loaded now.

        Raises:
            UnknownRoute: There is none.
            Overloaded: It is being loaded.
        """
        versions = self._served.get(name, {})
        states = [state for (other, _), state in self.states.items() if other == name]
        if version not in ("", *versions) or not versions:
            for state in states:
                if state.state == "LOADING" and version in ("", state.version):
                    raise Overloaded(f"Model {name!r} is being loaded{_step_of(state)}; come back later.", RETRY_S)
                if (name, state.version) in self._not_attached and version in ("", state.version):
                    reason = self._not_attached[name, state.version]
                    raise Overloaded(f"Model {name!r} is unavailable: {reason}", RETRY_S)
                if state.on_demand_ns is not None and version in ("", state.version):
                    raise self._demanded(state, state.on_demand_ns, first_use)
        if not versions:
            if self.starting and not states:
                # It may be a chain, whose name is known when it is loaded.
                raise self._not_started()
            there = ", ".join(map(repr, self._served)) or "none"
            raise UnknownRoute(f"There is no model {name[:MAX_NAME]!r} here; there is {there}.")
        if not version:
            return _newest(versions)
        if version not in versions:
            there = ", ".join(self.versions(name))
            alone = " alone" if len(versions) == 1 else ""
            raise UnknownRoute(f"Model {name!r} is served in version {there}{alone}, not {version[:MAX_NAME]}.")
        return versions[version]

    def _demanded(self, state: ModelState, on_demand_ns: int, first_use: bool) -> Overloaded:
        """Have a model loaded; returns the error for the request meanwhile."""
        wait_s = (on_demand_ns - time.monotonic_ns()) / 1e9
        if wait_s > 0:
            return Overloaded(
                f"Model {state.name!r} is {state.reason} A request in {wait_s:.0f} s tries again.", wait_s
            )
        if not first_use or self._demand is None or self.draining:
            return Overloaded(f"Model {state.name!r} is not loaded; it is {ON_DEMAND}.", RETRY_S)
        self._demand(state.name)
        return Overloaded(f"Model {state.name!r} is being loaded, as this is its first use; come back later.", RETRY_S)

    def reject_unready(self) -> None:
        """Reject requests while the server is not ready.

        Raises:
            Overloaded: It is starting or shutting down, or an engine is being started again.
        """
        if self.ends:
            raise Overloaded("The server is shutting down; retry elsewhere.", 5.0)
        if self.starting:
            raise self._not_started()
        for (name, _), reason in self._not_attached.items():
            raise Overloaded(f"Model {name!r} is unavailable: {reason}", RETRY_S)
        lost = {served.name for served in self if served.engine_lost}
        # A front-end that started after the engine died never had the table. A load that was refused meanwhile has left
        # the same reason, for a model that nothing serves.
        lost |= {
            state.name
            for state in self.states.values()
            if state.state == "LOADING" and state.reason.startswith(RESTARTING)
        }
        if lost:
            raise Overloaded(f"The engine of {', '.join(sorted(lost))} is being started again.", 3.0)

    def _not_started(self) -> Overloaded:
        several = {name for name, count in Counter(name for name, _ in self.states).items() if count > 1}
        loading = [
            f"{state.name}{f' version {state.version}' if state.name in several else ''}{_step_of(state)}"
            for state in self.states.values()
            if state.state == "LOADING"
        ]
        return Overloaded(f"The server is starting and loads {', '.join(loading) or 'its models'}.", 3.0)

    def index(self) -> list[dict[str, str]]:
        """Name, version, state and reason of every model of the repository."""
        return [
            {"name": each.name, "version": each.version, "state": each.state, "reason": each.reason}
            for each in self.states_here
        ]

    async def change(self, name: str, *, unload: bool) -> None:
        """Load or unload a model, see `Change`; a client that gives up does not stop it half-way.

        Raises:
            UnknownRoute: No model has a name of that length.
        """
        self.reject_change()
        if len(name) > MAX_NAME:
            raise UnknownRoute(f"A name of {len(name):,} characters came, and those of models have at most {MAX_NAME}.")
        await asyncio.shield(self._changes.start(self._change(name, unload)))

    def reject_change(self) -> None:
        """Reject loading and unloading where that is not allowed, or would wait for all models of the start.

        Raises:
            Forbidden: The server has no model directory.
            Overloaded: The server is starting.
        """
        if not self._loading:
            raise Forbidden("This server was started with its models named; start it with --models to load more.")
        if self.starting:
            raise self._not_started()


def _newest(versions: dict[str, Served]) -> Served:
    return versions[max(versions, key=int)]


def _step_of(state: ModelState) -> str:
    """Describe the present step of loading a model, as ` (exporting the network, for 12 s)`."""
    if not state.reason:
        return ""
    passed_s = (time.monotonic_ns() - state.since_ns) / 1e9
    return f" ({state.reason}{f', for {passed_s:.0f} s' if state.since_ns else ''})"
