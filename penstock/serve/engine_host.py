"""Makes bundles ready on the engine's side: the network, its table, its measured costs."""

import asyncio
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import final

from penstock.core.application import Application
from penstock.core.errors import ServeError
from penstock.runtime.serving import Execution, Runnable, as_choice, first_chunk, make_runnable, resolved_device
from penstock.serve.engine import Engine
from penstock.serve.engines import Engines
from penstock.serve.messages import Loaded, Order
from penstock.serve.settings import Settings
from penstock.serve.slots import SlotTable, TableLayout

log = logging.getLogger(__name__)

# The table takes at most this much memory, and never more slots than this.
TABLE_BYTES = 512 << 20
MOST_SLOTS = 4096
# The exit status of a process whose GPU failed: nothing can be cleaned up with it.
DEVICE_LOST = 70
# Of live streams, each of which has a state of its own there.
MOST_STREAMS_GPU, MOST_STREAMS_CPU = 32_768, 4096


def engines_on(device: str, devices: tuple[str, ...]) -> int:
    """How many engines run on the device of one of them, whatever they call it: `cuda` is the first GPU.

    Args:
        device: As it is named for that engine.
        devices: As they are named for all.
    """
    return [_numbered(each) for each in devices].count(_numbered(device))


def _numbered(device: str) -> str:
    return "cuda:0" if device == "cuda" else device


@final
class EngineHost:
    """The models of one processor.

    Args:
        settings: How they are served.
        shared: Whether front-ends are processes of their own, so that tables must be in shared memory.
        index: Which of the engines this is.
    """

    def __init__(self, settings: Settings, *, shared: bool, index: int = 0) -> None:
        self._settings = settings
        self._shared = shared
        self._index = index
        device = settings.devices[index]
        self._device = resolved_device(device, as_choice(settings.executor))
        # Engines of one device, which is one machine's CPU mostly, have a part of it each.
        self._sharing = engines_on(device, settings.devices)
        self.engines = Engines(time.monotonic_ns)
        self.by_key: dict[int, Engine] = {}

    async def load(self, order: Order) -> tuple[Loaded, SlotTable, int]:
        """Make a model ready; what is served already goes on being served meanwhile.

        Returns:
            What front-ends need to know, its table, and the descriptor of its memory (-1 where it is private).

        Raises:
            PenstockError: The bundle cannot be loaded, or the network is slower than the budget.
        """
        settings = self._settings
        if self.by_key or self._shared:
            runnable, table, descriptor, engine = await asyncio.to_thread(self._made, order)
        else:
            runnable, table, descriptor, engine = self._made(order)
        layout = table.layout
        for _ in engine.measuring(first_chunk(runnable.application, runnable.files.golden.inputs)):
            await asyncio.sleep(0)
        name = order.name or runnable.application.name
        log.info(
            "%s measured: 1 row %.2f ms, %d rows %.2f ms, the largest batch within %g ms",
            name,
            engine.costs.of(1) / 1e6,
            engine.costs.largest,
            engine.costs.of(engine.costs.largest) / 1e6,
            settings.latency_ms,
        )
        self.by_key[order.key] = engine
        self.engines.add(order.key, engine)
        manifest = runnable.files.manifest
        loaded = Loaded(
            order=replace(order, name=name),
            engine=self._index,
            device=self._device,
            slots=layout.slots,
            frontends=layout.frontends,
            bundle_hash=manifest.content_hash,
            application=settings.app or manifest.reference,
        )
        return loaded, table, descriptor

    def unload(self, key: int) -> None:
        """Forget a model that nobody waits for any more."""
        if self.by_key.pop(key, None) is not None:
            self.engines.remove(key)

    def _made(self, order: Order) -> tuple[Runnable, SlotTable, int, Engine]:
        settings = self._settings
        runnable = self._runnable(order)
        layout = self._layout(runnable.application, runnable.slots)
        table, descriptor = SlotTable.shared(layout) if self._shared else (SlotTable.private(layout), -1)
        engine = Engine(
            runnable.executor,
            table,
            budget_ns=settings.budget_ns,
            clock_ns=time.monotonic_ns,
            max_rows=settings.max_batch,
            traced=settings.otlp_endpoint is not None,
        )
        return runnable, table, descriptor, engine

    def _runnable(self, order: Order) -> Runnable:
        settings = self._settings
        return make_runnable(
            Path(order.bundle),
            app=settings.app,
            accept_changed=settings.accept_changed_app,
            how=Execution(
                cache=settings.cache,
                cores=max(1, len(os.sched_getaffinity(0)) // self._sharing),
                sharing=self._sharing,
                choice=as_choice(settings.executor),
                device=self._device,
                precision=settings.precision,
                max_rows=settings.max_batch,
                exact=settings.exact,
            ),
            slots=lambda application: self._layout(application).slots,
        )

    def _layout(self, application: Application, room: int | None = None) -> TableLayout:
        frontends = self._settings.frontend_processes or 1
        most = MOST_SLOTS
        if application.live is not None:
            most = MOST_STREAMS_CPU if self._device == "cpu" else MOST_STREAMS_GPU
        chunk_bytes = (application.input.nbytes + application.output.nbytes) * application.chunks
        if room is not None and room < frontends:
            raise ServeError(f"there is room for the states of {room} streams, fewer than {frontends} front-ends.")
        most = most if room is None else min(most, room)
        each = min(most, TABLE_BYTES // chunk_bytes) // frontends
        if each < 1:
            raise ServeError(
                f"one chunk of {application.input.describe()} takes {chunk_bytes / 1e6:,.0f} MB, more than the slot "
                f"table of {frontends} front-ends may have ({TABLE_BYTES >> 20} MB)."
            )
        return TableLayout(
            slots=each * frontends,
            chunks=application.chunks,
            input=application.input,
            output=application.output,
            frontends=frontends,
        )
