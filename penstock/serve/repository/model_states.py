"""States of a repository's models and chains, published as they change."""

from collections.abc import Callable
from typing import final

from penstock.core.errors import encodable
from penstock.serve.messages import WITHDRAWN, ModelState


@final
class ModelStates:
    """The state of every version of a model that was requested or lies in the model directory, and of every chain.

    Args:
        publish: Publishes a state to the front-ends.
    """

    def __init__(self, publish: Callable[[ModelState], None]) -> None:
        self._publish = publish
        # By name and version.
        self._states: dict[tuple[str, str], ModelState] = {}
        # By name: the parts of each chain.
        self._chains: dict[str, tuple[str, ...]] = {}

    @property
    def all(self) -> tuple[ModelState, ...]:
        """The states."""
        return tuple(self._states.values())

    @property
    def chains(self) -> list[str]:
        """Names of the chains."""
        return list(self._chains)

    def set(
        self,
        key: tuple[str, str],
        state: str,
        reason: str = "",
        *,
        since_ns: int = 0,
        on_demand_ns: int | None = None,
    ) -> None:
        """Set the state of a version, and so of the chains that it is a part of.

        Args:
            key: Name and version.
            state: See `ModelState`.
            reason: See `ModelState`.
            since_ns: See `ModelState`.
            on_demand_ns: See `ModelState`.
        """
        name, version = key
        self._put(
            ModelState(
                name=name,
                version=version,
                state=state,
                # It may quote what an application raised.
                reason=encodable(reason),
                since_ns=since_ns,
                on_demand_ns=on_demand_ns,
            )
        )
        for chain, parts in self._chains.items():
            if name in parts:
                self._set_chain(chain)

    def withdraw(self, key: tuple[str, str]) -> None:
        """Withdraw the state of a name and version that is no more."""
        if self._states.pop(key, None) is not None:
            name, version = key
            self._publish(ModelState(name=name, version=version, state=WITHDRAWN))

    def add_chain(self, name: str, parts: tuple[str, ...]) -> None:
        """Give a chain the state of its first part that is not ready."""
        self._chains[name] = parts
        self._set_chain(name)

    def versions(self, name: str) -> list[tuple[str, str]]:
        """List the name and version of each state that a model has."""
        return [key for key in self._states if key[0] == name]

    def on_demand(self, name: str, now_ns: int) -> list[tuple[str, str]]:
        """List the name and version of each state of a model that a request now loads."""
        return [
            key
            for key in self.versions(name)
            if (from_ns := self._states[key].on_demand_ns) is not None and from_ns <= now_ns
        ]

    def not_ready(self, name: str) -> list[tuple[str, str]]:
        """List the name and version of each state of a model that is not served."""
        return [key for key in self.versions(name) if self._states[key].state != "READY"]

    def loading(self, name: str) -> list[tuple[str, str]]:
        """List the name and version of each state of a model that is being loaded."""
        return [key for key in self.versions(name) if self._states[key].state == "LOADING"]

    def _set_chain(self, name: str) -> None:
        states = [self._states[max(keys, key=_number)] for part in self._chains[name] if (keys := self.versions(part))]
        worst = next((state for state in states if state.state != "READY"), None)
        state, reason = "READY", ""
        if worst is not None:
            # An unloaded part may come back.
            state = "UNAVAILABLE" if worst.state == "UNLOADING" else worst.state
            reason = f"{worst.reason} (part {worst.name!r})".strip()
        self._put(ModelState(name=name, version="1", state=state, reason=reason))

    def _put(self, state: ModelState) -> None:
        self._states[state.name, state.version] = state
        self._publish(state)


def _number(key: tuple[str, str]) -> int:
    return int(key[1])
