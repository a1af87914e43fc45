"""Models of one device: loading bundles, making their tables, measuring their batch costs."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import final

from penstock.core.application import Application
from penstock.core.decode import slow_jpeg
from penstock.core.errors import ApplicationError, DeviceLost, PenstockError, ServeError
from penstock.core.spec import Array
from penstock.core.wording.counted import counted
from penstock.runtime.execution import Execution
from penstock.runtime.executor import Executor
from penstock.runtime.executor_choice import first_chunk, make_runnable, resolved_device
from penstock.runtime.generation.generating import GeneratingAhead, GeneratingInTurn
from penstock.runtime.loading_steps import LoadingSteps
from penstock.runtime.memory_use import memory_use, release_memory
from penstock.runtime.runnable import Runnable
from penstock.serve.engine.batch_measurement import MAX_BUDGET_SHARE
from penstock.serve.engine.compiling import Compiling
from penstock.serve.engine.engine import Engine
from penstock.serve.engine.generation_engine import GenerationEngine
from penstock.serve.engine.multiplex import Multiplexer
from penstock.serve.engine.results import Wake, no_wake
from penstock.serve.engine.scheduler import BatchSchedule
from penstock.serve.messages import EngineUse, LoadModel, ModelLoaded
from penstock.serve.pinned_content import pinned_bundle, pinned_reference
from penstock.serve.settings import Settings
from penstock.serve.table.generation_costs import budgets_ns
from penstock.serve.table.lengths import LengthGrid
from penstock.serve.table.slots import STREAMS_OPEN, SlotTable, TableLayout, results_of

log = logging.getLogger(__name__)

MAX_TABLE_BYTES = 512 << 20
MAX_SLOTS = 4096
# Live streams, each with a state of its own on the device.
MAX_STREAMS_GPU, MAX_STREAMS_CPU = 32_768, 4096
MAX_FALLBACK = 1000
# Of a live stream whose state goes into a ticket, which a client keeps and a message carries.
MAX_STATE_BYTES = 256 << 10
# Time for threads that compile to end, less than the supervisor gives an engine.
END_S = 2.0
# Exit status of a process whose GPU failed.
DEVICE_LOST = 70


def engines_on(device: str, devices: tuple[str, ...]) -> int:
    """Count the engines on a device; `cuda` and `cuda:0` are the same one.

    Args:
        device: Device of one engine.
        devices: Devices of all engines.
    """
    return [_numbered(each) for each in devices].count(_numbered(device))


def _measured_chunk(runnable: Runnable) -> Array:
    """Take the golden example with which batches are measured: the longest where lengths vary."""
    examples = runnable.files.golden.inputs
    grid = LengthGrid.of(runnable.application.input)
    if grid is None:
        return first_chunk(runnable.application, examples)
    return examples[int(grid.lengths_of(examples).argmax())]


def _numbered(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


@final
class ModelLoader:
    """Loads the models of one engine process and runs their batches.

    Args:
        settings: Settings of the server.
        report: Called in the event loop with the key of a table and the present step of loading its model.
        shared: Front-ends are separate processes, so that tables must be in shared memory.
        index: Index of this engine.
        wake: Wakes front-ends in other processes, when there are results for them.
    """

    def __init__(
        self,
        settings: Settings,
        report: Callable[[int, str], None],
        *,
        shared: bool,
        index: int = 0,
        wake: Wake = no_wake,
    ) -> None:
        self._wake = wake
        self._settings = settings
        self._report = report
        self._shared = shared
        self._index = index
        execution = settings.execution
        device = execution.devices[index]
        self.device = resolved_device(device, execution.executor)
        # Engines on the same device, usually the CPU, divide its cores and memory.
        self._sharing = engines_on(device, execution.devices)
        self._multiplexer = Multiplexer(time.monotonic_ns)
        self.engines: dict[int, Engine | GenerationEngine] = {}
        self._tables: dict[int, SlotTable] = {}
        self._compiling: dict[int, Compiling] = {}
        self._executors: dict[int, Executor] = {}

    def tick(self) -> tuple[int, BatchSchedule] | None:
        """Run the next batch of all models, see `Multiplexer.tick`; a failed GPU ends the process."""
        try:
            return self._multiplexer.tick()
        except DeviceLost as error:
            # A process cannot recover its CUDA context: the supervisor, or the service manager, starts another one.
            log.critical("%s", error)
            os._exit(DEVICE_LOST)

    @property
    def has_ready_rows(self) -> bool:
        """True if a batch of one-shot requests can run."""
        return any((engine := self._one_shot(key)) is not None and engine.has_ready_rows for key in self.engines)

    @property
    def in_use(self) -> int:
        """Number of slots in use by one-shot requests, also those that are answered and not yet read."""
        return sum(table.in_use for key, table in self._tables.items() if self._one_shot(key) is not None)

    def is_one_shot(self, key: int) -> bool:
        """True for a table of requests with one answer each: no live streams, and no answers that take steps."""
        return self._one_shot(key) is not None

    def _one_shot(self, key: int) -> Engine | None:
        engine = self.engines[key]
        return engine if isinstance(engine, Engine) and self._tables[key].chunks == 1 else None

    def hold_ns(self) -> int:
        """Compute how long the next batch waits for more rows, see `Multiplexer`."""
        return self._multiplexer.hold_ns()

    def gathers(self) -> bool:
        """Tell whether the next batch should have more of the rows that come, see `Multiplexer`."""
        return self._multiplexer.gathers

    async def load(self, command: LoadModel) -> tuple[ModelLoaded, SlotTable, int]:
        """Load a model while the others are served.

        Returns:
            The message for the front-ends, the table, and the descriptor of its memory (-1 where it is private).

        Raises:
            PenstockError: The bundle cannot be loaded, or the network is slower than the budget.
        """
        try:
            return await self._load(command)
        except PenstockError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            # Loading and measuring run the application's network, which may raise anything; other models go on.
            log.exception("%s cannot be loaded", command.bundle)
            raise ApplicationError(f"{command.bundle}: {type(error).__name__}: {error}") from error

    async def _load(self, command: LoadModel) -> tuple[ModelLoaded, SlotTable, int]:
        start_s = time.monotonic()
        # In a thread: on a GPU the first call loads torch.
        before = await asyncio.to_thread(memory_use, self.device)
        with ExitStack() as on_failure:
            progress = self._progress(command.key)
            runnable, table, descriptor, engine = await asyncio.to_thread(self._build, command, progress, on_failure)
            with progress.step("measuring batches", runnable.application.name):
                for _ in engine.measuring(_measured_chunk(runnable)):
                    await asyncio.sleep(0)
            on_failure.pop_all()
        if isinstance(runnable.executor, Executor):
            self._executors[command.key] = runnable.executor
        layout = table.layout
        name = command.name or runnable.application.name
        log.info(
            "%s measured: %s, the largest batch within %g ms",
            name,
            engine.describe_costs(),
            self._settings.batching.latency_ms,
        )
        self.engines[command.key] = engine
        self._tables[command.key] = table
        self._multiplexer.add(command.key, engine)
        if runnable.compile_ahead is not None:
            assert isinstance(engine, Engine), engine
            assert isinstance(runnable.executor, Executor), runnable.executor
            self._compiling[command.key] = Compiling(
                runnable.compile_ahead,
                engine,
                table,
                replace(runnable, fallback=_fallback_of(runnable)),
                max_rows=min(runnable.executor.max_rows, table.slots),
                max_ns=self._settings.batching.budget_ns * MAX_BUDGET_SHARE,
            )
        manifest = runnable.files.manifest
        loaded = ModelLoaded(
            command=replace(command, name=name),
            engine=self._index,
            device=self.device,
            slots=layout.slots,
            frontends=layout.frontends,
            bundle_hash=manifest.content_hash,
            application=self._settings.models.app or manifest.reference,
            runs_by=runnable.runs_by,
            # A message has a limited size.
            fallback=_fallback_of(runnable)[:MAX_FALLBACK],
            load_s=round(time.monotonic() - start_s, 3),
            memory_bytes=memory_use(self.device).used_bytes - before.used_bytes,
            table_bytes=layout.nbytes,
            state_bytes=layout.state_bytes,
            state_layout=runnable.executor.state_layout if isinstance(runnable.executor, Executor) else "",
        )
        log.info(
            "%s loaded in %.1f s; meanwhile the memory in use grew by %.0f MB, and its table has %.0f MB",
            name,
            loaded.load_s,
            loaded.memory_bytes / 1e6,
            loaded.table_bytes / 1e6,
        )
        return loaded, table, descriptor

    def unload(self, key: int) -> None:
        """Unload a model; no request may wait for it any more."""
        if (compiling := self._compiling.pop(key, None)) is not None:
            compiling.close()
        # It refers to the network, whose memory is given back below.
        del compiling
        if (executor := self._executors.pop(key, None)) is not None:
            executor.close()
        del executor
        if self.engines.pop(key, None) is not None:
            self._tables.pop(key)
            self._multiplexer.remove(key)
            if self._settings.models.on_demand:
                release_memory(self.device)

    async def report_use(self, key: int) -> EngineUse:
        """Report when each table was used last, and the memory in use.

        Args:
            key: Key of the report.
        """
        memory = await asyncio.to_thread(memory_use, self.device)
        tables = self._tables.values()
        return EngineUse(
            key=key,
            tables=tuple(self._tables),
            used_ns=tuple(self._multiplexer.last_batch_ns(each) for each in self._tables),
            busy=tuple(bool(each.held.any() or each.counts[:, STREAMS_OPEN].any()) for each in tables),
            used_bytes=memory.used_bytes,
            # Engines on a CPU report memory of their own, and those on one GPU that of all its processes.
            total_bytes=memory.total_bytes // (self._sharing if self.device.startswith("cpu") else 1),
        )

    def close(self) -> None:
        """End other processes, and stop compiling: at the end of the process, a thread within torch would crash it."""
        for executor in self._executors.values():
            executor.close()
        end_s = time.monotonic() + END_S
        for compiling in self._compiling.values():
            compiling.close()
        for compiling in self._compiling.values():
            compiling.join(max(0.0, end_s - time.monotonic()))

    def _progress(self, key: int) -> LoadingSteps:
        loop = asyncio.get_running_loop()

        def report(activity: str) -> None:
            # Steps begin in the thread that loads.
            loop.call_soon_threadsafe(self._report, key, activity)

        return LoadingSteps(report, self._settings.execution.cache)

    def _build(
        self, command: LoadModel, progress: LoadingSteps, on_failure: ExitStack
    ) -> tuple[Runnable, SlotTable, int, Engine | GenerationEngine]:
        runnable = self._runnable(command, progress)
        if isinstance(runnable.executor, Executor):
            on_failure.callback(runnable.executor.close)
        layout = replace(
            self._layout(runnable.application, runnable.slots), state_bytes=self._state_bytes(runnable, command.name)
        )
        table, descriptor = SlotTable.shared(layout) if self._shared else (SlotTable.private(layout), -1)
        if self._shared:
            on_failure.callback(os.close, descriptor)
        return runnable, table, descriptor, self._engine(runnable, table)

    def _state_bytes(self, runnable: Runnable, name: str) -> int:
        """Bytes of a state that goes through the table for tickets; 0 where there are none."""
        executor, application = runnable.executor, runnable.application
        if not self._settings.access.ticket_keys or application.live is None or not isinstance(executor, Executor):
            return 0
        if executor.state_bytes > MAX_STATE_BYTES:
            log.warning(
                "live streams of %s get no tickets: a state has %d bytes, and %d are carried at most",
                name or application.name,
                executor.state_bytes,
                MAX_STATE_BYTES,
            )
            return 0
        return executor.state_bytes

    def _engine(self, runnable: Runnable, table: SlotTable) -> Engine | GenerationEngine:
        settings, generate = self._settings, runnable.application.generate
        traced = settings.telemetry.otlp_endpoint is not None
        most = settings.batching.max_batch
        if generate is None:
            assert isinstance(runnable.executor, Executor), runnable.executor
            return Engine(
                runnable.executor,
                table,
                budget_ns=settings.batching.budget_ns,
                clock_ns=time.monotonic_ns,
                max_rows=most,
                traced=traced,
                wake=self._wake,
            )
        assert isinstance(runnable.executor, GeneratingInTurn | GeneratingAhead), runnable.executor
        first_ns, step_ns = budgets_ns(generate, settings.batching.budget_ns)
        return GenerationEngine(
            runnable.executor,
            table,
            first_budget_ns=first_ns,
            step_budget_ns=step_ns,
            clock_ns=time.monotonic_ns,
            max_rows=most,
            traced=traced,
            wake=self._wake,
        )

    def _runnable(self, command: LoadModel, progress: LoadingSteps) -> Runnable:
        models, execution = self._settings.models, self._settings.execution
        pinned = pinned_reference(command.pinned)
        return make_runnable(
            pinned_bundle(command.pinned, command.bundle),
            Execution(
                cache=execution.cache,
                cores=max(1, len(os.sched_getaffinity(0)) // self._sharing),
                sharing=self._sharing,
                app=pinned or models.app,
                accept_changed=models.accept_changed_app,
                choice=execution.executor,
                device=self.device,
                precision=execution.precision,
                compile=execution.compile,
                max_rows=self._settings.batching.max_batch,
                batch_s=self._settings.batching.budget_ns * MAX_BUDGET_SHARE / 1e9,
                exact=execution.exact,
                graph_memory=execution.graph_memory,
                progress=progress,
                export_stall_s=self._settings.limits.load_timeout_s,
                unexported=command.unexported,
            ),
            lambda application: self._layout(application).slots,
        )

    def _layout(self, application: Application, states: int | None = None) -> TableLayout:
        frontends = self._settings.frontend_processes or 1
        most = MAX_SLOTS
        if application.live is not None:
            most = MAX_STREAMS_CPU if self.device == "cpu" else MAX_STREAMS_GPU
        if states is not None and states < frontends:
            raise ServeError(
                f"the device has memory for the states of {counted(states, 'stream')}, fewer than "
                f"{frontends} front-ends; lower --frontends."
            )
        chunk_bytes = application.input.nbytes * application.chunks + application.output.nbytes * results_of(
            application
        )
        each = min(most, states or most, MAX_TABLE_BYTES // chunk_bytes) // frontends
        if each < 1:
            raise ServeError(
                f"one chunk of {application.input.describe()} takes {chunk_bytes / 1e6:,.0f} MB, more than the slot "
                f"table of {frontends} front-ends may have ({MAX_TABLE_BYTES >> 20} MB)."
            )
        return TableLayout.of(application, slots=each * frontends, frontends=frontends)


def _fallback_of(runnable: Runnable) -> str:
    decoding = slow_jpeg() if "image/jpeg" in runnable.application.accepts else ""
    return " ".join(filter(None, (runnable.fallback or runnable.executor.fallback, decoding)))
