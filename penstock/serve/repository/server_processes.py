"""The engines and front-ends, as the repository of models uses them."""

from typing import Protocol

from penstock.serve.messages import ChainLoaded, EngineUse, LoadModel, ModelLoaded, ModelState
from penstock.serve.table.slots import SlotTable

# A private table, or the descriptor of a shared one.
TableMemory = SlotTable | int


class ServerProcesses(Protocol):
    """The engines, and all front-ends together, as the repository uses them."""

    @property
    def engines(self) -> tuple[int, ...]:
        """Indices of the engines that run, or start for the first time."""
        ...

    async def load(self, command: LoadModel, engine: int) -> tuple[ModelLoaded, TableMemory]:
        """Load a model into one engine.

        Raises:
            EngineLost: The engine's process ended meanwhile.
            PenstockError: The model cannot be loaded.
        """
        ...

    async def report_use(self, engine: int) -> EngineUse:
        """Report the use of an engine's tables and memory.

        Raises:
            EngineLost: The engine's process ended.
        """
        ...

    async def unload(self, key: int) -> None:
        """Unload a table from its engine."""

    async def attach(self, loaded: ModelLoaded, memory: TableMemory) -> None:
        """Serve a table under its model's name; returns when all front-ends do.

        Raises:
            PenstockError: One front-end cannot serve it.
        """

    async def load_chain(self, reference: str) -> ChainLoaded:
        """Serve a chain of the models; returns when all front-ends do.

        Raises:
            PenstockError: One front-end cannot serve it.
        """
        ...

    async def retire(self, key: int) -> None:
        """Submit nothing more to a table; returns when no request waits for it any more."""

    def publish_state(self, state: ModelState) -> None:
        """Publish the state of a model."""
