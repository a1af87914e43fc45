"""One process that serves: engine and front-end share an event loop, and tables are in private memory."""

import asyncio
import socket
import time
from typing import final

from penstock.serve.batch_loop import BatchLoop
from penstock.serve.control.bundle_trials import BundleTrials
from penstock.serve.control.freed_memory import keep_freed_memory
from penstock.serve.control.front_end import FrontEnd
from penstock.serve.control.lifecycle import announce, end_at_once, on_stop_signal, wait_to_leave
from penstock.serve.engine.model_loader import ModelLoader
from penstock.serve.exchange.reserved_ports import ReservedPorts
from penstock.serve.http.refusals import Refusals
from penstock.serve.messages import ChainLoaded, EngineUse, LoadModel, ModelLoaded, ModelState
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.repository.bundle_preparation import BundlePreparation
from penstock.serve.repository.load_deadlines import LoadDeadlines
from penstock.serve.repository.model_repository import ModelRepository
from penstock.serve.repository.network_exports import NetworkExports
from penstock.serve.repository.server_processes import TableMemory
from penstock.serve.settings import Settings
from penstock.serve.table.chain_counts import ChainCounts


async def serve_single(settings: Settings, listener: socket.socket, reserved: ReservedPorts) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        PenstockError: A bundle cannot be loaded, or a network is slower than the budget.
    """
    keep_freed_memory()
    process = SingleProcess(settings, listener, reserved)
    try:
        await process.run()
    finally:
        process.close()


@final
class SingleProcess:
    """Engine and front-end in this process's event loop.

    Args:
        settings: The server's settings.
        listener: The socket that clients connect to.
        reserved: The ports that are held against other servers, until a drain.
    """

    def __init__(self, settings: Settings, listener: socket.socket, reserved: ReservedPorts) -> None:
        loop = asyncio.get_running_loop()
        self._settings = settings
        self._listener = listener
        self._reserved = reserved
        self._loader = ModelLoader(settings, self._report, shared=False)
        max_read_ns = settings.batching.max_read_ns
        self._batch_loop = BatchLoop(self._work, call_soon=loop.call_soon, max_read_ns=max_read_ns)
        self._batch_loop.hold(self._loader.hold_ns, self._loader.gathers, loop.call_later)
        exports = NetworkExports(settings)
        trials = BundleTrials(settings, unexported=exports.has_failed)
        self._repository = ModelRepository(settings.models, self, preparation=BundlePreparation(trials.check, exports))
        self._deadlines = LoadDeadlines(settings.limits.load_timeout_s)
        self._front = FrontEnd(
            settings,
            listener,
            self._repository.change,
            index=0,
            wakes=[self._batch_loop.wake],
            batch_loop=self._batch_loop,
            demand=self._repository.demand,
        )
        self._stop = asyncio.Event()
        # Set by the second signal.
        self._hurry = asyncio.Event()

    @property
    def models(self) -> ModelRegistry:
        """The models that are served."""
        return self._front.models

    @property
    def refusals(self) -> Refusals:
        """The refusals of the HTTP connections."""
        return self._front.http.refusals

    def stop(self) -> None:
        """End `run`, as a signal does."""
        self._stop.set()

    async def run(self) -> None:
        """Load the models, and serve until a signal."""
        on_stop_signal(self._signalled)
        self._front.listen()
        loading = asyncio.create_task(self._repository.load_all())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            self._front.http.abort()
            end_at_once()
        loading.result()
        await self._front.started()
        announce(self._repository.announced, self._repository.fallbacks, self._listener, self._settings.network)
        await self._stop.wait()
        await wait_to_leave(self._settings.limits.leave_s, self._hurry)
        self._reserved.close()
        await self._front.drain(self._hurry.is_set)

    def close(self) -> None:
        """Unload the models."""
        self._loader.close()

    def _work(self) -> int:
        ran = self._loader.tick()
        if ran is None:
            return 0
        key, batch = ran
        rows = batch.run.size + batch.expire.size
        writer = self._front.attachments.writer(key)
        if not rows or writer is None:
            return rows
        start_ns = time.monotonic_ns()
        # The batch may have taken seconds.
        self._front.date.renew_if_due(start_ns)
        writer.collect()
        # Replies are written in the engine's own time here, so a batch takes that much longer.
        now_ns = time.monotonic_ns()
        self._loader.engines[key].costs.observe_handling((now_ns - start_ns) / rows)
        writer.refresh(self._batch_loop.reading_share, now_ns)
        return rows

    @property
    def engines(self) -> tuple[int, ...]:
        """The only engine, see `ServerProcesses`."""
        return (0,)

    async def load(self, command: LoadModel, engine: int) -> tuple[ModelLoaded, TableMemory]:
        """Load a model, see `ServerProcesses`."""
        loaded, table, _ = await self._deadlines.wait(command.key, self._loader.load(command))
        return loaded, table

    async def report_use(self, engine: int) -> EngineUse:
        """Report the use of memory, see `ServerProcesses`."""
        return await self._loader.report_use(0)

    def _report(self, key: int, activity: str) -> None:
        self._deadlines.begin_step(key, activity)
        self._repository.note_progress(key, activity)

    async def unload(self, key: int) -> None:
        """Unload a table, see `ServerProcesses`."""
        self._loader.unload(key)

    async def attach(self, loaded: ModelLoaded, memory: TableMemory) -> None:
        """Serve a table, see `ServerProcesses`."""
        self._front.attach(loaded, memory)

    async def retire(self, key: int) -> None:
        """Retire a table, see `ServerProcesses`."""
        await self._front.retire(key)

    async def load_chain(self, reference: str) -> ChainLoaded:
        """Serve a chain, see `ServerProcesses`."""
        chain = self._front.attach_chain(reference, ChainCounts.private())
        return ChainLoaded(key=0, name=chain.name, parts=chain.parts)

    def publish_state(self, state: ModelState) -> None:
        """Publish the state of a model, see `ServerProcesses`."""
        self._front.models.set_state(state)

    def _signalled(self) -> None:
        hurry = self._stop.is_set()
        if self._settings.limits.leave_s and not hurry:
            self._front.leave()
        else:
            self._front.begin_drain()
        if hurry:
            self._hurry.set()
            self._front.http.abort()
        self._stop.set()
