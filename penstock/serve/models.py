"""What a server has to say of its models to those who ask by name."""

from collections.abc import Callable
from typing import NoReturn, Protocol, final

from penstock.core.errors import InvalidInput, UnknownRoute
from penstock.serve.served import Served


class Models(Protocol):
    """What the server has to say of its models."""

    @property
    def draining(self) -> bool:
        """Whether the server is going down."""
        ...

    def named(self, name: str, version: str) -> Served:
        """The model of that name and version; the server chooses where the version is empty.

        Raises:
            UnknownRoute: There is none.
        """
        ...

    def index(self) -> list[tuple[str, str, str, str]]:
        """Name, version, state (`READY`, `LOADING`, `UNLOADING`, `UNAVAILABLE`) and its reason, of each model."""
        ...

    async def load(self, name: str) -> None:
        """Load a model, or load it anew.

        Raises:
            RequestError: It cannot be loaded.
        """
        ...

    async def unload(self, name: str) -> None:
        """Unload a model.

        Raises:
            RequestError: It cannot be unloaded.
        """
        ...


@final
class FixedModels:
    """The models that were there at the start, each in version 1, until the server ends.

    Args:
        applications: By name.
        draining: Says whether the server is going down.
    """

    def __init__(self, applications: dict[str, Served], draining: Callable[[], bool]) -> None:
        self._applications = applications
        self._draining = draining

    @property
    def draining(self) -> bool:
        """Whether the server is going down."""
        return self._draining()

    def named(self, name: str, version: str) -> Served:
        """The model of that name.

        Raises:
            UnknownRoute: There is none, or not in that version.
        """
        served = self._applications.get(name)
        if served is None:
            raise UnknownRoute(f"There is no model {name!r} here; there is {', '.join(map(repr, self._applications))}.")
        if version not in ("", "1"):
            raise UnknownRoute(f"Model {name!r} has version 1 alone.")
        return served

    def index(self) -> list[tuple[str, str, str, str]]:
        """Name, version, state and its reason, of each model."""
        return [(name, "1", "READY", "") for name in self._applications]

    async def load(self, name: str) -> NoReturn:
        """Refuse.

        Raises:
            InvalidInput: Always.
        """
        raise InvalidInput(f"{name!r} cannot be loaded: this server's models are those it was started with.")

    async def unload(self, name: str) -> NoReturn:
        """Refuse.

        Raises:
            InvalidInput: Always.
        """
        raise InvalidInput(f"{name!r} cannot be unloaded: this server's models are those it was started with.")
