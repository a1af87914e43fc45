"""Makes bundles ready on the engine's side: the network, its table, its measured costs."""

import asyncio
import logging
import os
import time
from typing import final

import numpy as np
import torch

from penstock.core.errors import ServeError
from penstock.core.spec import Array
from penstock.runtime.load import Predictor, load
from penstock.serve.engine import Engine
from penstock.serve.engines import Engines
from penstock.serve.messages import Loaded, Order
from penstock.serve.settings import Settings
from penstock.serve.slots import SlotTable, TableLayout

log = logging.getLogger(__name__)

# The table takes at most this much memory, and never more slots than this.
TABLE_BYTES = 256 << 20
MOST_SLOTS = 4096
# By what share more threads must shorten a batch of so many rows to be used.
WORTHWHILE_THREADS = 0.75
TRIED_ROWS = 16
TRIED_RUNS = 5
TRIED_S = 0.1


@final
class EngineHost:
    """The models of one processor.

    Args:
        settings: How they are served.
        shared: Whether front-ends are processes of their own, so that tables must be in shared memory.
    """

    def __init__(self, settings: Settings, *, shared: bool) -> None:
        self._settings = settings
        self._shared = shared
        self._threads_chosen = False
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
            predictor = await asyncio.to_thread(self._predictor, order)
        else:
            predictor = self._predictor(order)
        if not self._threads_chosen:
            self._threads_chosen = True
            choose_threads(predictor, len(os.sched_getaffinity(0)))
        layout = _layout(predictor, settings.frontend_processes or 1)
        table, descriptor = SlotTable.shared(layout) if self._shared else (SlotTable.private(layout), -1)
        engine = Engine(
            predictor.executor,
            table,
            budget_ns=settings.budget_ns,
            clock_ns=time.monotonic_ns,
            max_rows=settings.max_batch,
            traced=settings.otlp_endpoint is not None,
        )
        for _ in engine.measuring(predictor.files.golden.inputs[0]):
            await asyncio.sleep(0)
        name = order.name or predictor.application.name
        log.info(
            "%s measured on %d threads: 1 row %.2f ms, %d rows %.2f ms, the largest batch within %g ms",
            name,
            torch.get_num_threads(),
            engine.costs.of(1) / 1e6,
            engine.costs.largest,
            engine.costs.of(engine.costs.largest) / 1e6,
            settings.latency_ms,
        )
        self.by_key[order.key] = engine
        self.engines.add(order.key, engine)
        manifest = predictor.files.manifest
        loaded = Loaded(
            order=Order(key=order.key, name=name, version=order.version, bundle=order.bundle),
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

    def _predictor(self, order: Order) -> Predictor:
        return load(order.bundle, app=self._settings.app, accept_changed=self._settings.accept_changed_app)


def choose_threads(predictor: Predictor, cores: int) -> None:
    """Give the network all cores if that makes a batch clearly faster, else one.

    Threads that gain little cost much as soon as anything else runs on the machine: each waits for the slowest.
    """
    example = predictor.files.golden.inputs[:1]
    batch = np.repeat(example, TRIED_ROWS, 0)
    times_s = {threads: _batch_s(predictor, batch, threads) for threads in {cores, 1}}
    threads = cores if times_s[cores] < WORTHWHILE_THREADS * times_s[1] else 1
    torch.set_num_threads(threads)
    log.info(
        "%d rows take %s; the network gets %d threads",
        TRIED_ROWS,
        ", ".join(f"{seconds * 1e3:.2f} ms with {count}" for count, seconds in sorted(times_s.items())),
        threads,
    )


def _batch_s(predictor: Predictor, batch: Array, threads: int) -> float:
    torch.set_num_threads(threads)
    times_s: list[float] = []
    # The first run allocates; a network that takes long is judged by fewer runs.
    while len(times_s) <= TRIED_RUNS and sum(times_s) < TRIED_S:
        start_s = time.perf_counter()
        predictor.executor.predict(batch)
        times_s.append(time.perf_counter() - start_s)
    return float(np.median(times_s[1:] or times_s))


def _layout(predictor: Predictor, frontends: int) -> TableLayout:
    application = predictor.application
    chunk_bytes = (application.input.nbytes + application.output.nbytes) * application.chunks
    each = min(MOST_SLOTS, TABLE_BYTES // chunk_bytes) // frontends
    if each < 1:
        raise ServeError(
            f"one chunk of {application.input.describe()} takes {chunk_bytes / 1e6:,.0f} MB, more than the slot table "
            f"of {frontends} front-ends may have ({TABLE_BYTES >> 20} MB)."
        )
    return TableLayout(
        slots=each * frontends,
        chunks=application.chunks,
        input=application.input,
        output=application.output,
        frontends=frontends,
    )
