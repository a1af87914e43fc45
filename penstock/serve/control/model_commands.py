"""Commands about models to the engines and front-ends of a supervisor, and the tables and chains that came of them."""

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

from penstock.core.errors import EngineLost, LoadGivenUp, ServeError
from penstock.serve import messages
from penstock.serve.control.child import ChildProcess
from penstock.serve.control.fork_generation import Preload
from penstock.serve.control.pending_commands import PendingCommands
from penstock.serve.messages import LoadModel, ModelLoaded
from penstock.serve.pinned_content import PinnedModels
from penstock.serve.repository.load_deadlines import LoadDeadlines
from penstock.serve.repository.replica_loads import DIED_AFTER_LOAD
from penstock.serve.repository.server_processes import TableMemory
from penstock.serve.table.chain_counts import shared_memory


@final
class ModelCommands:
    """The engines and front-ends in processes of their own, see `ServerProcesses`.

    Args:
        engines: The engines.
        frontends: The front-ends.
        pending: Sends commands, and has the replies.
        deadlines: Deadlines of the loads.
        pins: Copies of what is loaded; None where none is.
        is_started: Tells whether every model of the start is loaded.
        preload: Has the processes from which front-ends are forked import what a front-end imports to attach a table.
        on_loaded: Called with each load that an engine has made.
        on_given_up: Called with each load that took too long, and the reason.
    """

    def __init__(
        self,
        engines: Sequence[ChildProcess],
        frontends: Sequence[ChildProcess],
        pending: PendingCommands,
        deadlines: LoadDeadlines,
        *,
        pins: PinnedModels | None,
        is_started: Callable[[], bool],
        preload: Callable[[Preload], None],
        on_loaded: Callable[[LoadModel, ChildProcess], None],
        on_given_up: Callable[[LoadModel, str], None],
    ) -> None:
        self._engines = engines
        self._frontends = frontends
        self._pending = pending
        self._deadlines = deadlines
        self._pins = pins
        self._is_started = is_started
        self._preload = preload
        self._on_loaded = on_loaded
        self._on_given_up = on_given_up
        self._reports = itertools.count()
        # What engines load at this moment, by the key of the table.
        self._loading: dict[int, LoadModel] = {}
        # Tables of engines with the descriptors of their memory, by key.
        self._tables: dict[int, tuple[ModelLoaded, int]] = {}
        # Keys of the tables that front-ends attach, in the order of the commands: a name has the last of its tables.
        self._attached: dict[int, None] = {}
        # The chains, and the descriptors of their counts.
        self._chains: list[tuple[messages.LoadChain, int]] = []

    @property
    def engines(self) -> tuple[int, ...]:
        """The engines that run, see `ServerProcesses`."""
        # The first start waits for all engines; later, an engine that never becomes ready must not block a load.
        return tuple(child.index for child in self._engines if child.alive and (child.ready or child.starts == 1))

    def loading(self, key: int) -> LoadModel | None:
        """Return what an engine loads at this moment, by the key of its table; None if none does."""
        return self._loading.get(key)

    def table(self, key: int) -> ModelLoaded | None:
        """Return a table that an engine has, by its key; None if none does."""
        return self._tables[key][0] if key in self._tables else None

    def preloads(self) -> list[Preload]:
        """List what a front-end imports to attach all tables."""
        loaded = (loaded for key, (loaded, _) in self._tables.items() if key in self._attached)
        return list(dict.fromkeys(map(_preload_of, loaded)))

    async def load(self, command: LoadModel, engine: int) -> tuple[ModelLoaded, TableMemory]:
        """Load a model, see `ServerProcesses`."""
        child = self._engines[engine]
        if not child.alive:
            raise EngineLost(f"{messages.RESTARTING}.")
        starts = child.starts
        if engine == 0 and command.pinned and not self._is_started():
            # Beside the engine, or the start would take the time of both.
            for frontend in self._frontends:
                frontend.send(messages.ImportAhead(pinned=command.pinned))
        self._loading[command.key] = command
        try:
            reply = self._pending.send(child, command, command.key)
            loaded, descriptors = await self._deadlines.wait(command.key, reply)
        except LoadGivenUp as error:
            self._on_given_up(command, str(error))
            raise
        finally:
            del self._loading[command.key]
        self._on_loaded(command, child)
        assert isinstance(loaded, ModelLoaded), loaded
        if not child.alive or child.starts != starts:
            os.close(descriptors[0])
            raise EngineLost(DIED_AFTER_LOAD)
        self._tables[command.key] = loaded, descriptors[0]
        return loaded, descriptors[0]

    async def report_use(self, engine: int) -> messages.EngineUse:
        """Report the use of an engine, see `ServerProcesses`."""
        child = self._engines[engine]
        if not child.alive:
            raise EngineLost(f"{messages.RESTARTING}.")
        report = messages.ReportUse(key=next(self._reports))
        use, _ = await self._pending.send(child, report, report.key)
        assert isinstance(use, messages.EngineUse), use
        return use

    async def unload(self, key: int) -> None:
        """Unload a table, see `ServerProcesses`."""
        self._attached.pop(key, None)
        if key in self._tables:
            loaded, memory = self._tables.pop(key)
            self._engines[loaded.engine].send(messages.UnloadModel(key=key))
            os.close(memory)

    async def attach(self, loaded: ModelLoaded, memory: TableMemory) -> None:
        """Serve a table, see `ServerProcesses`."""
        assert isinstance(memory, int), memory
        key = loaded.command.key
        if key in self._tables:
            self._attached.pop(key, None)
            self._attached[key] = None
            self._preload(_preload_of(loaded))
            replies = [self._pending.send(child, loaded, key, (memory,)) for child in self._frontends if child.alive]
            await asyncio.gather(*replies)
        if key not in self._tables:
            raise EngineLost(DIED_AFTER_LOAD)

    async def retire(self, key: int) -> None:
        """Retire a table, see `ServerProcesses`."""
        self._attached.pop(key, None)
        retire = messages.RetireTable(key=key)
        await asyncio.gather(*(self._pending.send(child, retire, key) for child in self._frontends if child.alive))

    async def load_chain(self, reference: str) -> messages.ChainLoaded:
        """Serve a chain, see `ServerProcesses`."""
        pinned = "" if self._pins is None else str(await asyncio.to_thread(self._pins.pin_chain, reference))
        key, memory = len(self._chains), shared_memory(len(self._frontends))
        load = messages.LoadChain(key=key, reference=reference, again=False, pinned=pinned)
        self._chains.append((replace(load, again=True), memory))
        replies = await asyncio.gather(
            *(self._pending.send(child, load, key, (memory,)) for child in self._frontends if child.alive)
        )
        loaded = next((reply for reply, _ in replies if isinstance(reply, messages.ChainLoaded)), None)
        if loaded is None:
            raise ServeError("the front-ends ended while they loaded a chain; their log says why.")
        self._chains[key] = replace(load, again=True, name=loaded.name), memory
        return loaded

    def publish_state(self, state: messages.ModelState) -> None:
        """Publish the state of a model, see `ServerProcesses`."""
        for child in self._frontends:
            child.send(state)

    def attach_all(self, frontend: ChildProcess) -> None:
        """Send all tables and chains to a front-end that was restarted."""
        for key in self._attached:
            loaded, memory = self._tables[key]
            frontend.send(loaded, (memory,))
        for chain, memory in self._chains:
            frontend.send(chain, (memory,))

    def detach(self, key: int) -> None:
        """Attach a table in no front-end that is started from now on."""
        self._attached.pop(key, None)

    def drop_engine(self, engine: int) -> None:
        """Forget the tables of an engine that ended."""
        for key, (loaded, memory) in list(self._tables.items()):
            if loaded.engine == engine:
                os.close(memory)
                del self._tables[key]
                self._attached.pop(key, None)


def _preload_of(loaded: ModelLoaded) -> Preload:
    return Preload(application=loaded.application, pinned=loaded.command.pinned)
